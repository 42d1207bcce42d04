"""200 answers, and the rules that score each as right.

A row of answers.jsonl is [letters, ground truth, completion]: the letters of the RULES that score
the completion 1. `make parity` compares the scores with verl's; see tests/parity/verl_rewards.py.
"""

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from streamrl.rewards.kinds import math_answers
from streamrl.user_code.reward_result import RewardResult

RULES: Mapping[str, Callable[[str, str], RewardResult]] = {
    "s": math_answers.judge_gsm8k,
    "f": partial(math_answers.judge_gsm8k, method="flexible"),
    "m": math_answers.judge_math,
    "d": math_answers.judge_dapo_math,
    "b": partial(math_answers.judge_dapo_math, strict_box=True),
}
"""Matchers by their letter in answers.jsonl."""
ANSWERS: list[tuple[str, str, str]] = [
    (completion, truth, letters)
    for letters, truth, completion in map(
        json.loads, Path(__file__).with_name("answers.jsonl").read_text().splitlines()
    )
]
"""Completion, ground truth, and the letters of the matchers that score it 1."""

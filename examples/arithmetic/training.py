"""Pretraining texts of the base model: sums solved one operation at a time, some with slips."""

import random
import re

from examples.toy_models.base_model import Lessons
from examples.toy_models.rows import Row, get_question
from examples.toy_models.training import TrainingRecipe

# A problem of three numbers has two operations that may be wrong.
RECIPE = TrainingRecipe(
    num_steps=380,
    slip_rate=0.33,
    optimizer="adamw",
    lr=2e-3,
    bar={"eval_greedy": 0.85},
)
SLIPS = (-1, 1)
# The number after the last equals sign: "12-3=9" answers 9.
ANSWER = re.compile(r"(?:\A|=)(-?\d+)\Z")


def write_solution(row: Row, rng: random.Random, slip_rate: float) -> str:
    """Return the text after `7+5-3=`: one operation at a time, `12-3=9`.

    slip_rate: fraction of wrong operations. Later operations continue from a wrong result.
    """
    first, *later = re.findall(r"[+-]?\d", get_question(row))
    total, parts = int(first), []
    for i, term in enumerate(later):
        total += int(term)
        if rng.random() < slip_rate:
            total += rng.choice(SLIPS)
        parts.append(f"{total}" + "".join(later[i + 1 :]))
    return "=".join(parts)


def parse_answer(completion: str) -> int | None:
    """Return the number at the end of a completion; None without a number."""
    match = ANSWER.search(completion)
    return int(match[1]) if match else None


def is_right(row: Row, completion: str) -> bool:
    """Return whether a completion ends with the row's answer."""
    return parse_answer(completion) == int(row["reward_model"]["ground_truth"])


LESSONS = Lessons(write=write_solution, is_right=is_right, max_new_tokens=12)

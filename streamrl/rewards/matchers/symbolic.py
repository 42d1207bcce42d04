"""Symbolic matcher: math-verify compares answer and ground truth, so x+1 equals 1+x.

math-verify may run forever (it evaluates 10^{10^{10}}). Its timeout uses signals, which work in the
main thread only, and is disabled here: call this matcher in a process that can be killed.
"""

import logging
import re
from typing import Any

from streamrl.errors import RewardError
from streamrl.rewards.interface.reward_result import RewardResult
from streamrl.rewards.matchers.matcher import (
    GroundTruth,
    make_missing_answer_result,
    parse_truth_text,
)

MIN_PROSE_WORDS = 3
"""Words of a ground truth, LaTeX commands left out, from which it is prose. A unit is one word."""


def validate_truth(truth: GroundTruth) -> str:
    """Return the truth as text. Raises RewardError for prose, too.

    math-verify reads words as products of their letters, to which no completion is equal.
    """
    text = parse_truth_text(truth)
    if len(re.findall(r"(?<![\\A-Za-z])[A-Za-z]{2,}", text)) >= MIN_PROSE_WORDS:
        raise RewardError(
            f"ground_truth is prose, which math-verify cannot compare: {text[:80]!r}; use kind"
            " exact, or judge"
        )
    return text


def judge_completion(completion: str, truth: GroundTruth) -> RewardResult:
    r"""Score 1 if the last answer of the completion equals the truth, else 0.

    truth: LaTeX, with or without $ or \boxed{}, or a number. Precedence in the completion:
    \boxed{}, "the answer is", other LaTeX, bare numbers. Raises RewardError if math-verify cannot
    parse the truth.
    """
    # Imported here: the import takes more than 0.5 s.
    from math_verify import verify

    text = validate_truth(truth)
    expected = _parse_math(text if "$" in text or "\\boxed" in text else f"\\boxed{{{text}}}")
    if not expected:
        raise RewardError(f"ground_truth cannot be parsed by math-verify: {truth!r}")
    parsed = _parse_math(completion)
    if not parsed:
        return make_missing_answer_result("mathematics that math-verify can read")
    right = bool(verify(expected, parsed, timeout_seconds=None))
    return RewardResult.from_correctness(right, _format_answer(parsed))


def _parse_math(text: str) -> list[Any]:
    from math_verify import parse

    # Silence its warning about the disabled timeout; the worker pool enforces a deadline.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return list(parse(text, parsing_timeout=None))


def _format_answer(parsed: list[Any]) -> str:
    try:
        return str(parsed[0])
    except ValueError:  # more digits than sys.get_int_max_str_digits()
        return str(parsed[-1])

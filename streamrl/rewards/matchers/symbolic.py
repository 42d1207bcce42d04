"""Symbolic equality: math-verify reads both answers as mathematics, so x+1 is 1+x.

It may take forever (10^{10^{10}} is worked out), and its own deadline is a signal, which works in
a main thread only. So it has none here: call it in a process that can be killed.
"""

import logging
from typing import Any

from streamrl.errors import RewardError
from streamrl.rewards.interface.verdict import RewardResult
from streamrl.rewards.matchers.matcher import (
    GroundTruth,
    make_missing_answer_result,
    make_result,
    parse_truth_text,
)


def judge_completion(completion: str, truth: GroundTruth) -> RewardResult:
    r"""1 if what the completion says last equals the truth, else 0.

    The truth is LaTeX, with or without $ or \boxed{}, or a number. In the completion a \boxed{}
    goes before "the answer is", that before other LaTeX, that before a bare number. Raises
    RewardError if math-verify cannot read the truth.
    """
    # More than half a second, which only those who use it should wait.
    from math_verify import verify

    text = validate_truth(truth)
    expected = _parse_math(text if "$" in text or "\\boxed" in text else f"\\boxed{{{text}}}")
    if not expected:
        raise RewardError(f"ground_truth is no mathematics that math-verify can read: {truth!r}")
    found = _parse_math(completion)
    if not found:
        return make_missing_answer_result("mathematics that math-verify can read")
    right = bool(verify(expected, found, timeout_seconds=None))
    return make_result(right, score=float(right), answer=_format_answer(found))


def validate_truth(truth: GroundTruth) -> str:
    """The text of it. Raises RewardError if it is neither text nor an int; it is not parsed."""
    return parse_truth_text(truth)


def _parse_math(text: str) -> list[Any]:
    from math_verify import parse

    # It warns that nobody bounds the time. The pool does.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return list(parse(text, parsing_timeout=None))


def _format_answer(found: list[Any]) -> str:
    """The same text for what is written differently: the first reading, as sympy prints it."""
    try:
        return str(found[0])
    except ValueError:  # an integer of more digits than Python prints
        return str(found[-1])

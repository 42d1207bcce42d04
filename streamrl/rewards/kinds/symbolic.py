"""Worker of kind `symbolic`: compares answers with math-verify, so x+1 equals 1+x.

math-verify may run forever (it evaluates 10^{10^{10}}). Its timeout uses signals, which work in the
main thread only, and is disabled here: this module runs in a process that can be killed. Its import
takes more than 0.5 s.
"""

import logging
from collections.abc import Callable
from typing import Any

from math_verify import parse, verify

from streamrl.errors import RewardError
from streamrl.rewards.interface.answers import make_missing_answer_result
from streamrl.rewards.kinds.math_answers import validate_symbolic_truth
from streamrl.user_code.reward_result import RewardResult

# Silence its warning about the disabled timeout; the worker pool enforces a deadline.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def make_symbolic_handler(_: None) -> Callable[[tuple[Any, str]], RewardResult]:
    """Return the handler of a worker of SymbolicReward: (truth, completion) to RewardResult."""
    return lambda request: judge_symbolic(request[1], request[0])


def judge_symbolic(completion: str, truth: Any) -> RewardResult:
    r"""Score 1 if the last answer of the completion equals the truth, else 0.

    truth: LaTeX, with or without $ or \boxed{}, or a number. Precedence in the completion:
    \boxed{}, "the answer is", other LaTeX, bare numbers. Raises RewardError if math-verify cannot
    parse the truth.
    """
    text = validate_symbolic_truth(truth)
    expected = _parse_math(text if "$" in text or "\\boxed" in text else f"\\boxed{{{text}}}")
    if not expected:
        raise RewardError(f"ground_truth cannot be parsed by math-verify: {truth!r}")
    parsed = _parse_math(completion)
    if not parsed:
        return make_missing_answer_result("mathematics that math-verify can read")
    right = bool(verify(expected, parsed, timeout_seconds=None))
    return RewardResult.from_correctness(right, _format_answer(parsed))


def _parse_math(text: str) -> list[Any]:
    return list(parse(text, parsing_timeout=None))


def _format_answer(parsed: list[Any]) -> str:
    try:
        return str(parsed[0])
    except ValueError:  # more digits than sys.get_int_max_str_digits()
        return str(parsed[-1])

"""GSM8K matcher: compares the last number of a completion with the ground truth.

Dataset of Cobbe et al. 2021 (arXiv 2110.14168), scores of verl; docs/rewards_reference.md lists the
differences.
"""

import re

from streamrl.errors import ConfigError, RewardError
from streamrl.rewards.interface.reward_result import RewardResult
from streamrl.rewards.matchers.matcher import (
    GroundTruth,
    make_missing_answer_result,
    parse_truth_text,
)

#: Only the end of a completion counts (as in verl).
WINDOW_CHARS = 300
METHODS = ("strict", "flexible")
_MARKED_NUMBER = re.compile(r"#### (-?[0-9.,]+)")
_NUMBER = re.compile(r"-?[0-9.,]+")


def judge_completion(
    completion: str, truth: GroundTruth, *, method: str = "strict"
) -> RewardResult:
    """Score 1 if the completion's number equals the truth as text without commas, else 0.

    method: strict takes the last number after "#### "; flexible takes the last number anywhere,
        without a trailing full stop. Raises RewardError for an unusable truth and ConfigError for
        an unknown method.
    """
    if method not in METHODS:
        raise ConfigError(f"rewards.method={method}: must be one of {', '.join(METHODS)}")
    expected = validate_truth(truth)
    end = completion[-WINDOW_CHARS:]
    if method == "strict":
        numbers, missing = _MARKED_NUMBER.findall(end), "#### and a number"
    else:
        numbers, missing = [n for n in _NUMBER.findall(end) if _has_digit(n)], "number"
    if not numbers:
        return make_missing_answer_result(f"{missing} in the last {WINDOW_CHARS} characters")
    answer = numbers[-1].replace(",", "")
    if method == "flexible":
        answer, expected = answer.rstrip("."), expected.rstrip(".")
    return RewardResult.from_correctness(answer == expected, answer)


def validate_truth(truth: GroundTruth) -> str:
    """Return the ground truth without commas. Raises RewardError unless in decimal digits."""
    number = parse_truth_text(truth)
    if not _NUMBER.fullmatch(number) or not _has_digit(number):
        raise RewardError(f"ground_truth must be a number in decimal digits, is {truth!r}")
    return number.replace(",", "")


def _has_digit(number: str) -> bool:
    return any("0" <= character <= "9" for character in number)

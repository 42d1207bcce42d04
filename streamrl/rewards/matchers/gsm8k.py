"""GSM8K: the last number of a completion is the ground truth's (Cobbe et al. 2021).

Scores as verl does; the differences are in docs/rewards_reference.md.
"""

import re

from streamrl.errors import ConfigError, RewardError
from streamrl.rewards.interface.verdict import RewardResult
from streamrl.rewards.matchers.matcher import (
    GroundTruth,
    make_missing_answer_result,
    make_result,
    parse_truth_text,
)

#: Only the end of a completion is read, characters.
WINDOW_CHARS = 300
METHODS = ("strict", "flexible")
_MARKED_NUMBER = re.compile(r"#### (-?[0-9.,]+)")
_NUMBER = re.compile(r"-?[0-9.,]+")


def judge_completion(
    completion: str, truth: GroundTruth, *, method: str = "strict"
) -> RewardResult:
    """1 if the number is the truth's to the letter, thousands commas aside, else 0.

    method strict: the last number that follows "#### "; flexible: the last number, wherever it is,
    without the full stop of its sentence. Raises RewardError, and ConfigError for another method.
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
    return make_result(answer == expected, score=float(answer == expected), answer=answer)


def validate_truth(truth: GroundTruth) -> str:
    """The number without commas. Raises RewardError if it is not one in decimal digits."""
    number = parse_truth_text(truth)
    if not _NUMBER.fullmatch(number) or not _has_digit(number):
        raise RewardError(f"ground_truth must be a number in decimal digits, is {truth!r}")
    return number.replace(",", "")


def _has_digit(number: str) -> bool:
    return any("0" <= character <= "9" for character in number)

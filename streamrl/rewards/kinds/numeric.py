"""Kind `numeric`: 1 if the answer equals the ground truth as an exact number, else 0."""

import re
from fractions import Fraction
from typing import Any

from streamrl.errors import RewardError
from streamrl.rewards.interface.extract import PatternOptions, extract_answer
from streamrl.rewards.interface.reward import RuleReward
from streamrl.rewards.interface.verdict import RewardResult

# Bounds on text and exponent protect memory: 1e999999999 as an integer takes 415 MB.
_MAX_CHARACTERS = 1000
_DECIMAL = r"(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,3})?"
_NUMBER = re.compile(rf"([+-]?{_DECIMAL})(?:/({_DECIMAL}))?", re.ASCII)


def build_numeric_reward(options: PatternOptions) -> RuleReward:
    """Build a reward that compares answer and ground truth as exact numbers.

    0.5, .50, 1/2 and 5e-1 are equal, as are 1,000 and 1000. The whole completion, or the whole
    match of `pattern`, must be a number; a number inside prose is wrong. The ground truth is such a
    text, an int or a float. The float 0.1 means the decimal 0.1, not its binary value.
    """
    pattern = options.compile_pattern()

    def judge(completion: str, truth: Any) -> RewardResult:
        answer = extract_answer(completion, pattern)
        number = None if answer is None else parse_number(answer)
        passes = number is not None and number == _parse_truth(truth)
        return RewardResult.from_correctness(passes, None if number is None else str(number))

    return RuleReward(judge, _parse_truth)


def parse_number(text: str) -> Fraction | None:
    """Parse a decimal (with exponent or thousands commas) or a fraction; None for other text."""
    match = _NUMBER.fullmatch(text.strip()) if len(text) <= _MAX_CHARACTERS else None
    if match is None:
        return None
    numerator, denominator = (
        Fraction(part.replace(",", "")) for part in (match[1], match[2] or "1")
    )
    return numerator / denominator if denominator else None


def _parse_truth(truth: Any) -> Fraction:
    """Return the ground truth as number. Raises RewardError."""
    number = None
    if isinstance(truth, str | int | float) and not isinstance(truth, bool):
        number = parse_number(str(truth))
    if number is None:
        raise RewardError(f"ground_truth must be a number, is {truth!r}")
    return number

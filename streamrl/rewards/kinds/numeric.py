"""Kind `numeric`: 1 where the answer is the ground truth as a number, else 0. Exact arithmetic."""

import re
from fractions import Fraction
from typing import Any

from streamrl.errors import RewardError
from streamrl.rewards.interface.extract import PatternOptions, extract_answer
from streamrl.rewards.interface.reward import RuleReward
from streamrl.rewards.interface.verdict import RewardResult

# Longer text, or a larger exponent, is no answer but an attack on memory: 1e999999999 has 124 MB.
_MAX_CHARACTERS = 1000
_DECIMAL = r"(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,3})?"
_NUMBER = re.compile(rf"([+-]?{_DECIMAL})(?:/({_DECIMAL}))?", re.ASCII)


def build_numeric_reward(options: PatternOptions) -> RuleReward:
    """Compares numbers: 0.5, .50, 1/2 and 5e-1 are the same, as are 1,000 and 1000.

    The whole completion must be the number, or with `pattern` the whole of what that finds: an
    answer buried in prose is wrong unless the pattern says where to look. ground_truth is such a
    text, an int or a float (0.1 is taken as the decimal that was written, not its binary value).
    """
    pattern = options.compile_pattern()

    def judge(completion: str, truth: Any) -> RewardResult:
        answer = extract_answer(completion, pattern)
        number = None if answer is None else parse_number(answer)
        passes = number is not None and number == _parse_truth(truth)
        return RewardResult.from_correctness(passes, None if number is None else str(number))

    return RuleReward(judge, _parse_truth)


def parse_number(text: str) -> Fraction | None:
    """The number a text is, exactly: decimal, with exponent or thousands commas, or a fraction."""
    found = _NUMBER.fullmatch(text.strip()) if len(text) <= _MAX_CHARACTERS else None
    if found is None:
        return None
    numerator, denominator = (
        Fraction(part.replace(",", "")) for part in (found[1], found[2] or "1")
    )
    return numerator / denominator if denominator else None


def _parse_truth(truth: Any) -> Fraction:
    number = None
    if isinstance(truth, str | int | float) and not isinstance(truth, bool):
        number = parse_number(str(truth))
    if number is None:
        raise RewardError(f"ground_truth must be a number, is {truth!r}")
    return number

"""Kinds `exact`, `numeric` and `regex`: compare what a pattern finds in a completion."""

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from omegaconf import MISSING

from streamrl.errors import RewardError
from streamrl.rewards.interface.extract import AnswerPattern
from streamrl.rewards.interface.reward import RuleReward
from streamrl.rewards.interface.reward_result import RewardResult
from streamrl.rewards.matchers.matcher import parse_truth_text

# Bounds on text and exponent protect memory: 1e999999999 as an integer takes 415 MB.
_MAX_CHARACTERS = 1000
_DECIMAL = r"(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,3})?"
_NUMBER = re.compile(rf"([+-]?{_DECIMAL})(?:/({_DECIMAL}))?", re.ASCII)


@dataclass
class PatternOptions:
    """Options of reward kinds that compare an answer with the ground truth.

    pattern: regular expression of the answer: first group of the last match; empty: the whole
        completion is the answer.
    """

    pattern: str = ""


@dataclass
class RegexOptions:
    """Options of kind regex.

    pattern: regular expression, searched anywhere in the completion.
    """

    pattern: str = MISSING


def build_exact_reward(options: PatternOptions) -> RuleReward:
    """Build a reward that compares answer and ground truth as stripped texts.

    A completion without a match is wrong. The ground truth is nonempty text or an int.
    """
    pattern = AnswerPattern(options.pattern) if options.pattern else None

    def judge(completion: str, truth: Any) -> RewardResult:
        answer = _extract_answer(completion, pattern)
        return RewardResult.from_correctness(answer == parse_truth_text(truth), answer)

    return RuleReward(judge, parse_truth_text)


def build_numeric_reward(options: PatternOptions) -> RuleReward:
    """Build a reward that compares answer and ground truth as exact numbers.

    0.5, .50, 1/2 and 5e-1 are equal, as are 1,000 and 1000. The whole completion, or the whole
    match of `pattern`, must be a number; a number inside prose is wrong. The ground truth is such a
    text, an int or a float. The float 0.1 means the decimal 0.1, not its binary value.
    """
    pattern = AnswerPattern(options.pattern) if options.pattern else None

    def judge(completion: str, truth: Any) -> RewardResult:
        answer = _extract_answer(completion, pattern)
        number = None if answer is None else parse_number(answer)
        passes = number is not None and number == _parse_truth(truth)
        return RewardResult.from_correctness(passes, None if number is None else str(number))

    return RuleReward(judge, _parse_truth)


def build_regex_reward(options: RegexOptions) -> RuleReward:
    r"""Build a reward that scores 1 if `pattern` matches anywhere in the completion.

    \A and \Z in the pattern anchor it at both ends.
    """
    pattern = AnswerPattern(options.pattern)
    return RuleReward(lambda text, truth: RewardResult.from_correctness(pattern.has_match(text)))


def _extract_answer(completion: str, pattern: AnswerPattern | None) -> str | None:
    answer = completion if pattern is None else pattern.find_last(completion)
    return None if answer is None else answer.strip()


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
    number = None
    if isinstance(truth, str | int | float) and not isinstance(truth, bool):
        number = parse_number(str(truth))
    if number is None:
        raise RewardError(f"ground_truth must be a number, is {truth!r}")
    return number

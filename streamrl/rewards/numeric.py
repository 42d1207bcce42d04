"""Kind `numeric`: 1 where the answer is the ground truth as a number, else 0. Exact arithmetic."""

import re
from collections.abc import Sequence
from fractions import Fraction

from streamrl.errors import RewardError
from streamrl.messages import Prompt
from streamrl.rewards.config import RewardConfig
from streamrl.rewards.text import AnswerPattern, answer_in

# Longer text, or a larger exponent, is no answer but an attack on memory: 1e999999999 has 124 MB.
_MAX_CHARACTERS = 1000
_DECIMAL = r"(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,3})?"
_NUMBER = re.compile(rf"([+-]?{_DECIMAL})(?:/({_DECIMAL}))?", re.ASCII)


class NumericReward:
    """Compares numbers: 0.5, .50, 1/2 and 5e-1 are the same, as are 1,000 and 1000.

    The whole completion must be the number, or with `pattern` the whole of what that finds: an
    answer buried in prose is wrong unless the pattern says where to look. ground_truth is such a
    text, an int or a float (0.1 is taken as the decimal that was written, not its binary value).
    """

    def __init__(self, config: RewardConfig) -> None:
        self._pattern = AnswerPattern(config.pattern) if config.pattern else None

    def check(self, prompt: Prompt) -> None:
        """Raise RewardError if the ground truth is not a number."""
        _truth(prompt)

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> list[float]:
        """1.0 or 0.0 for each completion."""
        truth = _truth(prompt)
        answers = [answer_in(text, self._pattern) for text in completions]
        return [float(answer is not None and parse_number(answer) == truth) for answer in answers]


def parse_number(text: str) -> Fraction | None:
    """The number a text is, exactly: decimal, with exponent or thousands commas, or a fraction."""
    found = _NUMBER.fullmatch(text.strip()) if len(text) <= _MAX_CHARACTERS else None
    if found is None:
        return None
    numerator, denominator = (
        Fraction(part.replace(",", "")) for part in (found[1], found[2] or "1")
    )
    return numerator / denominator if denominator else None


def _truth(prompt: Prompt) -> Fraction:
    truth = prompt.ground_truth
    number = None
    if isinstance(truth, str | int | float) and not isinstance(truth, bool):
        number = parse_number(str(truth))
    if number is None:
        raise RewardError(f"ground_truth must be a number, is {truth!r}")
    return number

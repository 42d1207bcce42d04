"""Multiple choice: the letter that a completion settles on is the ground truth's."""

from collections import deque
from functools import lru_cache

import regex

from streamrl.errors import ConfigError, RewardError
from streamrl.rewards.interface.verdict import RewardResult
from streamrl.rewards.matchers.matcher import (
    GroundTruth,
    make_missing_answer_result,
    make_result,
    parse_truth_text,
)

LETTERS = "ABCDEFGHIJ"
# No repeat is unbounded, so that the time is in proportion to the completion's length.
_DECORATION = r"""[\s*_$(\["'`]{0,9}"""
_FONT_COMMANDS = r"(?:\\(?:boxed|text|textbf|mathbf|mathrm|textrm)\s?\{\s?\(?){0,2}"
_LETTER_END = r"""(?=[\s*_$)\]}"'`.:,;!]|\Z)"""


def judge_completion(
    completion: str, truth: GroundTruth, *, letters: str = LETTERS
) -> RewardResult:
    r"""1 if the last letter that is named as the answer is the truth's, else 0.

    Named is: \boxed{B}; "answer is B", "answer: B", "answer is option B" with a capital letter; in
    each the letter may stand in (), [], $, quotes, bold or \text{}. Where nothing of that occurs,
    the last line that holds but the letter; where there is none, the letter that a completion of
    one line begins with, as in "B. Paris" or "(b) Paris". `letters` are those to choose from.
    Raises RewardError, and ConfigError for letters that are not capitals from A to Z, each once.
    """
    patterns, expected = _compile_patterns(letters), validate_truth(truth, letters=letters)
    for pattern in patterns:
        last = deque(pattern.finditer(completion), maxlen=1)
        if last:
            answer = last[0]["letter"].upper()
            return make_result(answer == expected, score=float(answer == expected), answer=answer)
    return make_missing_answer_result("letter that is named as the answer")


def validate_truth(truth: GroundTruth, *, letters: str = LETTERS) -> str:
    """The letter, as in B, b or (B). Raises RewardError if it is none of `letters`."""
    letter = parse_truth_text(truth).removeprefix("(").removesuffix(")").upper()
    if len(letter) != 1 or letter not in letters:
        raise RewardError(f"ground_truth must be one of the letters {letters}, is {truth!r}")
    return letter


@lru_cache
def _compile_patterns(letters: str) -> tuple["regex.Pattern[str]", ...]:
    """Where a letter may be named; the first that occurs at all decides."""
    if not regex.fullmatch("[A-Z]+", letters) or len(set(letters)) < len(letters):
        raise ConfigError(f"rewards.letters={letters}: must be capitals from A to Z, each once")
    capital, either = f"(?P<letter>[{letters}])", f"(?P<letter>[{letters}{letters.lower()}])"
    boxed = rf"\\boxed\s?\{{{_DECORATION}{_FONT_COMMANDS}{_DECORATION}{either}{_LETTER_END}"
    said = r"\b(?i:answer)[\s*_]{0,9}(?:[:=]|(?i:is)\b)[\s*_:]{0,9}(?:(?i:option|choice)\s)?"
    said = rf"{said}{_DECORATION}{_FONT_COMMANDS}{_DECORATION}{capital}{_LETTER_END}"
    line = rf"(?m)^[ \t*_$(\[\"'`]{{0,9}}{either}[ \t\r*_$)\]\"'`.]{{0,9}}$"
    only_line = rf"\A\s?{_DECORATION}{either}[*_)\].:]{{1,4}}\s[^\n]+\s?\Z"
    # The regex package takes two groups of one name.
    return tuple(regex.compile(text) for text in (f"{boxed}|{said}", line, only_line))

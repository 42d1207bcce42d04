"""Multiple choice: the letter that a completion settles on is the ground truth's."""

from collections import deque
from functools import lru_cache

import regex

from streamrl.errors import ConfigError, RewardError
from streamrl.rewards.interface.verdict import Judgement
from streamrl.rewards.matchers.matcher import Truth, not_found, passed, truth_text

LETTERS = "ABCDEFGHIJ"
# No repeat is unbounded, so that the time is in proportion to the completion's length.
_DECORATION = r"""[\s*_$(\["'`]{0,9}"""
_FACE = r"(?:\\(?:boxed|text|textbf|mathbf|mathrm|textrm)\s?\{\s?\(?){0,2}"
_END = r"""(?=[\s*_$)\]}"'`.:,;!]|\Z)"""


def judge(completion: str, truth: Truth, *, letters: str = LETTERS) -> Judgement:
    r"""1 if the last letter that is named as the answer is the truth's, else 0.

    Named is: \boxed{B}; "answer is B", "answer: B", "answer is option B" with a capital letter; in
    each the letter may stand in (), [], $, quotes, bold or \text{}. Where nothing of that occurs,
    the last line that holds but the letter; where there is none, the letter that a completion of
    one line begins with, as in "B. Paris" or "(b) Paris". `letters` are those to choose from.
    Raises RewardError, and ConfigError for letters that are not capitals from A to Z, each once.
    """
    patterns, expected = _patterns(letters), check_truth(truth, letters=letters)
    for pattern in patterns:
        last = deque(pattern.finditer(completion), maxlen=1)
        if last:
            answer = last[0]["letter"].upper()
            return passed(answer == expected, score=float(answer == expected), answer=answer)
    return not_found("letter that is named as the answer")


def check_truth(truth: Truth, *, letters: str = LETTERS) -> str:
    """The letter, as in B, b or (B). Raises RewardError if it is none of `letters`."""
    letter = truth_text(truth).removeprefix("(").removesuffix(")").upper()
    if len(letter) != 1 or letter not in letters:
        raise RewardError(f"ground_truth must be one of the letters {letters}, is {truth!r}")
    return letter


@lru_cache
def _patterns(letters: str) -> tuple["regex.Pattern[str]", ...]:
    """Where a letter may be named; the first that occurs at all decides."""
    if not regex.fullmatch("[A-Z]+", letters) or len(set(letters)) < len(letters):
        raise ConfigError(f"rewards.letters={letters}: must be capitals from A to Z, each once")
    capital, either = f"(?P<letter>[{letters}])", f"(?P<letter>[{letters}{letters.lower()}])"
    boxed = rf"\\boxed\s?\{{{_DECORATION}{_FACE}{_DECORATION}{either}{_END}"
    said = r"\b(?i:answer)[\s*_]{0,9}(?:[:=]|(?i:is)\b)[\s*_:]{0,9}(?:(?i:option|choice)\s)?"
    said = rf"{said}{_DECORATION}{_FACE}{_DECORATION}{capital}{_END}"
    line = rf"(?m)^[ \t*_$(\[\"'`]{{0,9}}{either}[ \t\r*_$)\]\"'`.]{{0,9}}$"
    only_line = rf"\A\s?{_DECORATION}{either}[*_)\].:]{{1,4}}\s[^\n]+\s?\Z"
    # The regex package takes two groups of one name.
    return tuple(regex.compile(text) for text in (f"{boxed}|{said}", line, only_line))

"""Multiple-choice matcher: compares the letter named as the answer with the ground truth."""

from collections import deque
from functools import lru_cache

import regex

from streamrl.errors import ConfigError, RewardError
from streamrl.rewards.interface.reward_result import RewardResult
from streamrl.rewards.matchers.matcher import (
    GroundTruth,
    make_missing_answer_result,
    parse_truth_text,
)

LETTERS = "ABCDEFGHIJ"
# Bounded repeats only: matching time stays linear in the length of the completion.
_DECORATION = r"""[\s*_$(\["'`]{0,9}"""
_FONT_COMMANDS = r"(?:\\(?:boxed|text|textbf|mathbf|mathrm|textrm)\s?\{\s?\(?){0,2}"
_LETTER_END = r"""(?=[\s*_$)\]}"'`.:,;!]|\Z)"""


def judge_completion(
    completion: str, truth: GroundTruth, *, letters: str = LETTERS
) -> RewardResult:
    r"""Score 1 if the last letter named as the answer equals the truth, else 0.

    Patterns, in order of precedence; the last match of the first pattern with a match counts:
    1. \boxed{B}, or "answer is B", "answer: B", "answer is option B" with a capital letter. The
       letter may be in (), [], $, quotes, bold or \text{}.
    2. A line with the letter alone.
    3. The first letter of a one-line completion, as in "B. Paris" or "(b) Paris".

    letters: the choices. Raises RewardError; raises ConfigError unless letters are distinct
    capitals from A to Z.
    """
    patterns, expected = _compile_patterns(letters), validate_truth(truth, letters=letters)
    for pattern in patterns:
        last = deque(pattern.finditer(completion), maxlen=1)
        if last:
            answer = last[0]["letter"].upper()
            return RewardResult.from_correctness(answer == expected, answer)
    return make_missing_answer_result("letter that is named as the answer")


def validate_truth(truth: GroundTruth, *, letters: str = LETTERS) -> str:
    """Return the letter of a truth such as B, b or (B), as a capital. Raises RewardError."""
    letter = parse_truth_text(truth).removeprefix("(").removesuffix(")").upper()
    if len(letter) != 1 or letter not in letters:
        raise RewardError(f"ground_truth must be one of the letters {letters}, is {truth!r}")
    return letter


@lru_cache
def _compile_patterns(letters: str) -> tuple["regex.Pattern[str]", ...]:
    if not regex.fullmatch("[A-Z]+", letters) or len(set(letters)) < len(letters):
        raise ConfigError(f"rewards.letters={letters}: must be distinct capitals from A to Z")
    capital, either = f"(?P<letter>[{letters}])", f"(?P<letter>[{letters}{letters.lower()}])"
    boxed = rf"\\boxed\s?\{{{_DECORATION}{_FONT_COMMANDS}{_DECORATION}{either}{_LETTER_END}"
    answer_is = r"\b(?i:answer)[\s*_]{0,9}(?:[:=]|(?i:is)\b)[\s*_:]{0,9}(?:(?i:option|choice)\s)?"
    answer_is = rf"{answer_is}{_DECORATION}{_FONT_COMMANDS}{_DECORATION}{capital}{_LETTER_END}"
    line = rf"(?m)^[ \t*_$(\[\"'`]{{0,9}}{either}[ \t\r*_$)\]\"'`.]{{0,9}}$"
    only_line = rf"\A\s?{_DECORATION}{either}[*_)\].:]{{1,4}}\s[^\n]+\s?\Z"
    # The regex package, unlike re, allows two groups with the same name.
    return tuple(regex.compile(text) for text in (f"{boxed}|{answer_is}", line, only_line))

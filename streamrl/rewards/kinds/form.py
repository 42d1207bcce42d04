"""Matchers of the form of a completion: the letter it names (choice), its tags, its length."""

import math
import re
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import regex

from streamrl.errors import ConfigError, RewardError
from streamrl.rewards.interface.answers import (
    make_missing_answer_result,
    parse_truth_text,
)
from streamrl.user_code.reward_result import RewardResult

LETTERS = "ABCDEFGHIJ"
# Bounded repeats only: matching time stays linear in the length of the completion.
_DECORATION = r"""[\s*_$(\["'`]{0,9}"""
_FONT_COMMANDS = r"(?:\\(?:boxed|text|textbf|mathbf|mathrm|textrm)\s?\{\s?\(?){0,2}"
_LETTER_END = r"""(?=[\s*_$)\]}"'`.:,;!]|\Z)"""


def judge_choice(completion: str, truth: Any, *, letters: str = LETTERS) -> RewardResult:
    r"""Score 1 if the last letter named as the answer equals the truth, else 0.

    Patterns, in order of precedence; the last match of the first pattern with a match counts:
    1. \boxed{B}, or "answer is B", "answer: B", "answer is option B" with a capital letter. The
       letter may be in (), [], $, quotes, bold or \text{}.
    2. A line with the letter alone.
    3. The first letter of a one-line completion, as in "B. Paris" or "(b) Paris".

    letters: the choices. Raises RewardError; raises ConfigError unless letters are distinct
    capitals from A to Z.
    """
    patterns, expected = _compile_patterns(letters), validate_choice_truth(truth, letters=letters)
    for pattern in patterns:
        last = deque(pattern.finditer(completion), maxlen=1)
        if last:
            answer = last[0]["letter"].upper()
            return RewardResult.from_correctness(answer == expected, answer)
    return make_missing_answer_result("letter that is named as the answer")


def validate_choice_truth(truth: Any, *, letters: str = LETTERS) -> str:
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


def judge_tags(
    completion: str,
    truth: Any = None,
    *,
    tags: Sequence[str] = ("think", "answer"),
    nothing_outside: bool = True,
) -> RewardResult:
    """Score 1 if every tag is opened and closed once, in order and with content, else 0.

    nothing_outside: only whitespace is allowed outside the tags. Ignores the ground truth. Raises
    ConfigError unless `tags` is a nonempty list of distinct words.
    """
    are_words = all(re.fullmatch(r"[\w.-]+", tag) for tag in tags)
    if not are_words or len(set(tags)) != len(tags) or not tags:
        raise ConfigError(
            f"rewards.tags={list(tags)}: must be words (letters, digits and _ . -), each once,"
            " at least one"
        )
    detail = _find_format_error(completion, tags, nothing_outside=nothing_outside)
    return RewardResult.from_correctness(not detail, detail=detail)


def _find_format_error(completion: str, tags: Sequence[str], *, nothing_outside: bool) -> str:
    marks = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]
    for mark in marks:
        if completion.count(mark) != 1:
            return f"{mark} {completion.count(mark)} times"
    if marks != sorted(marks, key=completion.index):
        return f"not in the order {' '.join(marks)}"
    rest = completion
    for tag in tags:
        outside, _, rest = rest.partition(f"<{tag}>")
        inside, _, rest = rest.partition(f"</{tag}>")
        if not inside.strip():
            return f"<{tag}> is empty"
        if nothing_outside and outside.strip():
            return f"text before <{tag}>"
    return f"text after </{tags[-1]}>" if nothing_outside and rest.strip() else ""


UNITS = ("words", "characters")


def judge_length(
    completion: str,
    truth: Any = None,
    *,
    unit: str = "words",
    least: int = 0,
    most: float = math.inf,
    tolerance: int = 0,
) -> RewardResult:
    """Score 1 for a length within [least, most]; outside, the score falls linearly to 0.

    Lengths are in `unit`; whitespace separates words. A length outside by n scores max(0, 1 - n /
    tolerance), or 0 without tolerance. Ignores the ground truth. Raises ConfigError for an unknown
    unit, or for least, most and tolerance that contradict each other.
    """
    if unit not in UNITS:
        raise ConfigError(f"rewards.unit={unit}: must be one of {', '.join(UNITS)}")
    if not 0 <= least <= most or tolerance < 0:
        raise ConfigError(
            f"rewards.least={least}, most={most}, tolerance={tolerance}: must be 0 or more, "
            "and least not above most"
        )
    length = len(completion.split()) if unit == "words" else len(completion)
    beyond = max(least - length, length - most, 0)
    score = 1.0 if beyond == 0 else max(0.0, 1 - beyond / tolerance) if tolerance else 0.0
    return RewardResult.from_correctness(beyond == 0, score=score, detail=f"{length} {unit}")

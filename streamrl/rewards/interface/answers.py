"""Answers in completions: patterns with a deadline, and checks of the ground truth."""

import threading
from itertools import islice
from typing import Any

import regex

from streamrl.errors import ConfigError, RewardError
from streamrl.user_code.reward_result import RewardOutcome, RewardResult

#: Deadline of a regular expression on a text: nested repeats can backtrack for exponential time.
SEARCH_TIMEOUT_S = 0.5
#: One search at a time: `regex` counts CPU time of the whole process as the search's own.
_SEARCH_LOCK = threading.Lock()


class PatternTimeoutError(RewardError):
    """Searching a completion with a regular expression took more than SEARCH_TIMEOUT_S.

    The completion's outcome is then TIMEOUT.
    """


class AnswerPattern:
    """Regular expression that locates an answer in a completion, with a deadline per search.

    Uses the `regex` package because `re` has no timeout. setting: config key of the pattern, for
    error messages. Raises ConfigError for an invalid pattern.
    """

    def __init__(self, pattern: str, setting: str) -> None:
        try:
            self._regex = regex.compile(pattern)
        except regex.error as error:
            raise ConfigError(f"{setting}={pattern}: {error}") from error

    def find_last(self, text: str) -> str | None:
        """Return the first group of the last match (whole without groups), None without a match."""
        matches = self._find_matches(text, limit=None)
        return matches[-1][1 if self._regex.groups else 0] if matches else None

    def find_answer(self, text: str) -> str | None:
        """Return the last match, or the whole text for an empty pattern, stripped."""
        answer = self.find_last(text) if self._regex.pattern else text
        return None if answer is None else answer.strip()

    def has_match(self, text: str) -> bool:
        return bool(self._find_matches(text, limit=1))

    def _find_matches(self, text: str, limit: int | None) -> list["regex.Match[str]"]:
        try:
            with _SEARCH_LOCK:
                # concurrent=True releases the GIL during the search.
                matches = self._regex.finditer(text, timeout=SEARCH_TIMEOUT_S, concurrent=True)
                return list(islice(matches, limit))
        except TimeoutError as error:
            raise PatternTimeoutError(
                f"pattern {self._regex.pattern} took more than {SEARCH_TIMEOUT_S} s on a "
                f"completion of {len(text)} characters"
            ) from error


def parse_truth_text(truth: Any) -> str:
    """Return a str or int as stripped text. Raises RewardError for other types and empty text."""
    if isinstance(truth, bool) or not isinstance(truth, str | int) or not str(truth).strip():
        raise RewardError(f"ground_truth must be an answer as text or an int, is {truth!r}")
    return str(truth).strip()


def require_nonempty(normal_form: str, truth: Any) -> str:
    """Return the normal form. Raises RewardError if empty: every empty answer would match."""
    if not normal_form:
        raise RewardError(f"ground_truth is empty in normal form: {truth!r}")
    return normal_form


def make_missing_answer_result(missing: str, *, score: float = 0.0) -> RewardResult:
    """Return outcome WRONG with detail "no `missing`" for a completion without an answer."""
    return RewardResult(score, RewardOutcome.WRONG, None, f"no {missing}")

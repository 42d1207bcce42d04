"""Decode completions to text and extract answers from the text."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import regex

from streamrl.errors import ConfigError, RewardError
from streamrl.messages import Array, Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: Deadline of a search: nested repeats can backtrack for exponential time.
SEARCH_TIMEOUT_S = 0.5


def decode_completions(
    tokenizer: "PreTrainedTokenizerBase", rollouts: Sequence[Rollout]
) -> list[str]:
    """Decode each rollout without its prompt and special tokens; spaces are kept as sampled."""
    return decode_ids(tokenizer, [rollout.completion_ids for rollout in rollouts])


def decode_ids(tokenizer: "PreTrainedTokenizerBase", completions: Sequence[Array]) -> list[str]:
    """Decode completions, int32 [C] each, without special tokens."""
    texts = tokenizer.batch_decode(
        [completion.tolist() for completion in completions],
        skip_special_tokens=True,
        clean_up_tokenization_spaces=False,
    )
    return [str(text) for text in texts]


class PatternTimeoutError(RewardError):
    """A pattern exceeded SEARCH_TIMEOUT_S; the completion's outcome is then TIMEOUT."""


class AnswerPattern:
    """Regular expression that locates an answer, with a deadline per search.

    Uses the `regex` package because `re` has no timeout. Raises ConfigError for an invalid
    pattern; the message names the reward's option `option`.
    """

    def __init__(self, pattern: str, *, option: str = "pattern") -> None:
        try:
            self._regex = regex.compile(pattern)
        except regex.error as error:
            raise ConfigError(f"rewards.{option}={pattern}: {error}") from error

    def find_last(self, text: str) -> str | None:
        """Return the first group of the last match, or the whole match of a pattern without groups.

        Returns None without a match. Raises PatternTimeoutError.
        """
        matches = self._find_matches(text, limit=None)
        answer: str | None = None
        if matches:
            answer = matches[-1][1 if self._regex.groups else 0]
        return answer

    def has_match(self, text: str) -> bool:
        return bool(self._find_matches(text, limit=1))

    def _find_matches(self, text: str, limit: int | None) -> list["regex.Match[str]"]:
        try:
            # concurrent=True releases the GIL during the search.
            matches = self._regex.finditer(text, timeout=SEARCH_TIMEOUT_S, concurrent=True)
            return list(islice(matches, limit))
        except TimeoutError as error:
            raise PatternTimeoutError(
                f"pattern {self._regex.pattern} took more than {SEARCH_TIMEOUT_S} s on a "
                f"completion of {len(text)} characters"
            ) from error


@dataclass
class PatternOptions:
    """Options of a rule that compares an answer.

    pattern: regular expression of the answer: first group of the last match; empty: the whole
        completion is the answer.
    """

    pattern: str = ""

    def compile_pattern(self) -> AnswerPattern | None:
        """Return the compiled pattern, or None if empty. Raises ConfigError if invalid."""
        return AnswerPattern(self.pattern) if self.pattern else None


def extract_answer(completion: str, pattern: AnswerPattern | None) -> str | None:
    """Return the match of `pattern`, or the completion without a pattern; whitespace stripped."""
    answer = completion if pattern is None else pattern.find_last(completion)
    return None if answer is None else answer.strip()

"""From tokens to the text that is judged, and to the answer in it."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import regex

from streamrl.errors import ConfigError, RewardError
from streamrl.messages import Array, Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: Deadline of one search, s. A pattern with nested repeats can take longer than the run.
SEARCH_TIMEOUT_S = 0.5


def decode_completions(
    tokenizer: "PreTrainedTokenizerBase", rollouts: Sequence[Rollout]
) -> list[str]:
    """Text of each rollout after its initial prompt, special tokens left out, spaces as written."""
    return decode_ids(tokenizer, [rollout.completion_ids for rollout in rollouts])


def decode_ids(tokenizer: "PreTrainedTokenizerBase", completions: Sequence[Array]) -> list[str]:
    """Text of each completion, int32 [C], in the same way."""
    texts = tokenizer.batch_decode(
        [completion.tolist() for completion in completions],
        skip_special_tokens=True,
        clean_up_tokenization_spaces=False,
    )
    return [str(text) for text in texts]


class PatternTimeoutError(RewardError):
    """A pattern took too long on a text. Of a completion that is a verdict: timeout."""


class AnswerPattern:
    """Where the answer stands in a completion, as a regular expression of the `regex` package.

    That package rather than `re`, because it can be given a deadline. Raises ConfigError if the
    expression is wrong.
    """

    def __init__(self, pattern: str, *, option: str = "pattern") -> None:
        """`option` is what the message of the error calls it."""
        try:
            self._regex = regex.compile(pattern)
        except regex.error as error:
            raise ConfigError(f"rewards.{option}={pattern}: {error}") from error

    def find_last(self, text: str) -> str | None:
        """First group of the last match (all of it if there are no groups); None: no match.

        Raises SlowPatternError if the search takes longer than SEARCH_TIMEOUT_S.
        """
        matches = self._find_matches(text, most=None)
        answer: str | None = None
        if matches:
            answer = matches[-1][1 if self._regex.groups else 0]
        return answer

    def has_match(self, text: str) -> bool:
        """Whether there is a match anywhere. Raises SlowPatternError like `last`."""
        return bool(self._find_matches(text, most=1))

    def _find_matches(self, text: str, most: int | None) -> list["regex.Match[str]"]:
        try:
            # Without the interpreter's lock: what else the process does goes on meanwhile.
            found = self._regex.finditer(text, timeout=SEARCH_TIMEOUT_S, concurrent=True)
            return list(islice(found, most))
        except TimeoutError as error:
            raise PatternTimeoutError(
                f"pattern {self._regex.pattern} took more than {SEARCH_TIMEOUT_S} s on a "
                f"completion of {len(text)} characters"
            ) from error


@dataclass
class PatternOptions:
    """Options of a rule that compares an answer.

    pattern: where the answer stands, its last match, first group; empty: the whole completion.
    """

    pattern: str = ""

    def compile_pattern(self) -> AnswerPattern | None:
        """The pattern, if there is one. Raises ConfigError if it is wrong."""
        return AnswerPattern(self.pattern) if self.pattern else None


def extract_answer(completion: str, pattern: AnswerPattern | None) -> str | None:
    """The answer a completion gives, trimmed: what `pattern` finds, or all of it without one."""
    answer = completion if pattern is None else pattern.find_last(completion)
    return None if answer is None else answer.strip()

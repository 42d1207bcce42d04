"""First token at which the stream of an episode and a rendering of its conversation differ."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHOWN_TOKENS = 6


@dataclass(frozen=True)
class TokenDifference:
    """First different token of two sequences.

    index: position, from 0. rendered, appended: text of the next tokens from there, in the
    template's rendering and in the stream; "" after the last token.
    """

    index: int
    rendered: str
    appended: str

    def __str__(self) -> str:
        rendered, appended = (
            repr(text) if text else "nothing" for text in (self.rendered, self.appended)
        )
        return f"token {self.index}: the template renders {rendered}, the stream has {appended}"


def find_difference(
    tokenizer: "PreTrainedTokenizerBase", rendered: Sequence[int], appended: Sequence[int]
) -> TokenDifference | None:
    """Return the first difference of two sequences of token ids; None if they are equal."""
    for index, pair in enumerate(zip_longest(rendered, appended)):
        if pair[0] != pair[1]:
            sides = (tokens[index : index + SHOWN_TOKENS] for tokens in (rendered, appended))
            return TokenDifference(index, *(decode(tokenizer, side) for side in sides))
    return None


def decode(tokenizer: "PreTrainedTokenizerBase", token_ids: Sequence[int]) -> str:
    """Decode token ids to text with special tokens, without changing whitespace."""
    text = tokenizer.decode(
        list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    return str(text)

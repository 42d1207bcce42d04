"""Sampled turns as text in which markers differ from characters that merely spell them.

A family's markers (`<tool_call>`) are mostly single tokens of its vocabulary. Such a token becomes
one code: a lone surrogate, a character that no decoded text contains. So a parser searches
text, and a policy that quotes a marker in ordinary characters makes no call. A marker that is not
a token is searched by its spelling. The other special tokens get codes, too: dropping one would
turn a garbled call into a good one, or change a string within its arguments.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, TypeVar

from streamrl.environments.interface import ToolSchema

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

THINK_END = "</think>"
"""Marker that ends a policy's thinking."""
CODE_POINTS = range(0xD800, 0xE000)
"""Surrogates. A vocabulary with more special tokens has the rest of them left out of the text."""
T = TypeVar("T")


@dataclass(frozen=True)
class WrittenCall:
    """Tool call as it stands in a turn, before its name and arguments are checked.

    start, end: its characters in the turn. error: why it could not be parsed.
    """

    start: int
    end: int
    name: str = ""
    arguments: Any = None
    error: str = ""


@dataclass(frozen=True)
class ScaffoldSpan:
    """Characters of a turn that belong to its format and are neither text nor call.

    text: what stands in their place.
    """

    start: int
    end: int
    text: str = ""


@dataclass(frozen=True)
class TokenCodes:
    """Codes of a vocabulary's markers and special tokens.

    by_marker: code of each marker of the format that is a token. spelling: spelling of each code.
    text_spelling: the same, but "" for special tokens that are no markers.
    """

    by_marker: Mapping[str, str]
    spelling: Mapping[int, str]
    text_spelling: Mapping[int, str]


@dataclass(frozen=True)
class MarkedTurn:
    """Decoded turn with its markers.

    text: the turn, with one code for each marker or special token. tools: schemas by name. is_cut:
    the turn ended at a length limit.
    """

    text: str
    codes: TokenCodes
    tools: Mapping[str, ToolSchema]
    is_cut: bool = False

    @property
    def start(self) -> int:
        """Position after the policy's thinking: a call that it only thinks about is not made."""
        code = self.codes.by_marker.get(THINK_END)
        return self.text.rfind(code) + 1 if code else 0

    def get_code(self, marker: str) -> str:
        """Return the characters that stand for a marker in the text."""
        return self.codes.by_marker.get(marker, marker)

    def spell(self, part: str) -> str:
        """Return a part of the turn with its codes spelled out, for a string in a call."""
        return part.translate(self.codes.spelling)

    def spell_text(self, part: str) -> str:
        """Return a part of the turn with its markers spelled out, without special tokens."""
        return part.translate(self.codes.text_spelling)

    def parse_at(self, start: int, parse: Callable[[str, int], tuple[T, int]]) -> tuple[T, int]:
        """Parse the value that begins at `start`, after spaces; return it and its end.

        Codes within its strings are spelled out: tokenizers encode a string that mentions a marker
        with the marker's token. Raises ValueError as `parse` does.
        """
        start = self.skip_space(start)
        value, end = parse(self.text, start)
        written = self.text[start:end]
        if (spelled := self.spell(written)) != written:
            value, _ = parse(spelled, 0)
        return value, end

    def skip_space(self, start: int) -> int:
        """Return the position of the first character from `start` that is not a space."""
        while start < len(self.text) and self.text[start].isspace():
            start += 1
        return start


class MarkerDecoder:
    """Decoder of sampled tokens that keeps the markers of a call format."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", markers: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_vocab()
        known = [marker for marker in (THINK_END, *markers) if marker in added]
        special = {t.content for t in tokenizer.added_tokens_decoder.values() if t.special}
        others = sorted(special.difference(known))
        self._end_ids = frozenset(added[token] for token in others)
        points = dict(zip((*known, *others), CODE_POINTS, strict=False))
        self._codes_by_id = {added[token]: chr(point) for token, point in points.items()}
        self._codes = TokenCodes(
            by_marker={marker: chr(points[marker]) for marker in known},
            spelling={point: token for token, point in points.items()},
            text_spelling={p: token if token in known else "" for token, p in points.items()},
        )

    def decode(
        self, token_ids: Sequence[int], tools: Mapping[str, ToolSchema], *, is_cut: bool
    ) -> MarkedTurn:
        tokens = [int(token) for token in token_ids]
        while tokens and tokens[-1] in self._end_ids:
            tokens.pop()
        parts = []
        for code, run in groupby(tokens, key=self._codes_by_id.get):
            run_ids = list(run)
            parts.append(code * len(run_ids) if code else self._decode_run(run_ids))
        return MarkedTurn("".join(parts), self._codes, tools, is_cut)

    def _decode_run(self, token_ids: list[int]) -> str:
        return str(
            self._tokenizer.decode(
                token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )

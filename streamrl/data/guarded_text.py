"""Control tokens from the chat template alone: whatever others write becomes text.

Rows, observations, replies and the schemas of tools are guarded before a template renders them: a
code, which no text contains, is put into each spelling of a control token and into whatever could
become one beside the template's own words. Templates trim and quote a guarded text like any other,
and compare it, unless it is the inside of a control token. A rendering with codes is encoded by a
copy of the tokenizer, in which control tokens are spelled by characters of private use.
"""

import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from streamrl.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CODE = "\ud800"
"""A lone surrogate, which UTF-8 cannot encode, so that no text has it."""
FIRST_PRIVATE = 0x100000
"""First of the characters that stand for control tokens in the copy of a tokenizer."""
STRUCTURE = frozenset(
    (
        *("type", "function", "name", "description", "parameters", "arguments", "id"),
        *("properties", "required", "enum", "items", "anyOf", "$ref", "$defs"),
        *("object", "string", "integer", "number", "boolean", "array", "null"),
    )
)
"""Words of a tool's schema and of a call, which templates look up."""
THINK_TAGS = ("<think>", "</think>")
T = TypeVar("T")
Array = NDArray[Any]


class EncodedPieces(NamedTuple):
    """Pieces of a rendering, encoded as one text.

    token_ids: int32 [T]. starts, ends: int64 [T], characters of each token. stops: end of each
    piece, in the same characters.
    """

    token_ids: Array
    starts: Array
    ends: Array
    stops: Sequence[int]


@dataclass(frozen=True)
class TextGuard:
    """Guard of the texts that may not write the control tokens `markers`."""

    markers: frozenset[str]

    @functools.cached_property
    def pattern(self) -> "re.Pattern[str]":
        # A marker of one character has no inside for a code.
        whole = [f"(?<!{CODE}{CODE})" * (len(m) == 1) + re.escape(m) for m in self.markers]
        return re.compile("|".join(sorted(whole, key=len, reverse=True)) or "(?!)")

    @functools.cached_property
    def _heads(self) -> frozenset[str]:
        return frozenset(marker[:end] for marker in self.markers for end in range(1, len(marker)))

    @functools.cached_property
    def _tails(self) -> frozenset[str]:
        return frozenset(
            marker[start:] for marker in self.markers for start in range(1, len(marker))
        )

    @functools.cached_property
    def _cores(self) -> frozenset[str]:
        return frozenset(re.sub(r"^\W+|\W+$", "", marker) for marker in self.markers) - {""}

    @functools.cached_property
    def _max_length(self) -> int:
        return max(map(len, self.markers), default=0)

    def guard(self, value: T) -> T:
        """Return a JSON value with all its texts guarded, keys of objects included."""
        if isinstance(value, str):
            return self._guard_text(value)  # type: ignore[return-value]
        if isinstance(value, Mapping):
            return {  # type: ignore[return-value]
                key if key in STRUCTURE else self.guard(key): entry
                if key == "type" and entry in STRUCTURE
                else self.guard(entry)
                for key, entry in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.guard(entry) for entry in value]  # type: ignore[return-value]
        return value

    def _guard_text(self, text: str) -> str:
        # Half a surrogate pair cannot be encoded, and a code would be taken for one of ours.
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        whole = text
        text = self.pattern.sub(lambda found: _break(found[0]), text)
        # `<{{ name }}>` in a template makes a token of a name, and `{{ a }}{{ b }}` of two texts.
        if whole in self._cores:
            return _break(whole)
        for length in range(1, min(len(text), self._max_length) + 1):
            if text[-length:] in self._heads:
                split = len(text) - length + 1
                text = text[:split] + CODE + text[split:]
                break
        for length in range(1, min(len(text), self._max_length) + 1):
            if text[:length] in self._tails:
                return text[: length - 1] + CODE + text[length - 1 :]
        return text


def _break(marker: str) -> str:
    return marker[0] + CODE + marker[1:] if len(marker) > 1 else CODE + CODE + marker


def find_difference(first: str, second: str) -> int:
    """Return the index of the first character in which two texts differ."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


class TemplateEncoder:
    """Encoder of what a chat template renders; made by `get_template_encoder`.

    source: text of the template, with that of the template for tools. plain: conversation without
    thoughts or calls, as the template renders it; its control tokens are of no turn of the policy.
    marker_ids: control tokens, ascending: special tokens, and other added tokens that the template
    writes, or that end a turn. Some models declare the tokens of their chat format as not special:
    DeepSeek's <|User|>.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", source: str, plain: str) -> None:
        self._tokenizer = tokenizer
        self._ids = {
            token.content: token_id
            for token_id, token in tokenizer.added_tokens_decoder.items()
            if token.content.strip() and (token.special or token.content in source)
        }
        special = {t.content for t in tokenizer.added_tokens_decoder.values() if t.special}
        self._guard = TextGuard(frozenset(self._ids))
        # A turn of the policy has tags of its own, such as those of a thought or a call.
        between_turns = special.union(self._guard.pattern.findall(plain)) - {*THINK_TAGS}
        self._reply_guard = TextGuard(frozenset(self._ids.keys() & between_turns))
        self.marker_ids = np.array(sorted(self._ids.values()), np.int32)
        # Characters outside the vocabulary become <unk>: a fact about the text, unless the token
        # has another meaning, such as the end of a text.
        unknown = {tokenizer.unk_token}
        if tokenizer.is_fast and hasattr(tokenizer.backend_tokenizer.model, "unk_token"):
            unknown.add(tokenizer.backend_tokenizer.model.unk_token)
        unknown -= {tokenizer.bos_token, tokenizer.eos_token}
        self._control_ids = np.array(
            [i for token, i in self._ids.items() if token not in unknown or token in source],
            np.int32,
        )

    def guard_message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return a message that can write no control token. A role is a word, or text."""
        guard = self._reply_guard if message.get("role") == "assistant" else self._guard
        return {
            key: value
            if key == "role" and str(value).isidentifier()
            else (self._guard if key == "tool_calls" else guard).guard(value)
            for key, value in message.items()
        }

    def guard(self, value: T) -> T:
        """Return a JSON value whose texts can write no control token."""
        return self._guard.guard(value)

    def find_markers(self, text: str) -> list[str]:
        """Return the control tokens that the template writes in a rendering, in order."""
        return self._guard.pattern.findall(text)

    def find_split(self, first: str, second: str) -> int:
        """Return where two renderings part, before the control token in which they do."""
        split = find_difference(first, second)
        markers = self._guard.pattern.finditer(second)
        return next((m.start() for m in markers if m.start() < split < m.end()), split)

    def find_ids(self, markers: Iterable[str]) -> set[int]:
        return {self._ids[marker] for marker in markers if marker in self._ids}

    def find_special_end(self, text: str) -> int:
        """Return where the first special token of a rendering ends; 0 without any."""
        found = self._reply_guard.pattern.search(text)
        return found.end() if found else 0

    def encode(self, text: str) -> list[int]:
        """Encode a rendering."""
        token_ids: list[int] = self._tokenizer(text.replace(CODE, ""), add_special_tokens=False)[
            "input_ids"
        ]
        if not self.is_plain(text, token_ids):
            token_ids = self.encode_pieces([text]).token_ids.tolist()
        return token_ids

    def encode_pieces(self, pieces: Sequence[str]) -> EncodedPieces:
        """Encode pieces of a rendering as one text, so that the tokens at their borders are its."""
        text = "".join(pieces)
        if CODE not in text:
            encoding: Mapping[str, Any] = self._tokenizer(
                text,
                add_special_tokens=False,
                return_attention_mask=False,
                return_offsets_mapping=True,
                verbose=False,
            )
            encoded = self._make_encoded(encoding["input_ids"], encoding["offset_mapping"], pieces)
            if self.is_plain(text, encoded.token_ids):
                return encoded
        copied = [self._spell_privately(piece) for piece in pieces]
        text = "".join(copied)
        result = self._plain_backend.encode(text, add_special_tokens=False)
        encoded = self._make_encoded(result.ids, result.offsets, copied)
        is_control = np.isin(encoded.token_ids, self._control_ids)
        slices = [text[start:end] for start, end in zip(encoded.starts, encoded.ends, strict=True)]
        is_written = [self._has_private(part) for part in slices]
        kept = ~is_control | np.array(is_written, bool)
        columns = (encoded.token_ids[kept], encoded.starts[kept], encoded.ends[kept])
        return EncodedPieces(*columns, encoded.stops)

    def is_plain(self, text: str, token_ids: Sequence[int] | Array) -> bool:
        """Return whether the tokenizer has encoded a rendering with its control tokens alone.

        A normalizer may make a control token of other characters. <unk> for characters that it
        stands for does not count.
        """
        num_control = int(np.isin(token_ids, self._control_ids).sum())
        return CODE not in text and num_control == len(self.find_markers(text))

    @staticmethod
    def _make_encoded(
        token_ids: Sequence[int], offsets: Sequence[tuple[int, int]], pieces: Sequence[str]
    ) -> EncodedPieces:
        starts, ends = np.array(offsets, np.int64).reshape(-1, 2).T
        stops = np.cumsum([len(piece) for piece in pieces], dtype=np.int64).tolist()
        return EncodedPieces(np.array(token_ids, np.int32), starts, ends, stops)

    @functools.cached_property
    def _private(self) -> dict[str, str]:
        return {marker: chr(FIRST_PRIVATE + i) for i, marker in enumerate(self._ids)}

    def _has_private(self, text: str) -> bool:
        return any(FIRST_PRIVATE <= ord(char) < FIRST_PRIVATE + len(self._ids) for char in text)

    def _spell_privately(self, piece: str) -> str:
        if self._has_private(piece):
            own = f"[{chr(FIRST_PRIVATE)}-{chr(FIRST_PRIVATE + len(self._ids) - 1)}]"
            piece = re.sub(own, "\ufffd", piece)
        piece = self._guard.pattern.sub(lambda found: self._private[found[0]], piece)
        return piece.replace(CODE, "")

    @functools.cached_property
    def _plain_backend(self) -> "Tokenizer":
        """Copy of the tokenizer that knows control tokens by their private spelling alone."""
        if not self._tokenizer.is_fast:
            raise ConfigError(
                f"{self._tokenizer.name_or_path}: {type(self._tokenizer).__name__} cannot encode"
                " the spelling of a control token as text; use a tokenizer with tokenizer.json, or"
                " remove the spelling"
            )
        private = self._private
        spec = json.loads(self._tokenizer.backend_tokenizer.to_str())
        # As vocabulary, `</s>` would be a piece of text for Unigram and word models.
        model = spec["model"]
        vocabulary = model["vocab"]
        if isinstance(vocabulary, dict):
            model["vocab"] = {private.get(k, k): v for k, v in vocabulary.items()}
        else:
            model["vocab"] = [[private.get(piece, piece), score] for piece, score in vocabulary]
        if "merges" in model:
            pairs = (m.split(" ") if isinstance(m, str) else m for m in model["merges"])
            model["merges"] = [p for p in pairs if not private.keys() & {*p, "".join(p)}]
        if model.get("unk_token") in private:
            model["unk_token"] = private[model["unk_token"]]
        for token in spec["added_tokens"]:
            if token["content"] in private:
                token |= {"content": private[token["content"]], "normalized": False}
        spec |= {"truncation": None, "padding": None, "post_processor": None}
        backend = Tokenizer.from_str(json.dumps(spec))
        moved = [m for m, i in self._ids.items() if backend.token_to_id(private[m]) != i]
        if moved:
            raise ConfigError(
                f"{self._tokenizer.name_or_path}: tokenizer.json gives {', '.join(moved[:3])} other"
                " ids than the tokenizer; save the tokenizer anew with save_pretrained"
            )
        return backend


get_template_encoder = functools.lru_cache(maxsize=8)(TemplateEncoder)
"""Returns the encoder of a template."""

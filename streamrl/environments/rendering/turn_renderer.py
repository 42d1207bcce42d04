"""Tokens of an episode that the policy does not sample: its prompt, and bridges between turns.

Tokens are appended, never made again:

    stream = prompt + sampled + bridge + sampled + bridge + sampled

A bridge closes the sampled turn, if the policy did not, shows the observation, and opens the next
turn. Rendering the whole conversation again would change tokens that the policy has sampled: a
decoded and encoded text rarely has the same tokens, and many templates rewrite earlier turns. Where
one does, the next turn may begin a new sample, whose prompt is the rendering (`render_rewritten`).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from streamrl.data.chat_template import ChatTemplate, decode_ids, get_frame_tokens
from streamrl.data.guarded_text import EncodedPieces
from streamrl.environments.interface import Message, ToolSchema
from streamrl.environments.rendering.bridge_text import BridgeText, BridgeWriter, TextPiece
from streamrl.environments.tool_calls.reply_text import replace_surrogates
from streamrl.errors import ConfigError
from streamrl.messages import Array

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROLES = ("user", "tool", "system")
"""Roles of an observation's messages."""
CLOSING, HEADER = 0, 1
"""Pieces of a bridge before its first observation."""
_NAME_CHARACTERS = re.compile(r"[^\w.:/-]")


@dataclass(frozen=True)
class BridgeTokens:
    """Tokens to append after a sampled turn.

    token_ids: int32 [B]. is_observation: bool [B], true for tokens with text of the environment,
    false for scaffold.
    """

    token_ids: Array
    is_observation: Array


class TurnRenderer:
    """Renderer of prompts and bridges with a chat template.

    Control tokens come from the template alone (`TemplateEncoder`). Without a template,
    observations are preceded by a newline, and nothing closes or opens a turn.

    end_token_ids: tokens that end a turn, as in generation_config.json, besides the tokenizer's EOS
    and the token by which the template closes a turn. Raises ConfigError if no bridges can be
    derived from the template. Methods may run in several threads.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        template: ChatTemplate,
        *,
        end_token_ids: Sequence[int] = (),
    ) -> None:
        if not tokenizer.is_fast:
            raise ConfigError(
                f"{tokenizer.name_or_path}: {type(tokenizer).__name__} does not tell which"
                " characters a token stands for; environments need a tokenizer with tokenizer.json"
            )
        given = {*end_token_ids, tokenizer.eos_token_id} - {None}
        self.tokenizer = tokenizer
        self.template = template
        self.encoder = template.get_encoder(tokenizer)
        end_texts = [decode_ids(tokenizer, [token]) for token in sorted(given)]
        self._writer = BridgeWriter(tokenizer, template, end_texts)
        self._tools_writer = self._writer
        if template.tools_source and template.tools_source != template.source:
            tools_template = replace(
                template,
                source=template.tools_source,
                tools_source=None,
                other_source=template.other_source + (template.source or ""),
            )
            self._tools_writer = BridgeWriter(tokenizer, tools_template, end_texts)
        self._opening_ids = get_frame_tokens(tokenizer)[0] if template.source is None else []
        bridge, _ = self._encode_bridge(self._writer.user_bridge)
        closing = self._find_marker(bridge, CLOSING)
        self.closing_ids = [] if closing is None else bridge.token_ids[: closing + 1].tolist()
        """Tokens by which the template closes a turn; [] if it does so by text, or not at all."""
        texts = {*self._writer.end_texts, *self._tools_writer.end_texts}
        ends = {*self.encoder.find_ids(texts), *self.closing_ids[-1:]}
        inner = self.encoder.find_ids(self._writer.inner_markers | self._tools_writer.inner_markers)
        self.end_token_ids = frozenset(given | (ends - inner))
        """Tokens that end a turn: as given, and those by which the template ends a whole turn."""
        self.early_ends = [decode_ids(tokenizer, [i]) for i in sorted(inner & self.end_token_ids)]
        """Given tokens that would end a turn within a thought, or before its second call."""
        last = int(bridge.token_ids[-1])
        if last in self.end_token_ids:
            raise ConfigError(
                f"{template.name}: opens the policy's turn with {decode_ids(tokenizer, [last])},"
                " which ends it; the template must leave the turn open, as with"
                " add_generation_prompt"
            )

    @property
    def can_render_tools(self) -> bool:
        """True if the template shows the schemas of tools to the model."""
        return self.template.can_render_tools

    def render_prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
        arguments: Mapping[str, Any] | None = None,
        *,
        observation: Sequence[Message] = (),
    ) -> Array:
        """Return the prompt of an episode, int32 [P], up to where the policy writes.

        arguments: arguments of the template, as a row's chat_template_kwargs. observation: messages
        of the environment after `messages`. Raises ConfigError if the template refuses the
        conversation.
        """
        writer = self.get_writer(has_tools=bool(tools))
        shown = _clean_messages(observation)
        pieces = writer.write_prompt(messages, shown, tools, arguments)
        token_ids = self._encode(pieces)
        return np.concatenate([np.array(self._opening_ids, np.int32), token_ids])

    def render_bridge(
        self,
        sampled_ids: Sequence[int] | Array,
        messages: Sequence[Message],
        *,
        is_cut: bool,
        has_tools: bool = False,
        arguments: Mapping[str, Any] | None = None,
    ) -> BridgeTokens:
        """Return the tokens between a sampled turn and the next one.

        sampled_ids: the sampled turn, with the token that ended it. messages: the observation.
        is_cut: the turn ended at a length limit, so the bridge contains the whole closing.
        has_tools: the prompt was rendered with tools. arguments: as for the prompt. Raises
        ConfigError for a role that the template does not support after a turn.
        """
        shown = clean_observation(messages)
        has_tools = has_tools or any(message["role"] == "tool" for message in shown)
        try:
            bridge = self.get_writer(has_tools=has_tools).write_bridge(shown, arguments)
        except ConfigError as error:
            roles = ", ".join(dict.fromkeys(message["role"] for message in shown))
            raise ConfigError(
                f"an observation of role {roles} cannot follow a turn: {error}; let the environment"
                " answer in another role, such as user"
            ) from error
        encoded, is_observation = self._encode_bridge(bridge)
        start = 0
        if not is_cut and len(sampled_ids):
            start = self._count_written(int(sampled_ids[-1]), encoded)
        return BridgeTokens(encoded.token_ids[start:], is_observation[start:])

    def render_rewritten(
        self,
        stream_ids: Sequence[int] | Array,
        row: Sequence[Message],
        later: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
        arguments: Mapping[str, Any] | None = None,
    ) -> Array | None:
        """Return a conversation as the template rewrites it, int32 [P]; None if it does not.

        stream_ids: appended tokens of the conversation, up to where the policy writes next. row:
        messages of the data row. later: turns and observations after it. tools, arguments: as for
        the prompt. The words of observations cannot write special tokens.

        Differences of whitespace alone are no rewriting: templates trim texts. Neither is a
        conversation that the template refuses, or of which it leaves out an observation.
        """
        if self.template.source is None:
            return None
        if row and later and _is_turn(row[-1]) and _is_turn(later[0]):
            # The policy continues the row's last message.
            turn = {**later[0], "content": row[-1]["content"] + later[0]["content"]}
            row, later = row[:-1], [turn, *later[1:]]
        messages = [*row, *_clean_later(later)]
        inserted = [i for i in range(len(row), len(messages)) if not _is_turn(messages[i])]
        has_tools = bool(tools) or any(message["role"] == "tool" for message in messages)
        writer = self.get_writer(has_tools=has_tools)
        try:
            rendered = self.encoder.encode(writer.render(messages, tools, arguments))
            if self._drop_whitespace(rendered) == self._drop_whitespace(stream_ids):
                return None
            return self._encode(writer.write_conversation(messages, inserted, tools, arguments))
        except ConfigError:
            return None

    def _drop_whitespace(self, token_ids: Sequence[int] | Array) -> str:
        return "".join(decode_ids(self.tokenizer, list(token_ids)).split())

    def get_writer(self, *, has_tools: bool) -> BridgeWriter:
        return self._tools_writer if has_tools else self._writer

    def _count_written(self, last: int, bridge: EncodedPieces) -> int:
        """Return how many tokens of a bridge the policy made unnecessary with its last token."""
        closing = self._find_marker(bridge, CLOSING)
        if closing is not None:
            # <|endoftext|> closes a turn as well as the template's own <|im_end|>.
            is_closed = last in self.end_token_ids or last == bridge.token_ids[closing]
            return closing + 1 if is_closed else 0
        # GLM-4 ends a turn with the first token of the next one's header, <|user|>.
        header = self._find_marker(bridge, HEADER)
        is_header = header is not None and last == bridge.token_ids[header]
        return header + 1 if header is not None and is_header and last in self.end_token_ids else 0

    def _find_marker(self, bridge: EncodedPieces, piece: int) -> int | None:
        """Return the index of a control token: the last of the closing, or the header's first."""
        is_within = bridge.ends <= bridge.stops[piece]
        found = np.flatnonzero(is_within & np.isin(bridge.token_ids, self.encoder.marker_ids))
        return int(found[-1 if piece == CLOSING else 0]) if found.size else None

    def _encode(self, pieces: Sequence[TextPiece]) -> Array:
        return self.encoder.encode_pieces([piece.text for piece in pieces]).token_ids

    def _encode_bridge(self, bridge: BridgeText) -> tuple[EncodedPieces, Array]:
        """Return the tokens of closing and pieces, and which of them show an observation."""
        pieces = [TextPiece(bridge.closing, False), *bridge.pieces]
        encoded = self.encoder.encode_pieces([piece.text for piece in pieces])
        is_observation: Array = np.zeros(len(encoded.token_ids), bool)
        for piece, start, stop in zip(pieces, [0, *encoded.stops], encoded.stops, strict=False):
            if piece.is_observation:
                is_observation |= (encoded.starts < stop) & (encoded.ends > start)
        return encoded, is_observation


def _is_turn(message: Message) -> bool:
    """Return whether the policy wrote the message."""
    return bool(message["role"] == "assistant")


def _clean_later(messages: Sequence[Message]) -> list[Message]:
    """Return turns of the policy as they are, and observations cleaned."""
    cleaned: list[Message] = []
    for is_turn, run in groupby(messages, key=_is_turn):
        said = [*run]
        cleaned += said if is_turn else _clean_messages(said)
    return cleaned


def clean_observation(messages: Sequence[Message]) -> list[Message]:
    """Return the messages after a turn, checked. Raises ConfigError, also if there is none."""
    if not messages:
        raise ConfigError("an observation needs a message, with empty content if need be")
    return _clean_messages(messages)


def _clean_messages(messages: Sequence[Message]) -> list[Message]:
    """Check the messages of an observation, and replace what no tokenizer takes."""
    cleaned: list[Message] = []
    for number, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if role not in ROLES or not isinstance(content, str):
            shown = f"role {role!r} and content of type {type(content).__name__}"
            rule = f"role {', '.join(ROLES[:-1])} or {ROLES[-1]}, and text as content"
            raise ConfigError(f"message {number} of an observation has {shown}; it needs {rule}")
        copy = {**message, "content": replace_surrogates(content)}
        if role == "tool":
            # The template may write both, and the policy may have made them up. Mistral's templates
            # require nine letters and digits as id.
            for key, default in (("name", "tool"), ("tool_call_id", f"call{number:05}")):
                copy[key] = _NAME_CHARACTERS.sub("_", str(message.get(key) or default))
        cleaned.append(copy)
    return cleaned

"""Tokens of completions that the data gives: those that a policy would sample in their place.

A conversation has the tokens of an episode: prompt + turn + bridge + turn. Each turn ends with the
token by which the template, or else the tokenizer, ends a turn, and that token is a target, too.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from streamrl.data.chat_template import (
    ChatTemplate,
    Conversation,
    get_text_frame,
    render_closed_text,
)
from streamrl.data.rows import DataRow, Piece
from streamrl.environments.rendering.turn_renderer import TurnRenderer
from streamrl.errors import ConfigError
from streamrl.messages import PAIRS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Targets = tuple[tuple[bytes, bytes], ...]
THOUGHTS = ("thinking", "reasoning_content", "reasoning")
NEXT_MESSAGE = {"role": "user", "content": ""}


class TargetRenderer:
    """Renderer of rows that give completions. ConfigError is that of TurnRenderer."""

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", template: ChatTemplate, gives: str
    ) -> None:
        self._renderer, self._is_pair = TurnRenderer(tokenizer, template), gives == PAIRS
        end_id = [tokenizer.eos_token_id, *self._renderer.closing_ids][-1]
        if end_id is None:
            raise ConfigError(f"{tokenizer.name_or_path}: no token ends a turn; set an eos_token")
        self._end_id = int(end_id)

    def render_row(self, row: DataRow) -> tuple[list[int], Targets]:
        """Return the token ids of a row's prompt, and its targets as `Prompt` has them.

        Raises ConfigError if the template refuses the row.
        """
        try:
            if self._is_pair:
                return self._render_pair(row)
            if row.pieces:
                return self._encode_pieces(row.pieces)
            arguments = row.template_arguments
            prompt = self._renderer.render_prompt(row.messages, row.tools, arguments).tolist()
            return prompt, tuple(self._render(row, messages) for messages in row.completions)
        except ConfigError as error:
            raise ConfigError(f"{row.location}: {error}") from error

    def _render_pair(self, row: DataRow) -> tuple[list[int], Targets]:
        """Return what two closed conversations have in common, and the rest of each.

        The tokens are those that a reward of kind model reads; the last of them is the target.
        """
        renderer, pair = self._renderer, []
        for completion in row.completions:
            messages = [*row.messages, *completion]
            whole = Conversation(row.location, messages, row.tools, row.template_arguments)
            text = render_closed_text(renderer.tokenizer, whole, renderer.template)
            first, last = get_text_frame(renderer.tokenizer, renderer.template)
            pair.append([*first, *renderer.encoder.encode(text), *last])
        shared = min(map(len, pair)) - 1
        shared = next((i for i in range(shared) if pair[0][i] != pair[1][i]), shared)
        if not shared:
            raise ConfigError("chosen and rejected have no first token in common")
        rests = [ids[shared:] for ids in pair]
        masks = [[False] * (len(ids) - 1) + [True] for ids in rests]
        return pair[0][:shared], tuple(map(_pack, rests, masks))

    def _encode_pieces(self, pieces: Sequence[Piece]) -> tuple[list[int], Targets]:
        """Return prompt and target of a recorded episode."""
        ids, mask = list[int](), list[bool]()
        for text, is_target, _ in pieces:
            encoded = self._renderer.tokenizer.encode(text, add_special_tokens=False)
            ids += encoded
            mask += [is_target] * len(encoded)
        start = mask.index(True) if any(mask) else len(mask)
        if any(is_prompt for _, _, is_prompt in pieces[1:]):
            raise ConfigError("an episode of several samples is no sequence that can be learned")
        return ids[:start], (_pack(ids[start:], mask[start:]),)

    def _render(self, row: DataRow, completion: Sequence[Mapping[str, Any]]) -> tuple[bytes, bytes]:
        """Return the tokens of a completion, and which of them are targets."""
        said, ids, mask = [*row.messages], list[int](), list[bool]()
        for is_turn, run in groupby(completion, key=lambda message: message["role"] == "assistant"):
            messages = [*run]
            if is_turn:
                turn = messages[0]
                if len(messages) > 1:
                    raise ConfigError("two messages of the assistant follow each other; join them")
                text = self._write_turn(row, said, turn)
                written = [*self._renderer.encoder.encode(text), self._end_id]
            else:
                written = self._renderer.render_bridge(
                    ids[-1:],
                    messages,
                    is_cut=False,
                    has_tools=bool(row.tools),
                    arguments=row.template_arguments,
                ).token_ids.tolist()
            ids += written
            mask += [is_turn] * len(written)
            said += messages
        return _pack(ids, mask)

    def _write_turn(
        self, row: DataRow, said: Sequence[Mapping[str, Any]], turn: Mapping[str, Any]
    ) -> str:
        """Return the text of a turn as the policy would write it."""
        has_tools = bool(row.tools) or any(message["role"] == "tool" for message in said)
        writer = self._renderer.get_writer(has_tools=has_tools)
        if self._renderer.template.source is None:
            return str(turn["content"])
        text = writer.write_turn(said, turn, [NEXT_MESSAGE], row.tools)
        hidden = [name for name in THOUGHTS if turn.get(name) and str(turn[name]) not in text]
        hidden += ["tool_calls"] * bool(turn.get("tool_calls") and text == turn["content"])
        if hidden:
            raise ConfigError(
                f"{self._renderer.template.name} leaves out {hidden[0]} of the assistant's message,"
                " which could not be learned; write it into content, or choose another template"
            )
        return text


def _pack(ids: Sequence[int], mask: Sequence[bool]) -> tuple[bytes, bytes]:
    return np.array(ids, np.int32).tobytes(), np.array(mask, np.bool_).tobytes()

"""Tokens of completions that the data gives: those that a policy would sample in their place.

A conversation has the tokens of an episode: prompt + turn + bridge + turn. Each turn ends with the
token by which the template, or else the tokenizer, ends a turn, and that token is a target, too.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from streamrl.data.chat_template import ChatTemplate
from streamrl.data.rows import DataRow
from streamrl.environments.rendering.turn_renderer import TurnRenderer
from streamrl.errors import ConfigError
from streamrl.messages import PAIRS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Targets = tuple[tuple[bytes, bytes], ...]
NEXT_MESSAGE = {"role": "user", "content": ""}


class TargetRenderer:
    """Renderer of rows that give completions. ConfigError is that of TurnRenderer."""

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", template: ChatTemplate, gives: str
    ) -> None:
        self._renderer = TurnRenderer(tokenizer, template)
        ends = self._renderer.closing_ids or [tokenizer.eos_token_id]
        self._end_id, self._is_pair = int(ends[-1]), gives == PAIRS

    def render_row(self, row: DataRow) -> tuple[list[int], Targets]:
        """Return the token ids of a row's prompt, and its targets as `Prompt` has them.

        Of a pair only the last tokens count. Raises ConfigError if the template refuses the row.
        """
        try:
            if row.pieces:
                return self._encode_pieces(row.pieces)
            arguments = row.template_arguments
            prompt = self._renderer.render_prompt(row.messages, row.tools, arguments).tolist()
            return prompt, tuple(self._render(row, messages) for messages in row.completions)
        except ConfigError as error:
            raise ConfigError(f"{row.location}: {error}") from error

    def _encode_pieces(self, pieces: Sequence[tuple[str, bool]]) -> tuple[list[int], Targets]:
        """Return prompt and target of a recorded episode: texts, and whether the policy wrote."""
        ids, mask = list[int](), list[bool]()
        for text, is_target in pieces:
            encoded = self._renderer.tokenizer.encode(text, add_special_tokens=False)
            ids += encoded
            mask += [is_target] * len(encoded)
        start = mask.index(True) if any(mask) else len(mask)
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
        return _pack(ids, [i == len(ids) - 1 for i in range(len(ids))] if self._is_pair else mask)

    def _write_turn(
        self, row: DataRow, said: Sequence[Mapping[str, Any]], turn: Mapping[str, Any]
    ) -> str:
        """Return the text of a turn as the policy would write it."""
        has_tools = bool(row.tools) or any(message["role"] == "tool" for message in said)
        writer = self._renderer.get_writer(has_tools=has_tools)
        if self._renderer.template.source is None:
            return str(turn["content"])
        return writer.write_turn(said, turn, [NEXT_MESSAGE], row.tools)


def _pack(ids: Sequence[int], mask: Sequence[bool]) -> tuple[bytes, bytes]:
    return np.array(ids, np.int32).tobytes(), np.array(mask, np.bool_).tobytes()

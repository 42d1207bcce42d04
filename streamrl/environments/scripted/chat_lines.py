r"""Conversations as lines of JSON whose characters are the tokens, for episodes without a model.

    {"tools": []}
    {"role": "user", "content": "Guess."}
    {"role": "assistant", "content": "32"}          sampled
    {"role": "user", "content": ">"}

The renderer and the format below stand where a chat template and a call format of a model stand, so
that persons and functions play in the same driver as models. A turn ends with its "\n".
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from streamrl.environments.interface import Message, Reply, ToolCall, ToolSchema
from streamrl.environments.rendering.turn_renderer import BridgeTokens, clean_observation
from streamrl.environments.tool_calls.call_formats import check_call
from streamrl.environments.tool_calls.json_calls import read_call_object
from streamrl.environments.tool_calls.marked_turn import WrittenCall
from streamrl.environments.tool_calls.pattern_calls import parse_python_calls
from streamrl.environments.tool_calls.tool_schema import get_tool_name
from streamrl.messages import Array

END_TOKEN = ord("\n")
_CALL_START = re.compile(r"\s*[A-Za-z_][\w.]*\s*\(")


def encode_lines(values: Iterable[Mapping[str, Any]]) -> Array:
    """Return the tokens of JSON objects, one per line, int32 [T]."""
    # ASCII only: a character of JSON's escapes is a token, whatever the text contains.
    text = "".join(f"{json.dumps(value)}\n" for value in values)
    return np.frombuffer(text.encode("ascii"), np.uint8).astype(np.int32)


def decode_lines(token_ids: Sequence[int] | Array) -> list[dict[str, Any]]:
    text = np.asarray(token_ids).astype(np.uint8).tobytes().decode("ascii")
    return [json.loads(line) for line in text.splitlines()]


def decode_conversation(token_ids: Array) -> tuple[list[Message], list[ToolSchema]]:
    """Return the messages and tools of an episode's tokens."""
    head, *messages = decode_lines(token_ids)
    return list(messages), list(head["tools"])


class ChatLineRenderer:
    """Renderer of prompts and bridges as lines of JSON (`EpisodeRenderer`)."""

    end_token_ids = frozenset({END_TOKEN})
    can_render_tools = True

    def render_prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
        arguments: Mapping[str, Any] | None = None,
        *,
        observation: Sequence[Message] = (),
    ) -> Array:
        shown = clean_observation(observation) if observation else ()
        return encode_lines([{"tools": list(tools)}, *messages, *shown])

    def render_bridge(
        self,
        sampled_ids: Sequence[int] | Array,
        messages: Sequence[Message],
        *,
        is_cut: bool,
        has_tools: bool = False,
        arguments: Mapping[str, Any] | None = None,
    ) -> BridgeTokens:
        """Return the observation's tokens. Raises ConfigError as for a model's template."""
        token_ids = encode_lines(clean_observation(messages))
        return BridgeTokens(token_ids, np.ones(len(token_ids), np.bool_))

    def render_rewritten(
        self,
        stream_ids: Sequence[int] | Array,
        row: Sequence[Message],
        later: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        """Return None: lines are never rewritten."""


class ChatLineFormat:
    """Parser of a sampled line (`TurnParser`).

    A message may have OpenAI's tool_calls. In an environment with tools, text that begins with
    `name(` is a call, or several that are separated by commas: add(a=1, b=2), stop().
    """

    def parse(
        self, token_ids: Sequence[int], tools: Sequence[ToolSchema], *, is_cut: bool = False
    ) -> Reply:
        """Split a line into text and tool calls, each with its outcome."""
        (message,) = decode_lines(token_ids)
        text, written = str(message.get("content") or ""), _read_calls(message)
        if tools and not written and _CALL_START.match(text):
            written = _read_text_calls(text)
            text = text if written[0].error else ""
        by_name = {get_tool_name(tool): tool for tool in tools}
        calls: list[ToolCall] = [check_call(call, by_name) for call in written]
        return Reply(text, calls, is_cut)


def _read_text_calls(text: str) -> list[WrittenCall]:
    try:
        calls = parse_python_calls(text)
    except ValueError as error:
        return [WrittenCall(0, len(text), error=str(error))]
    return [WrittenCall(0, len(text), name, arguments) for name, arguments in calls]


def _read_calls(message: Mapping[str, Any]) -> list[WrittenCall]:
    """Return the tool_calls of an assistant message; arguments are an object or JSON text."""
    calls = []
    for call in message.get("tool_calls") or ():
        try:
            function = dict(call["function"])
            if isinstance(function.get("arguments"), str):
                function["arguments"] = json.loads(function["arguments"])
            calls.append(WrittenCall(0, 0, *read_call_object(function)))
        except ValueError as error:
            calls.append(WrittenCall(0, 0, error=str(error)))
    return calls

"""Episodes whose turns come from a function of the conversation, in the driver that trains models.

No model tokenizes such a conversation: every message stands for one token.
"""

import ast
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from streamrl.environments.config import EnvironmentConfig
from streamrl.environments.episodes.decode_slots import DecodeSlots
from streamrl.environments.episodes.driver import EpisodeDriver, EpisodeLimits
from streamrl.environments.hosts.host_pool import (
    EnvironmentHostPool,
    EpisodeObserver,
    HostedSession,
)
from streamrl.environments.interface import Message, Reply, ToolSchema
from streamrl.environments.rendering.turn_renderer import BridgeTokens, clean_observation
from streamrl.environments.tool_calls.call_formats import check_call
from streamrl.environments.tool_calls.json_calls import read_call_object
from streamrl.environments.tool_calls.marked_turn import WrittenCall
from streamrl.environments.tool_calls.tool_schema import get_tool_name
from streamrl.errors import ConfigError
from streamrl.messages import Array, FinishReason, Prompt, Rollout
from streamrl.user_code.checks import format_value
from streamrl.user_code.python_module import load_referenced_function

PolicyReply = str | Message
"""Text of a turn, or an assistant message: content, and tool_calls in OpenAI's form."""
Policy = Callable[[Sequence[Message], Sequence[ToolSchema]], Awaitable[PolicyReply]]
"""Function that returns the next turn of a conversation."""
MAX_TOKENS = 2**31 - 1
"""Limit in place of a model's limits of tokens, which do not apply to text."""
CALL_RULE = "expected name(argument=value), ..."
_CALL_START = re.compile(r"\s*[A-Za-z_][\w.]*\s*\(")


def render_messages(messages: Sequence[Message], *_: Any, **__: Any) -> Array:
    """Return a token per message, int32 [M]."""
    return np.zeros(len(messages), np.int32)


class TextEpisode:
    """Sampler, renderer and parser of one episode, whose turns a policy writes.

    It stands where a model's engine, chat template and call format stand (`TurnSampler`,
    `EpisodeRenderer`, `TurnParser`).
    """

    end_token_ids = frozenset({1})
    can_render_tools = True
    paused_s = 0.0

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._messages: list[Message] = []
        self._tools: Sequence[ToolSchema] = ()

    def render_prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
        arguments: Mapping[str, Any] | None = None,
        *,
        observation: Sequence[Message] = (),
    ) -> Array:
        shown = clean_observation(observation) if observation else ()
        self._messages, self._tools = [*messages, *shown], tools
        return render_messages(self._messages)

    def render_bridge(
        self, sampled_ids: Sequence[int], messages: Sequence[Message], **_: Any
    ) -> BridgeTokens:
        """Add an observation. Raises ConfigError as for a model's template."""
        self._messages += clean_observation(messages)
        return BridgeTokens(render_messages(messages), np.ones(len(messages), np.bool_))

    def render_rewritten(self, *_: Any) -> None:
        """Return None: a conversation of text is never rewritten."""

    async def generate(self, prompt_ids: Array, *, seeds: Sequence[int], **_: Any) -> list[Rollout]:
        reply = await self._policy(self._messages, self._tools)
        turn = {"content": reply} if isinstance(reply, str) else reply
        self._messages.append({**turn, "role": "assistant"})
        return [
            Rollout.from_single_turn(
                prompt_ids,
                [0],
                logprobs=[0.0],
                versions=[0],
                finish_reason=FinishReason.STOP,
            )
            for _ in seeds
        ]

    def parse(
        self, token_ids: Sequence[int], tools: Sequence[ToolSchema], *, is_cut: bool = False
    ) -> Reply:
        """Return the last turn as text and tool calls, each with its outcome."""
        return parse_turn(self._messages[-1], tools)


def parse_turn(message: Message, tools: Sequence[ToolSchema]) -> Reply:
    """Split a turn into text and tool calls, each with its outcome.

    A message may have OpenAI's tool_calls. In an environment with tools, text that begins with
    `name(` is a call, or several that are separated by commas: add(a=1, b=2), stop().
    """
    text, written = str(message.get("content") or ""), _read_calls(message)
    if tools and not written and _CALL_START.match(text):
        written = _read_text_calls(text)
        text = text if written[0].error else ""
    by_name = {get_tool_name(tool): tool for tool in tools}
    return Reply(text, [check_call(call, by_name) for call in written])


def _read_text_calls(text: str) -> list[WrittenCall]:
    """Parse calls such as add(a=1, b=2), stop() without evaluating anything."""
    try:
        listed = ast.parse(f"[{text}]", mode="eval").body
        if not (isinstance(listed, ast.List) and listed.elts):
            raise ValueError("no list of calls")
        calls: list[Any] = list(listed.elts)
        return [
            WrittenCall(0, len(text), ast.unparse(call.func), _read_keywords(call))
            for call in calls
        ]
    except (SyntaxError, ValueError, MemoryError, RecursionError, AttributeError) as error:
        return [WrittenCall(0, len(text), error=f"{CALL_RULE}: {error}")]


def _read_keywords(call: Any) -> dict[str, Any]:
    if call.args or any(keyword.arg is None for keyword in call.keywords):
        raise ValueError("an argument has no name")
    return {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}


def _read_calls(message: Mapping[str, Any]) -> list[WrittenCall]:
    """Return the tool_calls of an assistant message; arguments are an object or JSON text."""
    calls = []
    for call in message.get("tool_calls") or ():
        try:
            function = dict(call["function"])
            if isinstance(function.get("arguments"), str):
                function["arguments"] = json.loads(function["arguments"])
            calls.append(WrittenCall(0, 0, *read_call_object(function)))
        except (ValueError, TypeError, KeyError) as error:
            calls.append(WrittenCall(0, 0, error=str(error)))
    return calls


@dataclass
class ObservedHosts:
    """Pool of a single episode at a time, whose answers an observer receives (`EnvironmentHosts`).

    is_watched: see HostedSession. session: the session that was opened last.
    """

    pool: EnvironmentHostPool
    observer: EpisodeObserver
    is_watched: bool = False
    session: HostedSession | None = None

    def open_session(self, prompt: Prompt, *, seed: int) -> HostedSession:
        self.session = self.pool.open_session(prompt, seed=seed)
        self.session.observer, self.session.is_watched = self.observer, self.is_watched
        return self.session

    async def close(self) -> None:
        await self.pool.close()


def make_text_driver(
    config: EnvironmentConfig, hosts: ObservedHosts, policy: Policy, *, timeout_s: float
) -> EpisodeDriver:
    """Return a driver of an episode without a model: no limits of tokens, and no second attempt."""
    episode = TextEpisode(policy)
    return EpisodeDriver(
        episode,
        hosts,
        episode,
        episode,
        limits=EpisodeLimits(config.max_turns, MAX_TOKENS, MAX_TOKENS, timeout_s),
        slots=DecodeSlots(1),
        attempts=1,
    )


def load_policy(reference: str, *, setting: str) -> Policy:
    """Load a user's function policy(messages, tools), named as file.py:function.

    Raises ConfigError if it cannot be loaded or called so. The policy raises ConfigError if the
    function raises, or returns neither text nor an assistant message.
    """
    code = load_referenced_function(reference, setting=setting)
    code.check_not_async()
    code.check_positional(("messages", "tools"))

    async def policy(messages: Sequence[Message], tools: Sequence[ToolSchema]) -> PolicyReply:
        try:
            reply = code.function(messages, tools)
        # SystemExit too: a user's function may call exit().
        except (Exception, SystemExit) as error:
            raise ConfigError(f"{setting}={code.describe_error(error)}") from error
        if not isinstance(reply, str | Mapping):
            raise ConfigError(
                f"{setting}={reference}: returned {format_value(reply)}; a policy returns text, or"
                " {'content': text, 'tool_calls': [{'function': {'name': ..., 'arguments':"
                " {...}}}]}"
            )
        return reply

    return policy

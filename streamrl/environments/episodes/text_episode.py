"""Episodes whose turns come from a function of the conversation, without a model and its tokens."""

import ast
import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from streamrl.environments.config import EnvironmentConfig
from streamrl.environments.episodes.driver import open_conversation, translate_template_errors
from streamrl.environments.hosts.host_pool import HostedSession
from streamrl.environments.interface import (
    EnvironmentStep,
    EpisodeSummary,
    Message,
    Reply,
    ResetResult,
    ToolSchema,
)
from streamrl.environments.rendering.turn_renderer import clean_observation
from streamrl.environments.tool_calls.call_formats import check_call, make_assistant_message
from streamrl.environments.tool_calls.marked_turn import WrittenCall
from streamrl.environments.tool_calls.tool_schema import get_tool_name
from streamrl.messages import Array, FinishReason, Prompt

PolicyReply = str | WrittenCall
"""Text of a turn, or a tool call."""
Policy = Callable[[Sequence[Message], Sequence[ToolSchema]], Awaitable[PolicyReply]]
"""Function that returns the next turn of a conversation."""
CALL_RULE = "write calls as name(argument=value), ..., with Python literals as values"
_CALL_START = re.compile(r"\s*[A-Za-z_][\w.]*\s*\(")


def render_messages(messages: Sequence[Message], *_: Any, **__: Any) -> Array:
    """Return a token per message, int32 [M]."""
    return np.zeros(len(messages), np.int32)


class TextEnd(NamedTuple):
    """End of an episode without a model; the score is the sum of the rewards at a timeout."""

    reason: FinishReason
    rewards: Sequence[float]
    score: float


class EpisodeObserver(Protocol):
    """Observer of an episode."""

    def see_start(self, prompt: Prompt, start: ResetResult) -> None: ...

    def see_turn(self, reply: Reply, step: EnvironmentStep) -> None: ...


async def play_text_episode(
    config: EnvironmentConfig,
    session: HostedSession,
    prompt: Prompt,
    policy: Policy,
    *,
    observer: EpisodeObserver,
    timeout_s: float | None,
) -> TextEnd:
    """Run an episode whose turns a policy writes, without limits of tokens.

    timeout_s: longest time from the reset to the last turn, s; None: any. Raises EpisodeError, also
    for an observation that no chat template could show.
    """
    start = await session.reset()
    observer.see_start(prompt, start)
    rewards: list[float] = []
    with translate_template_errors(prompt):
        shown = clean_observation(start.messages) if start.messages else []
    row, opened = open_conversation(prompt.messages, shown)
    messages, reason = [*row, *opened], None
    try:
        async with asyncio.timeout(timeout_s):
            while reason is None:
                reply = parse_turn(await policy(messages, start.tools), start.tools)
                messages.append(make_assistant_message(reply))
                step = await session.step(reply)
                observer.see_turn(reply, step)
                rewards.append(step.reward)
                if step.done:
                    reason = FinishReason.STOP
                elif len(rewards) == config.max_turns:
                    reason = FinishReason.TURNS
                else:
                    with translate_template_errors(prompt):
                        messages += clean_observation(step.messages)
    except TimeoutError:
        return TextEnd(FinishReason.TIMEOUT, rewards, sum(rewards))
    summary = EpisodeSummary(messages, rewards, reason.name.lower())
    return TextEnd(reason, rewards, await session.score(summary))


def parse_turn(turn: PolicyReply, tools: Sequence[ToolSchema]) -> Reply:
    """Split a turn into text and tool calls, each with its outcome.

    In an environment with tools, text that begins with `name(` is a call, or several that are
    separated by commas: add(a=1, b=2), stop().
    """
    text, written = ("", [turn]) if isinstance(turn, WrittenCall) else (turn, [])
    if tools and _CALL_START.match(text):
        written = _read_text_calls(text)
        text = text if written[0].error else ""
    by_name = {get_tool_name(tool): tool for tool in tools}
    return Reply(text, [check_call(call, by_name) for call in written])


def _read_text_calls(text: str) -> list[WrittenCall]:
    """Parse calls such as add(a=1, b=2), stop() without evaluating anything."""
    try:
        listed: Any = ast.parse(f"[{text}]", mode="eval").body
        return [
            WrittenCall(0, len(text), ast.unparse(call.func), _read_keywords(call))
            for call in listed.elts
        ]
    except (SyntaxError, ValueError, MemoryError, RecursionError, AttributeError):
        return [WrittenCall(0, len(text), error=CALL_RULE)]


def _read_keywords(call: Any) -> dict[str, Any]:
    if call.args or any(keyword.arg is None for keyword in call.keywords):
        raise ValueError
    return {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}

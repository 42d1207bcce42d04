"""Sampler whose turns come from a function of the conversation, and drivers of such episodes."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np

from streamrl.environments.config import EnvironmentConfig
from streamrl.environments.episodes.decode_slots import DecodeSlots
from streamrl.environments.episodes.driver import EpisodeDriver, EpisodeLimits
from streamrl.environments.interface import EnvironmentHosts, Message, ToolSchema
from streamrl.environments.scripted.chat_lines import (
    ChatLineFormat,
    ChatLineRenderer,
    decode_conversation,
    encode_lines,
)
from streamrl.errors import ConfigError
from streamrl.files.python_module import FileFunction, load_referenced_function
from streamrl.messages import Array, FinishReason, Rollout
from streamrl.rewards.interface.checks import format_value

PolicyReply = str | Message
"""Text of a turn, or an assistant message: content, and tool_calls in OpenAI's form."""
Policy = Callable[[Sequence[Message], Sequence[ToolSchema]], Awaitable[PolicyReply]]
"""Function that returns the next turn of a conversation."""
MAX_CHARACTERS = 2**31 - 1
"""Limit in place of a model's limits of tokens, which do not apply to text."""


class PolicySampler:
    """Sampler that has a policy write the turn (`TurnSampler`); its tokens are characters."""

    paused_s = 0.0

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    async def generate(
        self,
        prompt_ids: Array,
        *,
        seeds: Sequence[int],
        sampling: Any = None,
        max_new_tokens: int | None = None,
        stop_token_ids: Sequence[int] = (),
    ) -> list[Rollout]:
        reply = await self._policy(*decode_conversation(prompt_ids))
        message = {"content": reply} if isinstance(reply, str) else dict(reply)
        turn = encode_lines([{"role": "assistant", **message}])
        zeros = np.zeros(len(turn))
        return [
            Rollout.from_single_turn(
                prompt_ids,
                turn.tolist(),
                logprobs=zeros.tolist(),
                versions=zeros.astype(np.int32).tolist(),
                finish_reason=FinishReason.STOP,
            )
            for _ in seeds
        ]


def make_text_driver(
    config: EnvironmentConfig, hosts: EnvironmentHosts, policy: Policy, *, timeout_s: float
) -> EpisodeDriver:
    """Return a driver of episodes without a model: no limits of tokens, and no second attempt."""
    return EpisodeDriver(
        PolicySampler(policy),
        hosts,
        ChatLineRenderer(),
        ChatLineFormat(),
        limits=EpisodeLimits(config.max_turns, MAX_CHARACTERS, MAX_CHARACTERS, timeout_s),
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
        _check_reply(reply, code, setting)
        return reply  # type: ignore[no-any-return]

    return policy


def _check_reply(reply: Any, code: FileFunction, setting: str) -> None:
    is_message = isinstance(reply, Mapping) and all(
        isinstance(call, Mapping) and isinstance(call.get("function"), Mapping)
        for call in reply.get("tool_calls") or ()
    )
    if not isinstance(reply, str) and not is_message:
        raise ConfigError(
            f"{setting}={code.file}:{code.name}: returned {format_value(reply)}; a policy returns"
            " text, or {'content': text, 'tool_calls': [{'function': {'name': ..., 'arguments':"
            " {...}}}]}"
        )

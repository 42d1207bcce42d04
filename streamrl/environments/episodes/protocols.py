"""Engine, renderer and parser as the driver of episodes uses them."""

from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from streamrl.environments.interface import Message, Reply, ToolSchema
from streamrl.environments.rendering.turn_renderer import BridgeTokens
from streamrl.messages import Array, Rollout


class TurnSampler(Protocol):
    """Generation engine as the driver uses it (`GenerationEngine`)."""

    @property
    def paused_s(self) -> float:
        """Time for which the engine has been paused since its start, s."""
        ...

    async def generate(
        self,
        prompt_ids: Array,
        *,
        seeds: Sequence[int],
        sampling: Any = None,
        max_new_tokens: int | None = None,
        stop_token_ids: Sequence[int] = (),
    ) -> list[Rollout]: ...


class EpisodeRenderer(Protocol):
    """Renderer of what the policy reads: a model's (`TurnRenderer`), or one of text."""

    @property
    def end_token_ids(self) -> Collection[int]: ...

    @property
    def can_render_tools(self) -> bool: ...

    def render_prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
        arguments: Mapping[str, Any] | None = None,
        *,
        observation: Sequence[Message] = (),
    ) -> Array: ...

    def render_bridge(
        self,
        sampled_ids: Sequence[int],
        messages: Sequence[Message],
        *,
        is_cut: bool,
        has_tools: bool = False,
        arguments: Mapping[str, Any] | None = None,
    ) -> BridgeTokens: ...

    def render_rewritten(
        self,
        stream_ids: Array,
        row: Sequence[Message],
        later: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
        arguments: Mapping[str, Any] | None = None,
    ) -> Array | None: ...


class TurnParser(Protocol):
    """Parser of sampled turns: a model's (`CallFormat`), or one of text."""

    def parse(
        self, token_ids: Sequence[int], tools: Sequence[ToolSchema], *, is_cut: bool = False
    ) -> Reply: ...


ComputeContext = Callable[..., AbstractAsyncContextManager[MutableMapping[str, Any]]]
"""Returns a context that holds the device lease and records a span with facts, as
`StageContext.record_compute` does."""

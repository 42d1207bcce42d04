"""What callers of a generation engine wait for: rollouts, versions, its start and its end."""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from streamrl.engines.generation.partial_rollouts import extend_rollout
from streamrl.engines.vllm.engine import ModelInfo, SampledSequence
from streamrl.errors import ConfigError, GenerationError
from streamrl.messages import Rollout
from streamrl.weights import WeightLoadStats
from streamrl.weights.parameters import ParameterSet


def do_nothing() -> None:
    """Nobody is told."""


@dataclass(frozen=True)
class ProgressWatch:
    """What a caller wants to know of its rollouts while they are sampled.

    `progress` tells of them by `name`; `finished` is called for each that is, in any order.
    """

    name: str
    on_finished: Callable[[], None] = do_nothing


class PendingGroup:
    """The rollouts of one request, as they come in; `missing` are the indices of those to come.

    `begun` is what there was of each when the request was made, those included that were finished.
    """

    def __init__(
        self, begun: Sequence[Rollout], missing: Collection[int], watch: ProgressWatch | None = None
    ) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.missing_indices = set(missing)
        self.sampled_sequences: dict[int, SampledSequence] = {}
        self.watch = watch
        self._partials = begun
        self._report_finished(len(begun) - len(self.missing_indices))

    def add_sampled(self, sampled: SampledSequence) -> None:
        """One is finished; the last one makes the group done."""
        self.missing_indices.discard(sampled.index)
        self.sampled_sequences[sampled.index] = sampled
        self._report_finished(1)
        if not self.missing_indices and not self.done.done():
            self.done.set_result(None)

    def _report_finished(self, count: int) -> None:
        if self.watch is not None:
            for _ in range(count):
                self.watch.on_finished()

    def build_rollouts(self, running: Mapping[int, SampledSequence] | None = None) -> list[Rollout]:
        """All of them as they are now; `running` is what there is of the missing."""
        sampled = {**(running or {}), **self.sampled_sequences}
        return [
            _extend_with_sampled(rollout, sampled[index]) if index in sampled else rollout
            for index, rollout in enumerate(self._partials)
        ]


def _extend_with_sampled(rollout: Rollout, sampled: SampledSequence) -> Rollout:
    return extend_rollout(
        rollout,
        sampled.token_ids,
        logprobs=sampled.logprobs,
        versions=sampled.versions,
        finish_reason=sampled.finish_reason,
    )


class PendingRequests:
    """All pending calls of one engine; the EngineListener that brings them to an end."""

    def __init__(self, model_path: str) -> None:
        self._model_path = model_path
        self._failure: str | None = None
        self.version = -1
        self.model_info = ModelInfo(ParameterSet({}, ()), 0)
        self.pending_groups: dict[int, PendingGroup] = {}
        self.pending_loads: dict[int, asyncio.Future[WeightLoadStats]] = {}
        self.pending_replies: dict[int, asyncio.Future[Any]] = {}
        self.started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.thread_exit = asyncio.Event()

    def on_started(self, facts: ModelInfo) -> None:
        self.model_info = facts
        if not self.started.done():
            self.started.set_result(None)

    def on_sampled(self, batch: Sequence[SampledSequence]) -> None:
        for sampled in batch:
            group = self.pending_groups.get(sampled.request_id)
            if group is not None:
                group.add_sampled(sampled)

    def on_rejected(self, number: int, reason: str) -> None:
        group = self.pending_groups.get(number)
        if group is not None and not group.done.done():
            group.missing_indices.clear()
            group.done.set_exception(ConfigError(f"vLLM refuses the request: {reason}"))

    def on_loaded(self, version: int, loaded: WeightLoadStats) -> None:
        self.version = version
        waiting = self.pending_loads.get(version)
        if waiting is not None and not waiting.done():
            waiting.set_result(loaded)

    def on_reply(self, call: int, answer: Any) -> None:
        waiting = self.pending_replies.get(call)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    def on_exit(self, error: BaseException | None) -> None:
        self.thread_exit.set()
        if isinstance(error, ValueError | OSError) and not self.started.done():
            self.started.set_exception(
                ConfigError(f"generator: vLLM cannot start {self._model_path}: {error}")
            )
        ending = "ended" if error is None else f"died: {type(error).__name__}: {error}"
        self.fail_all(f"the engine of {self._model_path} {ending}")

    def fail_all(self, reason: str) -> None:
        """From now on every call raises, the pending ones first; the first reason counts."""
        self._failure = self._failure or reason
        waiting: list[asyncio.Future[Any]] = [self.started, *self.pending_loads.values()]
        waiting += self.pending_replies.values()
        waiting += [group.done for group in self.pending_groups.values()]
        for future in waiting:
            if not future.done():
                future.set_exception(GenerationError(self._failure))

    def check_alive(self) -> None:
        """Raise GenerationError if the engine is dead or closed."""
        if self._failure is not None:
            raise GenerationError(self._failure)

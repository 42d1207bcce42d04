"""Futures of pending calls to a generation engine: rollouts, weight loads, replies, start, exit."""

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
    pass


@dataclass(frozen=True)
class ProgressWatch:
    """Lets `collect_partial_rollouts` return the rollouts of a request while they are sampled.

    `name` is the key of the request there. `on_finished` is called for each finished rollout, in
    any order.
    """

    name: str
    on_finished: Callable[[], None] = do_nothing


class PendingGroup:
    """Collects the results of a request for several rollouts of a prompt.

    `partials` are all rollouts as they were when the request started, including finished ones.
    `missing` are the indices of those not finished yet.
    """

    def __init__(
        self,
        partials: Sequence[Rollout],
        missing: Collection[int],
        watch: ProgressWatch | None = None,
    ) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.missing_indices = set(missing)
        self.sampled_sequences: dict[int, SampledSequence] = {}
        self.watch = watch
        self._partials = partials
        self._report_finished(len(partials) - len(self.missing_indices))

    def add_sampled(self, sampled: SampledSequence) -> None:
        """Store the tokens of a finished sequence; the request's last sequence resolves `done`."""
        self.missing_indices.discard(sampled.index)
        self.sampled_sequences[sampled.index] = sampled
        self._report_finished(1)
        if not self.missing_indices and not self.done.done():
            self.done.set_result(None)

    def _report_finished(self, count: int) -> None:
        """Call the watch's `on_finished` once for each of `count` newly finished rollouts."""
        if self.watch is not None:
            for _ in range(count):
                self.watch.on_finished()

    def build_rollouts(self, running: Mapping[int, SampledSequence] | None = None) -> list[Rollout]:
        """Return all rollouts of the request, in order, with the tokens sampled so far.

        `running` holds the tokens of unfinished sequences by index; without it, unfinished rollouts
        are as they were at the start.
        """
        sampled = {**(running or {}), **self.sampled_sequences}
        return [
            _extend_with_sampled(rollout, sampled[index]) if index in sampled else rollout
            for index, rollout in enumerate(self._partials)
        ]


def _extend_with_sampled(rollout: Rollout, sampled: SampledSequence) -> Rollout:
    """Append the tokens of a vLLM result to the rollout that the sequence continued."""
    return extend_rollout(
        rollout,
        sampled.token_ids,
        logprobs=sampled.logprobs,
        versions=sampled.versions,
        finish_reason=sampled.finish_reason,
    )


class PendingRequests:
    """All pending calls of a generation engine; the EngineListener that resolves their futures."""

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

    def on_started(self, model_info: ModelInfo) -> None:
        self.model_info = model_info
        if not self.started.done():
            self.started.set_result(None)

    def on_sampled(self, batch: Sequence[SampledSequence]) -> None:
        for sampled in batch:
            group = self.pending_groups.get(sampled.request_id)
            if group is not None:
                group.add_sampled(sampled)

    def on_rejected(self, request_id: int, reason: str) -> None:
        group = self.pending_groups.get(request_id)
        if group is not None and not group.done.done():
            group.missing_indices.clear()
            group.done.set_exception(ConfigError(f"vLLM rejected the request: {reason}"))

    def on_loaded(self, version: int, stats: WeightLoadStats) -> None:
        self.version = version
        future = self.pending_loads.get(version)
        if future is not None and not future.done():
            future.set_result(stats)

    def on_reply(self, call_id: int, answer: Any) -> None:
        future = self.pending_replies.get(call_id)
        if future is not None and not future.done():
            future.set_result(answer)

    def on_exit(self, error: BaseException | None) -> None:
        self.thread_exit.set()
        if isinstance(error, ValueError | OSError) and not self.started.done():
            self.started.set_exception(
                ConfigError(f"generator: vLLM cannot start {self._model_path}: {error}")
            )
        outcome = "ended" if error is None else f"died: {type(error).__name__}: {error}"
        self.fail_all(f"the engine of {self._model_path} {outcome}")

    def fail_all(self, reason: str) -> None:
        """Make all pending and later calls raise GenerationError with `reason`.

        Later calls of this method do not replace the first reason.
        """
        self._failure = self._failure or reason
        futures: list[asyncio.Future[Any]] = [self.started, *self.pending_loads.values()]
        futures += self.pending_replies.values()
        futures += [group.done for group in self.pending_groups.values()]
        for future in futures:
            if not future.done():
                future.set_exception(GenerationError(self._failure))

    def check_alive(self) -> None:
        """Raise GenerationError if the engine has died or was closed."""
        if self._failure is not None:
            raise GenerationError(self._failure)

"""What callers of a generation engine wait for: rollouts, versions, its start and its end."""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from streamrl.engines.generation.partial_rollouts import extended
from streamrl.engines.vllm.engine import ModelFacts, Sampled
from streamrl.errors import ConfigError, GenerationError
from streamrl.messages import Rollout
from streamrl.weights import Loaded
from streamrl.weights.parameters import ParameterSet


def nobody() -> None:
    """Nobody is told."""


@dataclass(frozen=True)
class Watch:
    """What a caller wants to know of its rollouts while they are sampled.

    `progress` tells of them by `name`; `finished` is called for each that is, in any order.
    """

    name: str
    finished: Callable[[], None] = nobody


class PendingGroup:
    """The rollouts of one request, as they come in; `missing` are the indices of those to come.

    `begun` is what there was of each when the request was made, those included that were finished.
    """

    def __init__(
        self, begun: Sequence[Rollout], missing: Collection[int], watch: Watch | None = None
    ) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.missing = set(missing)
        self.sampled: dict[int, Sampled] = {}
        self.watch = watch
        self._begun = begun
        self._tell(len(begun) - len(self.missing))

    def add(self, sampled: Sampled) -> None:
        """One is finished; the last one makes the group done."""
        self.missing.discard(sampled.index)
        self.sampled[sampled.index] = sampled
        self._tell(1)
        if not self.missing and not self.done.done():
            self.done.set_result(None)

    def _tell(self, count: int) -> None:
        if self.watch is not None:
            for _ in range(count):
                self.watch.finished()

    def rollouts(self, running: Mapping[int, Sampled] | None = None) -> list[Rollout]:
        """All of them as they are now; `running` is what there is of the missing."""
        sampled = {**(running or {}), **self.sampled}
        return [
            _after(rollout, sampled[index]) if index in sampled else rollout
            for index, rollout in enumerate(self._begun)
        ]


def _after(rollout: Rollout, sampled: Sampled) -> Rollout:
    return extended(
        rollout,
        sampled.token_ids,
        logprobs=sampled.logprobs,
        versions=sampled.versions,
        finish_reason=sampled.finish_reason,
    )


class PendingCalls:
    """All pending calls of one engine; the EngineListener that brings them to an end."""

    def __init__(self, model_path: str) -> None:
        self._model_path = model_path
        self._failure: str | None = None
        self.version = -1
        self.facts = ModelFacts(ParameterSet({}, ()), 0)
        self.groups: dict[int, PendingGroup] = {}
        self.loads: dict[int, asyncio.Future[Loaded]] = {}
        self.answers: dict[int, asyncio.Future[Any]] = {}
        self.started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ended = asyncio.Event()

    def on_started(self, facts: ModelFacts) -> None:
        self.facts = facts
        if not self.started.done():
            self.started.set_result(None)

    def on_sampled(self, batch: Sequence[Sampled]) -> None:
        for sampled in batch:
            group = self.groups.get(sampled.number)
            if group is not None:
                group.add(sampled)

    def on_refused(self, number: int, reason: str) -> None:
        group = self.groups.get(number)
        if group is not None and not group.done.done():
            group.missing.clear()
            group.done.set_exception(ConfigError(f"vLLM refuses the request: {reason}"))

    def on_loaded(self, version: int, loaded: Loaded) -> None:
        self.version = version
        waiting = self.loads.get(version)
        if waiting is not None and not waiting.done():
            waiting.set_result(loaded)

    def on_answered(self, call: int, answer: Any) -> None:
        waiting = self.answers.get(call)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    def on_ended(self, error: BaseException | None) -> None:
        self.ended.set()
        if isinstance(error, ValueError | OSError) and not self.started.done():
            self.started.set_exception(
                ConfigError(f"generator: vLLM cannot start {self._model_path}: {error}")
            )
        ending = "ended" if error is None else f"died: {type(error).__name__}: {error}"
        self.fail(f"the engine of {self._model_path} {ending}")

    def fail(self, reason: str) -> None:
        """From now on every call raises, the pending ones first; the first reason counts."""
        self._failure = self._failure or reason
        waiting: list[asyncio.Future[Any]] = [self.started, *self.loads.values()]
        waiting += self.answers.values()
        waiting += [group.done for group in self.groups.values()]
        for future in waiting:
            if not future.done():
                future.set_exception(GenerationError(self._failure))

    def check_alive(self) -> None:
        """Raise GenerationError if the engine is dead or closed."""
        if self._failure is not None:
            raise GenerationError(self._failure)

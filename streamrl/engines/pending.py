"""What callers of a generation engine wait for: rollouts, versions, its start and its end."""

import asyncio
from collections.abc import Sequence
from typing import Any

from streamrl.engines.vllm_engine import Checkpoint, Sampled
from streamrl.errors import ConfigError, GenerationError
from streamrl.messages import Rollout
from streamrl.weights import ParameterSet


class PendingGroup:
    """The rollouts of one request, as they come in."""

    def __init__(self, num_rollouts: int) -> None:
        self.done: asyncio.Future[list[Rollout]] = asyncio.get_running_loop().create_future()
        self.missing = set(range(num_rollouts))
        self._rollouts: dict[int, Rollout] = {}

    def add(self, index: int, rollout: Rollout) -> None:
        """One has come; the last one makes the group done."""
        self.missing.discard(index)
        self._rollouts[index] = rollout
        if not self.missing and not self.done.done():
            self.done.set_result([self._rollouts[i] for i in range(len(self._rollouts))])


class PendingCalls:
    """All pending calls of one engine; the EngineListener that brings them to an end."""

    def __init__(self, model_path: str) -> None:
        self._model_path = model_path
        self._failure: str | None = None
        self.version = -1
        self.checkpoint = Checkpoint(ParameterSet({}, ()), 0)
        self.groups: dict[int, PendingGroup] = {}
        self.loads: dict[int, asyncio.Future[None]] = {}
        self.started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ended = asyncio.Event()

    def on_started(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        if not self.started.done():
            self.started.set_result(None)

    def on_sampled(self, batch: Sequence[Sampled]) -> None:
        for sampled in batch:
            group = self.groups.get(sampled.number)
            if group is not None:
                group.add(sampled.index, sampled.rollout)

    def on_refused(self, number: int, reason: str) -> None:
        group = self.groups.get(number)
        if group is not None and not group.done.done():
            group.missing.clear()
            group.done.set_exception(ConfigError(f"vLLM refuses the request: {reason}"))

    def on_loaded(self, version: int) -> None:
        self.version = version
        loaded = self.loads.get(version)
        if loaded is not None and not loaded.done():
            loaded.set_result(None)

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
        waiting += [group.done for group in self.groups.values()]
        for future in waiting:
            if not future.done():
                future.set_exception(GenerationError(self._failure))

    def check_alive(self) -> None:
        """Raise GenerationError if the engine is dead or closed."""
        if self._failure is not None:
            raise GenerationError(self._failure)

"""Thread that owns a vLLM engine: executes commands between decode steps and reports results.

    loop:  take commands -> execute them -> decode step -> report finished rollouts

Results go to the event loop, those of sampling batched per step. Any exception ends the thread,
since the engine's state is unknown afterwards: all pending futures fail, and threading's excepthook
prints the traceback.
"""

import asyncio
import queue
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from streamrl.engines.vllm import engine as vllm_engine
from streamrl.engines.vllm.engine import (
    EngineSpec,
    KvCacheMemory,
    ModelInfo,
    SampledSequence,
    SamplingRequest,
    TokenCount,
    VllmEngine,
    make_vllm_request_id,
)
from streamrl.engines.vllm.stop_conditions import StopConditions
from streamrl.errors import ConfigError, GenerationError
from streamrl.resharding.storage import ShardStorage
from streamrl.weights import WeightLoadStats

EngineCommand = Callable[[VllmEngine], None]


Result = TypeVar("Result")


@dataclass(frozen=True)
class WeightUpdate:
    """Parameters of a version to load; `tensors` is None if resharding has written them already."""

    tensors: Mapping[str, torch.Tensor] | None
    version: int
    stats: asyncio.Future[WeightLoadStats]


class EngineThread:
    """Builds a vLLM engine, steps it while it has requests, and shuts it down.

    Public methods belong to the event loop. Except for `start`, they enqueue a command, which the
    thread executes before its next step. Once the engine has ended, all pending futures and later
    calls raise GenerationError.
    """

    def __init__(
        self,
        spec: EngineSpec,
        on_sampled: Callable[[Sequence[SampledSequence]], None],
        on_rejected: Callable[[int, str], None],
    ) -> None:
        """Prepare the thread.

        The event loop calls `on_sampled` with the rollouts that a decode step finished, and
        `on_rejected` with the id of a request and vLLM's reason.
        """
        #: Version of the weights that the engine samples with; -1 before the first load.
        self.version = -1
        self.exited = asyncio.Event()
        self._spec = spec
        self._on_sampled = on_sampled
        self._on_rejected = on_rejected
        self._loop = asyncio.get_running_loop()
        self._commands: queue.SimpleQueue[EngineCommand | None] = queue.SimpleQueue()
        #: While draining: pending weight updates and all later requests, in order.
        self._deferred_work: deque[WeightUpdate | SamplingRequest] = deque()
        self._is_paused = False
        self._failure: str | None = None
        self._pending: set[asyncio.Future[Any]] = set()
        self._started: asyncio.Future[ModelInfo] = self.create_future()
        # A daemon thread: a stuck decode step must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name="vllm-engine", daemon=True)

    def start(self) -> asyncio.Future[ModelInfo]:
        self._thread.start()
        return self._started

    def create_future(self) -> asyncio.Future[Any]:
        """Create a future that fails if the engine ends."""
        self.check_alive()
        future: asyncio.Future[Any] = self._loop.create_future()
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)
        return future

    def check_alive(self) -> None:
        """Raise GenerationError if the engine has died or was closed."""
        if self._failure is not None:
            raise GenerationError(self._failure)

    def fail_pending(self, reason: str) -> None:
        """Make all pending and later calls raise GenerationError with the first `reason` given."""
        self._failure = self._failure or reason
        for future in [future for future in self._pending if not future.done()]:
            future.set_exception(GenerationError(self._failure))

    def add_requests(self, requests: Sequence[SamplingRequest]) -> None:
        self._commands.put(lambda engine: self._add_or_defer(engine, requests))

    def abort_sequences(self, request_id: int, indices: Sequence[int]) -> None:
        names = [vllm_engine.make_vllm_request_id(request_id, index) for index in indices]
        self._commands.put(lambda engine: self._abort_sequences(engine, request_id, names))

    def load_weights(
        self, tensors: Mapping[str, torch.Tensor] | None, version: int
    ) -> asyncio.Future[WeightLoadStats]:
        """Load all parameters as `version`.

        With `should_drain`, the engine first finishes earlier requests. `tensors` None means that
        resharding has written the parameters into the storage already.
        """
        update = WeightUpdate(tensors, version, self.create_future())
        self._commands.put(lambda engine: self._load_or_defer(engine, update))
        return update.stats

    def use_model_dir(self, version: int) -> asyncio.Future[WeightLoadStats]:
        """Label the weights that the engine was built with as `version`."""

        def command(engine: VllmEngine) -> WeightLoadStats:
            vllm_engine.set_weight_version(engine, version)
            self.version = version
            return WeightLoadStats()

        return self._submit(command)

    def list_partials(
        self, request_ids: Collection[int]
    ) -> asyncio.Future[Sequence[SampledSequence]]:
        return self._submit(lambda engine: vllm_engine.list_partial_sequences(engine, request_ids))

    def count_tokens(self) -> asyncio.Future[dict[str, TokenCount]]:
        return self._submit(
            lambda engine: self._count_deferred() | vllm_engine.count_tokens(engine)
        )

    def _count_deferred(self) -> dict[str, TokenCount]:
        return {
            make_vllm_request_id(work.request_id, sequence.index): TokenCount(0, is_running=False)
            for work in self._deferred_work
            if isinstance(work, SamplingRequest)
            for sequence in work.sequences
        }

    def get_storage(self) -> asyncio.Future[ShardStorage | None]:
        return self._submit(lambda engine: self._weight_loader.get_storage())

    def sleep(self) -> asyncio.Future[None]:
        return self._submit(lambda engine: self._kv_memory.sleep())

    def pause(self) -> asyncio.Future[None]:
        """Stop decoding; other commands are still executed."""
        return self._submit(lambda engine: self._set_paused(True))

    def resume(self) -> None:
        self._commands.put(lambda engine: self._set_paused(False))

    def stop(self) -> None:
        """End the thread before the next decode step and drop all running requests."""
        self._commands.put(None)

    def _submit(self, command: Callable[[VllmEngine], Result]) -> asyncio.Future[Result]:
        future = self.create_future()
        self._commands.put(lambda engine: self._resolve(future, command(engine)))
        return future

    def _set_paused(self, is_paused: bool) -> None:
        self._is_paused = is_paused

    def _run(self) -> None:
        try:
            with vllm_engine.claim_process_engine():
                model_info = vllm_engine.read_model_info(self._spec.model_path)
                self._stop_conditions = StopConditions(self._spec.model_path, self._spec.config)
                engine = vllm_engine.build_vllm_engine(self._spec)
                self._kv_memory = KvCacheMemory(engine)
                self._weight_loader = vllm_engine.make_weight_loader(
                    engine, self._spec, model_info.parameters
                )
                try:
                    self._resolve(self._started, model_info)
                    with vllm_engine.translate_lost_rank_errors(engine):
                        self._run_loop(engine)
                finally:
                    # Also after a failure: otherwise vLLM shuts down when the engine is garbage
                    # collected, and destroys the process groups of the next engine.
                    vllm_engine.shut_down_engine(engine)
        finally:
            self._call_loop(self._handle_exit, sys.exception())

    def _call_loop(self, function: Callable[..., None], *args: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *args)

    def _resolve(self, future: asyncio.Future[Result], result: Result) -> None:
        """Resolve a future on the event loop, unless its caller has given up."""

        def set_result() -> None:
            if not future.done():
                future.set_result(result)

        self._call_loop(set_result)

    def _handle_exit(self, error: BaseException | None) -> None:
        self.exited.set()
        path = self._spec.model_path
        if isinstance(error, ValueError | OSError) and not self._started.done():
            self._started.set_exception(
                ConfigError(f"generator: vLLM cannot start {path}: {error}")
            )
        outcome = "ended"
        if error is not None:
            # vLLM's classes assert on settings without a word.
            reason = str(error) or traceback.extract_tb(error.__traceback__)[-1].line
            outcome = f"died: {type(error).__name__}: {reason}"
        self.fail_pending(f"the engine of {path} {outcome}")

    def _run_loop(self, engine: VllmEngine) -> None:
        """Alternate commands and decode steps until `stop`; block while no step is possible."""
        while True:
            for command in self._take_commands(wait=not self._can_step(engine)):
                if command is None:
                    return
                command(engine)
                del command  # which may keep loaded weights alive
            if self._can_step(engine):
                self._kv_memory.wake_up()
                batch = vllm_engine.step_engine(engine)
                if batch:
                    self._call_loop(self._on_sampled, batch)
                self._run_deferred(engine)

    def _can_step(self, engine: VllmEngine) -> bool:
        return not self._is_paused and engine.has_unfinished_requests()

    def _take_commands(self, *, wait: bool) -> list[EngineCommand | None]:
        """Return all queued commands (None: `stop`); with `wait`, block until one arrives."""
        commands = [self._commands.get()] if wait else []
        try:
            while True:
                commands.append(self._commands.get_nowait())
        except queue.Empty:
            return commands

    def _add_or_defer(self, engine: VllmEngine, requests: Sequence[SamplingRequest]) -> None:
        for request in requests:
            if self._deferred_work:
                self._deferred_work.append(request)
            else:
                self._add_request(engine, request)

    def _load_or_defer(self, engine: VllmEngine, update: WeightUpdate) -> None:
        if self._spec.should_drain and (self._deferred_work or engine.has_unfinished_requests()):
            self._deferred_work.append(update)
        else:
            self._load_weights(engine, update)

    def _run_deferred(self, engine: VllmEngine) -> None:
        """Once the engine is drained, load deferred weights and add deferred requests, in order.

        Stops at the next weight update if requests were added before it.
        """
        if not self._deferred_work or engine.has_unfinished_requests():
            return
        while self._deferred_work:
            match self._deferred_work[0]:
                case WeightUpdate() as update if not engine.has_unfinished_requests():
                    self._load_weights(engine, update)
                case SamplingRequest() as request:
                    self._add_request(engine, request)
                case _:
                    return
            self._deferred_work.popleft()

    def _add_request(self, engine: VllmEngine, request: SamplingRequest) -> None:
        reason = vllm_engine.add_request(engine, request, self._stop_conditions)
        if reason is not None:
            self._call_loop(self._on_rejected, request.request_id, reason)

    def _abort_sequences(self, engine: VllmEngine, request_id: int, names: Sequence[str]) -> None:
        """Abort the vLLM requests `names`; drop their request if it is still deferred."""
        engine.abort_request(list(names))
        self._deferred_work = deque(
            work
            for work in self._deferred_work
            if isinstance(work, WeightUpdate) or work.request_id != request_id
        )
        self._run_deferred(engine)

    def _load_weights(self, engine: VllmEngine, update: WeightUpdate) -> None:
        stats = vllm_engine.load_weights(
            engine,
            self._weight_loader,
            update.tensors,
            update.version,
            should_keep_kv=self._spec.should_keep_kv,
        )
        self.version = update.version
        self._resolve(update.stats, stats)

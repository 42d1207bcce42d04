"""Thread that owns a vLLM engine: executes commands between decode steps and reports results.

    loop:  take commands -> execute them -> decode step -> report finished rollouts

Results go to an `EngineListener` on the event loop, batched per step. Any exception ends the
thread, since the engine's state is unknown afterwards. The listener receives the exception, and
threading's excepthook prints the traceback.
"""

import asyncio
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from streamrl.engines.vllm import engine as vllm_engine
from streamrl.engines.vllm.engine import (
    EngineSpec,
    ModelInfo,
    SampledSequence,
    SamplingRequest,
    VllmEngine,
)
from streamrl.engines.vllm.kv_cache import KvCacheMemory
from streamrl.engines.vllm.stop_conditions import StopConditions
from streamrl.weights import WeightLoadStats

EngineCommand = Callable[[VllmEngine], None]


@dataclass(frozen=True)
class WeightUpdate:
    """Parameters of a version to load; `tensors` is None if resharding has written them already."""

    tensors: Mapping[str, torch.Tensor] | None
    version: int


class EngineListener(Protocol):
    """Receives the results of an engine's thread; methods run on the event loop.

    on_started: facts of the model once the engine is built. on_sampled: rollouts that a decode step
    finished. on_rejected: vLLM's reason for rejecting a request. on_loaded: statistics of a weight
    load, after which `version` is served. on_reply: answer to the command with `call_id`. on_exit:
    end of the thread, with `error` None after a regular `stop`.
    """

    def on_started(self, model_info: ModelInfo) -> None: ...

    def on_sampled(self, batch: Sequence[SampledSequence]) -> None: ...

    def on_rejected(self, request_id: int, reason: str) -> None: ...

    def on_loaded(self, version: int, stats: WeightLoadStats) -> None: ...

    def on_reply(self, call_id: int, answer: Any) -> None: ...

    def on_exit(self, error: BaseException | None) -> None: ...


class EngineThread:
    """Builds a vLLM engine, steps it while it has requests, and shuts it down.

    Public methods except `start` enqueue a command, which the thread executes before its next step.
    """

    def __init__(self, spec: EngineSpec, listener: EngineListener) -> None:
        self._spec = spec
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._commands: queue.SimpleQueue[EngineCommand | None] = queue.SimpleQueue()
        #: While draining: pending weight updates and all later requests, in order.
        self._deferred_work: deque[WeightUpdate | SamplingRequest] = deque()
        self._is_paused = False
        # A daemon thread: a stuck decode step must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name="vllm-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def add_requests(self, requests: Sequence[SamplingRequest]) -> None:
        self._commands.put(lambda engine: self._add_or_defer(engine, requests))

    def abort_sequences(self, request_id: int, indices: Sequence[int]) -> None:
        """Abort the sequences at `indices` of a request; the listener gets no result of them."""
        names = [vllm_engine.make_vllm_request_id(request_id, index) for index in indices]
        self._commands.put(lambda engine: self._abort_sequences(engine, request_id, names))

    def load_weights(self, tensors: Mapping[str, torch.Tensor] | None, version: int) -> None:
        """Load all parameters as `version`.

        With `should_drain`, the engine first finishes earlier requests. `tensors` None means that
        resharding has written the parameters into the storage already.
        """
        update = WeightUpdate(tensors, version)
        self._commands.put(lambda engine: self._load_or_defer(engine, update))

    def request_partials(self, call_id: int, request_ids: Collection[int]) -> None:
        """Request the unfinished sequences of some requests; the answer goes to `on_reply`."""
        self._run_and_reply(
            call_id, lambda engine: vllm_engine.list_partial_sequences(engine, request_ids)
        )

    def request_storage(self, call_id: int) -> None:
        """Request the views of vLLM's parameters; the answer goes to `on_reply`."""
        self._run_and_reply(call_id, lambda engine: self._weight_loader.get_storage())

    def use_model_dir(self, version: int) -> None:
        """Label the weights that the engine was built with (the model directory's) as `version`."""
        self._commands.put(lambda engine: self._set_version(engine, version))

    def sleep(self, call_id: int) -> None:
        self._run_and_reply(call_id, lambda engine: self._kv_memory.sleep())

    def pause(self, call_id: int) -> None:
        """Stop decoding and reply to `on_reply`; other commands are still executed."""

        def command(engine: VllmEngine) -> None:
            self._is_paused = True

        self._run_and_reply(call_id, command)

    def resume(self) -> None:
        def command(engine: VllmEngine) -> None:
            self._is_paused = False

        self._commands.put(command)

    def _run_and_reply(self, call_id: int, query: Callable[[VllmEngine], Any]) -> None:
        """Enqueue a command that sends the result of `query` to the listener's `on_reply`."""
        self._commands.put(
            lambda engine: self._notify_listener(self._listener.on_reply, call_id, query(engine))
        )

    def stop(self) -> None:
        """End the thread before the next decode step and drop all running requests."""
        self._commands.put(None)

    def _run(self) -> None:
        """Build the engine, run commands and steps, shut the engine down; body of the thread."""
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
                    self._notify_listener(self._listener.on_started, model_info)
                    with vllm_engine.translate_lost_rank_errors(engine):
                        self._run_loop(engine)
                finally:
                    # Also after a failure: otherwise vLLM shuts down when the engine is garbage
                    # collected, and destroys the process groups of the next engine.
                    vllm_engine.shut_down_engine(engine)
        finally:
            self._notify_listener(self._listener.on_exit, sys.exception())

    def _notify_listener(self, method: Callable[..., None], *args: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(method, *args)

    def _run_loop(self, engine: VllmEngine) -> None:
        """Alternate commands and decode steps until `stop`; block while no step is possible."""
        while True:
            for command in self._take_commands(wait=not self._can_step(engine)):
                if command is None:
                    return
                command(engine)
            if self._can_step(engine):
                self._kv_memory.wake_up()
                batch = vllm_engine.step_engine(engine)
                if batch:
                    self._notify_listener(self._listener.on_sampled, batch)
                self._run_deferred(engine)

    def _can_step(self, engine: VllmEngine) -> bool:
        return not self._is_paused and engine.has_unfinished_requests()

    def _take_commands(self, *, wait: bool) -> list[EngineCommand | None]:
        """Return all queued commands; with `wait`, block until a command arrives.

        None stands for `stop`.
        """
        commands = [self._commands.get()] if wait else []
        try:
            while True:
                commands.append(self._commands.get_nowait())
        except queue.Empty:
            return commands

    def _add_or_defer(self, engine: VllmEngine, requests: Sequence[SamplingRequest]) -> None:
        """Add requests to the engine, or defer them if a weight update waits for draining."""
        for request in requests:
            if self._deferred_work:
                self._deferred_work.append(request)
            else:
                self._add_request(engine, request)

    def _load_or_defer(self, engine: VllmEngine, update: WeightUpdate) -> None:
        """Load an update's weights, or defer the load if the engine must drain first."""
        if self._spec.should_drain and (self._deferred_work or engine.has_unfinished_requests()):
            self._deferred_work.append(update)
        else:
            self._load_weights(engine, update)

    def _run_deferred(self, engine: VllmEngine) -> None:
        """Once the engine is drained, load deferred weights and add deferred requests, in order.

        Stops at the next weight update if requests were added before it: these must finish first.
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
            self._notify_listener(self._listener.on_rejected, request.request_id, reason)

    def _abort_sequences(self, engine: VllmEngine, request_id: int, names: Sequence[str]) -> None:
        """Abort the vLLM requests `names`, which are sequences of the request `request_id`.

        Drops the request if it is still deferred.
        """
        engine.abort_request(list(names))
        self._deferred_work = deque(
            work
            for work in self._deferred_work
            if isinstance(work, WeightUpdate) or work.request_id != request_id
        )
        self._run_deferred(engine)

    def _load_weights(self, engine: VllmEngine, update: WeightUpdate) -> None:
        """Load the parameters of an update now and report the load to the listener."""
        stats = vllm_engine.load_weights(
            engine,
            self._weight_loader,
            update.tensors,
            update.version,
            should_keep_kv=self._spec.should_keep_kv,
        )
        self._notify_listener(self._listener.on_loaded, update.version, stats)

    def _set_version(self, engine: VllmEngine, version: int) -> None:
        """Label the engine's present weights as `version` and report that as a load."""
        vllm_engine.set_weight_version(engine, version)
        self._notify_listener(self._listener.on_loaded, version, WeightLoadStats(0.0, 0, 0))

"""The thread that owns a vLLM engine: nobody else touches it, and all is done between two steps.

What the thread has to say it says to an `EngineListener` on the event loop, a batch per step. An
exception ends the thread, is reported as the reason and printed by threading's hook: an engine that
failed once is not trusted again.
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
    """A full set of parameters and the version it is; None where they are in place already."""

    tensors: Mapping[str, torch.Tensor] | None
    version: int


class EngineListener(Protocol):
    """Who hears from the thread; every method is called on the event loop."""

    def on_started(self, facts: ModelInfo) -> None:
        """The engine is up, with a model such as this."""

    def on_sampled(self, batch: Sequence[SampledSequence]) -> None:
        """Rollouts that one step finished."""

    def on_rejected(self, number: int, reason: str) -> None:
        """A request vLLM would not take; nothing of it runs."""

    def on_loaded(self, version: int, loaded: WeightLoadStats) -> None:
        """From the next token on, tokens are sampled by this version."""

    def on_reply(self, call: int, answer: Any) -> None:
        """What was asked for under this number, between two steps."""

    def on_exit(self, error: BaseException | None) -> None:
        """The thread is over: it was stopped, or this error killed it."""


class EngineThread:
    """Builds an engine, steps it while it has work, and shuts it down; see the module."""

    def __init__(self, spec: EngineSpec, listener: EngineListener) -> None:
        self._spec = spec
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._commands: queue.SimpleQueue[EngineCommand | None] = queue.SimpleQueue()
        #: Weights that wait for the engine to be drained, and what came after them.
        self._deferred_work: deque[WeightUpdate | SamplingRequest] = deque()
        self._is_paused = False
        # A daemon, so that a stuck step cannot keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="vllm-engine", daemon=True)

    def start(self) -> None:
        """Begin to build the engine."""
        self._thread.start()

    def add_requests(self, requests: Sequence[SamplingRequest]) -> None:
        """Take up these requests before the next step."""
        self._commands.put(lambda engine: self._add_or_defer(engine, requests))

    def abort_sequences(self, number: int, indices: Sequence[int]) -> None:
        """Give up these draws of a request; nothing is heard of them."""
        names = [vllm_engine.make_vllm_request_id(number, index) for index in indices]
        self._commands.put(lambda engine: self._abort_sequences(engine, number, names))

    def load_weights(self, tensors: Mapping[str, torch.Tensor] | None, version: int) -> None:
        """Put a full set of parameters into the model before the next step, as `version`.

        None are there already, filled into its storage. An engine that drains does so when what was
        added before is finished.
        """
        weights = WeightUpdate(tensors, version)
        self._commands.put(lambda engine: self._load_or_defer(engine, weights))

    def request_partials(self, call: int, numbers: Collection[int]) -> None:
        """Say before the next step what there is of these requests, under the number `call`."""
        self._run_and_reply(
            call, lambda engine: vllm_engine.list_partial_sequences(engine, numbers)
        )

    def request_storage(self, call: int) -> None:
        """Say under the number `call` where the parameters lie; see `WeightLoader.get_storage`."""
        self._run_and_reply(call, lambda engine: self._weight_loader.get_storage())

    def use_model_dir(self, version: int) -> None:
        """Call the weights the engine was built with `version`."""
        self._commands.put(lambda engine: self._set_version(engine, version))

    def sleep(self, call: int) -> None:
        """Free the memory of keys and values until the next step; say so under that number."""
        self._run_and_reply(call, lambda engine: self._kv_memory.sleep())

    def pause(self, call: int) -> None:
        """Begin no other step, and say so under the number `call`; all else is done as ever."""

        def command(engine: VllmEngine) -> None:
            self._is_paused = True

        self._run_and_reply(call, command)

    def resume(self) -> None:
        """Step again."""

        def command(engine: VllmEngine) -> None:
            self._is_paused = False

        self._commands.put(command)

    def _run_and_reply(self, call: int, question: Callable[[VllmEngine], Any]) -> None:
        """Answer before the next step, under the number `call`."""
        self._commands.put(
            lambda engine: self._notify_listener(self._listener.on_reply, call, question(engine))
        )

    def stop(self) -> None:
        """End before the next step, whatever runs."""
        self._commands.put(None)

    def _run(self) -> None:
        try:
            with vllm_engine.claim_process_engine():
                facts = vllm_engine.read_model_info(self._spec.model_path)
                self._stop_conditions = StopConditions(self._spec.model_path, self._spec.config)
                engine = vllm_engine.build_vllm_engine(self._spec)
                self._kv_memory = KvCacheMemory(engine)
                self._weight_loader = vllm_engine.make_weight_loader(
                    engine, self._spec, facts.parameters
                )
                try:
                    self._notify_listener(self._listener.on_started, facts)
                    with vllm_engine.translate_lost_rank_errors(engine):
                        self._run_loop(engine)
                finally:
                    # If it failed, too: else vLLM does it once the engine is garbage, and ends the
                    # process groups of the next one.
                    vllm_engine.shut_down_engine(engine)
        finally:
            self._notify_listener(self._listener.on_exit, sys.exception())

    def _notify_listener(self, method: Callable[..., None], *args: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(method, *args)

    def _run_loop(self, engine: VllmEngine) -> None:
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
        """All commands that came since; at least one if the engine has nothing to do."""
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

    def _load_or_defer(self, engine: VllmEngine, weights: WeightUpdate) -> None:
        if self._spec.should_drain and (self._deferred_work or engine.has_unfinished_requests()):
            self._deferred_work.append(weights)
        else:
            self._load_weights(engine, weights)

    def _run_deferred(self, engine: VllmEngine) -> None:
        """If the engine is drained, load what it was drained for, and go on with what waits."""
        if not self._deferred_work or engine.has_unfinished_requests():
            return
        while self._deferred_work:
            match self._deferred_work[0]:
                case WeightUpdate() as weights if not engine.has_unfinished_requests():
                    self._load_weights(engine, weights)
                case SamplingRequest() as request:
                    self._add_request(engine, request)
                case _:
                    return
            self._deferred_work.popleft()

    def _add_request(self, engine: VllmEngine, request: SamplingRequest) -> None:
        reason = vllm_engine.add_request(engine, request, self._stop_conditions)
        if reason is not None:
            self._notify_listener(self._listener.on_rejected, request.request_id, reason)

    def _abort_sequences(self, engine: VllmEngine, number: int, names: Sequence[str]) -> None:
        engine.abort_request(list(names))
        self._deferred_work = deque(
            held
            for held in self._deferred_work
            if isinstance(held, WeightUpdate) or held.request_id != number
        )
        self._run_deferred(engine)

    def _load_weights(self, engine: VllmEngine, weights: WeightUpdate) -> None:
        loaded = vllm_engine.load_weights(
            engine,
            self._weight_loader,
            weights.tensors,
            weights.version,
            keeps_kv=self._spec.should_keep_kv,
        )
        self._notify_listener(self._listener.on_loaded, weights.version, loaded)

    def _set_version(self, engine: VllmEngine, version: int) -> None:
        vllm_engine.set_weight_version(engine, version)
        self._notify_listener(self._listener.on_loaded, version, WeightLoadStats(0.0, 0, 0))

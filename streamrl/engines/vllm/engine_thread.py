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
    Engine,
    EngineSpec,
    ModelFacts,
    Sampled,
    SampleRequest,
)
from streamrl.engines.vllm.kv_cache import KvMemory
from streamrl.engines.vllm.stop_conditions import StopRules
from streamrl.weights import Loaded

Command = Callable[[Engine], None]


@dataclass(frozen=True)
class NewWeights:
    """A full set of parameters and the version it is; None where they are in place already."""

    tensors: Mapping[str, torch.Tensor] | None
    version: int


class EngineListener(Protocol):
    """Who hears from the thread; every method is called on the event loop."""

    def on_started(self, facts: ModelFacts) -> None:
        """The engine is up, with a model such as this."""

    def on_sampled(self, batch: Sequence[Sampled]) -> None:
        """Rollouts that one step finished."""

    def on_refused(self, number: int, reason: str) -> None:
        """A request vLLM would not take; nothing of it runs."""

    def on_loaded(self, version: int, loaded: Loaded) -> None:
        """From the next token on, tokens are sampled by this version."""

    def on_answered(self, call: int, answer: Any) -> None:
        """What was asked for under this number, between two steps."""

    def on_ended(self, error: BaseException | None) -> None:
        """The thread is over: it was stopped, or this error killed it."""


class EngineThread:
    """Builds an engine, steps it while it has work, and shuts it down; see the module."""

    def __init__(self, spec: EngineSpec, listener: EngineListener) -> None:
        self._spec = spec
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        #: Weights that wait for the engine to be drained, and what came after them.
        self._held: deque[NewWeights | SampleRequest] = deque()
        self._stands_still = False
        # A daemon, so that a stuck step cannot keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="vllm-engine", daemon=True)

    def start(self) -> None:
        """Begin to build the engine."""
        self._thread.start()

    def sample(self, requests: Sequence[SampleRequest]) -> None:
        """Take up these requests before the next step."""
        self._commands.put(lambda engine: self._add_or_hold(engine, requests))

    def abort(self, number: int, indices: Sequence[int]) -> None:
        """Give up these draws of a request; nothing is heard of them."""
        names = [vllm_engine.request_name(number, index) for index in indices]
        self._commands.put(lambda engine: self._abort(engine, number, names))

    def load(self, tensors: Mapping[str, torch.Tensor] | None, version: int) -> None:
        """Put a full set of parameters into the model before the next step, as `version`.

        None are there already, filled into its storage. An engine that drains does so when what was
        added before is finished.
        """
        weights = NewWeights(tensors, version)
        self._commands.put(lambda engine: self._load_or_hold(engine, weights))

    def ask_begun(self, call: int, numbers: Collection[int]) -> None:
        """Say before the next step what there is of these requests, under the number `call`."""
        self._ask(call, lambda engine: vllm_engine.begun(engine, numbers))

    def ask_storage(self, call: int) -> None:
        """Say under the number `call` where the parameters lie; see `ServedWeights.storage`."""
        self._ask(call, lambda engine: self._weights.storage())

    def use_model_dir(self, version: int) -> None:
        """Call the weights the engine was built with `version`."""
        self._commands.put(lambda engine: self._label(engine, version))

    def release_kv(self, call: int) -> None:
        """Free the memory of keys and values until the next step; say so under that number."""
        self._ask(call, lambda engine: self._kv.release())

    def stand_still(self, call: int) -> None:
        """Begin no other step, and say so under the number `call`; all else is done as ever."""

        def command(engine: Engine) -> None:
            self._stands_still = True

        self._ask(call, command)

    def move_on(self) -> None:
        """Step again."""

        def command(engine: Engine) -> None:
            self._stands_still = False

        self._commands.put(command)

    def _ask(self, call: int, question: Callable[[Engine], Any]) -> None:
        """Answer before the next step, under the number `call`."""
        self._commands.put(
            lambda engine: self._post(self._listener.on_answered, call, question(engine))
        )

    def stop(self) -> None:
        """End before the next step, whatever runs."""
        self._commands.put(None)

    def _run(self) -> None:
        try:
            with vllm_engine.only_engine_of_the_process():
                facts = vllm_engine.read_model_facts(self._spec.model_path)
                self._stops = StopRules(self._spec.model_path, self._spec.config)
                engine = vllm_engine.build_engine(self._spec)
                self._kv = KvMemory(engine)
                self._weights = vllm_engine.served_weights(engine, self._spec, facts.parameters)
                try:
                    self._post(self._listener.on_started, facts)
                    with vllm_engine.naming_lost_ranks(engine):
                        self._serve(engine)
                finally:
                    # If it failed, too: else vLLM does it once the engine is garbage, and ends the
                    # process groups of the next one.
                    vllm_engine.shut_down(engine)
        finally:
            self._post(self._listener.on_ended, sys.exception())

    def _post(self, method: Callable[..., None], *args: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(method, *args)

    def _serve(self, engine: Engine) -> None:
        while True:
            for command in self._take(wait=not self._may_step(engine)):
                if command is None:
                    return
                command(engine)
            if self._may_step(engine):
                self._kv.restore()
                batch = vllm_engine.step(engine)
                if batch:
                    self._post(self._listener.on_sampled, batch)
                self._release(engine)

    def _may_step(self, engine: Engine) -> bool:
        return not self._stands_still and engine.has_unfinished_requests()

    def _take(self, *, wait: bool) -> list[Command | None]:
        """All commands that came since; at least one if the engine has nothing to do."""
        commands = [self._commands.get()] if wait else []
        try:
            while True:
                commands.append(self._commands.get_nowait())
        except queue.Empty:
            return commands

    def _add_or_hold(self, engine: Engine, requests: Sequence[SampleRequest]) -> None:
        for request in requests:
            if self._held:
                self._held.append(request)
            else:
                self._add(engine, request)

    def _load_or_hold(self, engine: Engine, weights: NewWeights) -> None:
        if self._spec.drains and (self._held or engine.has_unfinished_requests()):
            self._held.append(weights)
        else:
            self._load(engine, weights)

    def _release(self, engine: Engine) -> None:
        """If the engine is drained, load what it was drained for, and go on with what waits."""
        if not self._held or engine.has_unfinished_requests():
            return
        while self._held:
            match self._held[0]:
                case NewWeights() as weights if not engine.has_unfinished_requests():
                    self._load(engine, weights)
                case SampleRequest() as request:
                    self._add(engine, request)
                case _:
                    return
            self._held.popleft()

    def _add(self, engine: Engine, request: SampleRequest) -> None:
        reason = vllm_engine.add_request(engine, request, self._stops)
        if reason is not None:
            self._post(self._listener.on_refused, request.number, reason)

    def _abort(self, engine: Engine, number: int, names: Sequence[str]) -> None:
        engine.abort_request(list(names))
        self._held = deque(
            held for held in self._held if isinstance(held, NewWeights) or held.number != number
        )
        self._release(engine)

    def _load(self, engine: Engine, weights: NewWeights) -> None:
        loaded = vllm_engine.load_weights(
            engine,
            self._weights,
            weights.tensors,
            weights.version,
            keeps_kv=self._spec.keeps_kv,
        )
        self._post(self._listener.on_loaded, weights.version, loaded)

    def _label(self, engine: Engine, version: int) -> None:
        vllm_engine.label_weights(engine, version)
        self._post(self._listener.on_loaded, version, Loaded(0.0, 0, 0))

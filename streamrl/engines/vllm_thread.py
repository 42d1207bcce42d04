"""The thread that owns a vLLM engine: nobody else touches it, and all is done between two steps.

What the thread has to say it says to an `EngineListener` on the event loop, a batch per step. An
exception ends the thread, is reported as the reason and printed by threading's hook: an engine that
failed once is not trusted again.
"""

import asyncio
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from streamrl.engines.generator_config import GeneratorConfig, engine_arguments
from streamrl.messages import FinishReason, Rollout
from streamrl.weights import ParameterSet

#: vLLM's LLMEngine. vLLM is imported by the thread that starts one.
Engine = Any
Command = Callable[[Engine], None]

_PROCESS = threading.Lock()


@dataclass(frozen=True)
class EngineSpec:
    """What it takes to build an engine; `max_length` is in tokens, prompt and completion."""

    model_path: str
    config: GeneratorConfig
    seed: int
    max_length: int


@dataclass(frozen=True)
class Checkpoint:
    """What the model directory says: the parameters, by their names in transformers, and tokens."""

    parameters: ParameterSet
    vocab_size: int


@dataclass(frozen=True)
class SampleRequest:
    """A prompt to complete once per seed, under a number that the answers carry."""

    number: int
    prompt_ids: list[int]
    seeds: tuple[int, ...]
    temperature: float
    max_new_tokens: int


@dataclass(frozen=True)
class Sampled:
    """The rollout of one seed (by its index) of a request."""

    number: int
    index: int
    rollout: Rollout


class EngineListener(Protocol):
    """Who hears from the thread; every method is called on the event loop."""

    def on_started(self, checkpoint: Checkpoint) -> None:
        """The engine is up, with a model such as this."""

    def on_sampled(self, batch: Sequence[Sampled]) -> None:
        """Rollouts that one step finished."""

    def on_refused(self, number: int, reason: str) -> None:
        """A request vLLM would not take; nothing of it runs."""

    def on_loaded(self, version: int) -> None:
        """From the next token on, tokens are sampled by this version."""

    def on_ended(self, error: BaseException | None) -> None:
        """The thread is over: it was stopped, or this error killed it."""


class EngineThread:
    """Builds an engine, steps it while it has work, and shuts it down; see the module."""

    def __init__(self, spec: EngineSpec, listener: EngineListener) -> None:
        self._spec = spec
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        # A daemon, so that a stuck step cannot keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="vllm-engine", daemon=True)

    def start(self) -> None:
        """Begin to build the engine."""
        self._thread.start()

    def sample(self, requests: Sequence[SampleRequest]) -> None:
        """Take up these requests before the next step."""
        self._commands.put(lambda engine: self._add(engine, requests))

    def abort(self, number: int, indices: Sequence[int]) -> None:
        """Give up these rollouts of a request; nothing is heard of them."""
        names = [f"{number}:{index}" for index in indices]
        self._commands.put(lambda engine: engine.abort_request(names))

    def load(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        """Put a full set of parameters into the model before the next step, as `version`."""
        self._commands.put(lambda engine: self._load(engine, tensors, version))

    def stop(self) -> None:
        """End before the next step, whatever runs."""
        self._commands.put(None)

    def _run(self) -> None:
        try:
            with _only_engine_of_the_process():
                engine = build_engine(self._spec)
                self._post(self._listener.on_started, read_checkpoint(self._spec.model_path))
                self._serve(engine)
                _shut_down(engine)
        finally:
            self._post(self._listener.on_ended, sys.exception())

    def _post(self, method: Callable[..., None], *args: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(method, *args)

    def _serve(self, engine: Engine) -> None:
        while True:
            for command in self._take(wait=not engine.has_unfinished_requests()):
                if command is None:
                    return
                command(engine)
            if engine.has_unfinished_requests():
                batch = [_sampled(output) for output in engine.step() if output.finished]
                if batch:
                    self._post(self._listener.on_sampled, batch)

    def _take(self, *, wait: bool) -> list[Command | None]:
        """All commands that came since; at least one if the engine has nothing to do."""
        commands = [self._commands.get()] if wait else []
        try:
            while True:
                commands.append(self._commands.get_nowait())
        except queue.Empty:
            return commands

    def _add(self, engine: Engine, requests: Sequence[SampleRequest]) -> None:
        from vllm.exceptions import VLLMClientError

        for request in requests:
            try:
                for index, params in enumerate(_sampling_params(request)):
                    prompt = {"type": "token", "prompt_token_ids": list(request.prompt_ids)}
                    engine.add_request(f"{request.number}:{index}", prompt, params)
            except (VLLMClientError, ValueError) as error:
                names = [f"{request.number}:{index}" for index in range(len(request.seeds))]
                engine.abort_request(names)
                self._post(self._listener.on_refused, request.number, str(error))

    def _load(self, engine: Engine, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        engine.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(tensors.items())})
        # Running rollouts go back to the queue and are prefilled anew: no key or value of the old
        # weights is left, neither theirs nor a cached prefix.
        engine.reset_prefix_cache(reset_running_requests=True)
        engine.engine_core.set_weight_version(str(version))
        self._post(self._listener.on_loaded, version)


@contextmanager
def _only_engine_of_the_process() -> Iterator[None]:
    """Two engines stepped by two threads corrupt each other: vLLM's forward context is global."""
    if not _PROCESS.acquire(blocking=False):
        raise RuntimeError("this process has a generation engine already; vLLM allows one")
    set_num_threads = torch.set_num_threads
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads  # vLLM makes it do nothing
        _PROCESS.release()


def build_engine(spec: EngineSpec) -> Engine:
    """A vLLM engine in this process; its environment must be that of `generation_env`."""
    if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") != "0":
        raise RuntimeError("generation_env() must be in the environment before vLLM is imported")
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.llm_engine import LLMEngine

    arguments = engine_arguments(
        spec.model_path,
        spec.config,
        seed=spec.seed,
        max_length=spec.max_length,
        on_cpu=current_platform.is_cpu(),
    )
    return LLMEngine.from_engine_args(EngineArgs(**arguments), enable_multiprocessing=False)


def read_checkpoint(model_path: str) -> Checkpoint:
    """What a model directory holds, without reading its weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return Checkpoint(ParameterSet.of(model), config.get_text_config().vocab_size)


def _sampling_params(request: SampleRequest) -> list[Any]:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return [
        SamplingParams(
            seed=seed,
            temperature=request.temperature,
            max_tokens=request.max_new_tokens,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            # Nobody else has these parameters; a deep copy costs as much as the rest of an add.
            skip_clone=True,
        )
        for seed in request.seeds
    ]


def _sampled(output: Any) -> Sampled:
    """One finished RequestOutput as what it is to us."""
    completion = output.outputs[0]
    number, index = output.request_id.split(":")
    versions: list[int] = []
    for span in completion.weight_versions:
        versions += [int(span.version)] * (span.end - span.start)
    rollout = Rollout.single_turn(
        np.asarray(output.prompt_token_ids, np.int32),
        completion.token_ids,
        logprobs=completion.logprobs.logprobs,
        versions=versions,
        finish_reason=FinishReason[completion.finish_reason.upper()],
    )
    return Sampled(int(number), int(index), rollout)


def _shut_down(engine: Engine) -> None:
    from vllm.distributed import cleanup_dist_env_and_memory

    engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()

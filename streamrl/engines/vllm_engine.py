"""Everything streamrl says to vLLM: an engine built, asked, given weights and shut down.

vLLM is imported by whoever calls these functions, not with this module; all calls for one engine
must come from one thread.
"""

import os
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from streamrl.engines.forward import load_skeleton
from streamrl.engines.generator_config import GeneratorConfig, engine_arguments
from streamrl.messages import FinishReason, Rollout
from streamrl.weights import ParameterSet

#: vLLM's LLMEngine.
Engine = Any

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
    """What a model directory says: parameters, by their names in transformers, and tokens."""

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

    @property
    def names(self) -> list[str]:
        """What vLLM calls the rollouts of this request."""
        return [request_name(self.number, index) for index in range(len(self.seeds))]


@dataclass(frozen=True)
class Sampled:
    """The rollout of one seed (by its index) of a request."""

    number: int
    index: int
    rollout: Rollout


def request_name(number: int, index: int) -> str:
    """What vLLM calls one rollout of a request."""
    return f"{number}:{index}"


@contextmanager
def only_engine_of_the_process() -> Iterator[None]:
    """Two engines stepped by two threads corrupt each other: vLLM's forward context is global."""
    if not _PROCESS.acquire(blocking=False):
        raise RuntimeError("this process has a generation engine already; vLLM allows one")
    set_num_threads = torch.set_num_threads
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads  # vLLM makes it do nothing
        _PROCESS.release()


def read_checkpoint(model_path: str) -> Checkpoint:
    """What a model directory holds, without reading its weights."""
    model = load_skeleton(model_path)
    return Checkpoint(ParameterSet.of(model), model.config.get_text_config().vocab_size)


def build_engine(spec: EngineSpec) -> Engine:
    """A vLLM engine in this process, whose environment must be that of `generation_env`."""
    if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") != "0":
        raise RuntimeError("generation_env() must be in the environment before vLLM is imported")
    with warnings.catch_warnings():
        # Of its own imports; nothing a user could act on.
        warnings.simplefilter("ignore", FutureWarning)
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


def add_request(engine: Engine, request: SampleRequest) -> str | None:
    """Queue the rollouts of a request; if vLLM refuses one, queue none and return the reason."""
    from vllm.exceptions import VLLMClientError

    try:
        for name, seed in zip(request.names, request.seeds, strict=True):
            prompt = {"type": "token", "prompt_token_ids": list(request.prompt_ids)}
            engine.add_request(name, prompt, _sampling_params(request, seed))
    except (VLLMClientError, ValueError) as error:
        engine.abort_request(request.names)
        return str(error)
    return None


def step(engine: Engine) -> list[Sampled]:
    """One more token of each rollout that runs; the rollouts this finished."""
    return [_sampled(output) for output in engine.step() if output.finished]


def load_weights(engine: Engine, tensors: Mapping[str, torch.Tensor], version: int) -> None:
    """Put a full set of parameters into the model, going through it once, between two steps.

    If this raises, the model is half old and half new.
    """
    engine.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(tensors.items())})
    # Running rollouts go back to the queue and are prefilled anew: no key or value of the old
    # weights is left, neither theirs nor a cached prefix.
    engine.reset_prefix_cache(reset_running_requests=True)
    label_weights(engine, version)


def label_weights(engine: Engine, version: int) -> None:
    """From the next token on, tokens are sampled by `version`."""
    engine.engine_core.set_weight_version(str(version))


def shut_down(engine: Engine) -> None:
    """Free what the engine holds, torch.distributed's default group included."""
    from vllm.distributed import cleanup_dist_env_and_memory

    engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()


def _sampling_params(request: SampleRequest, seed: int) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
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

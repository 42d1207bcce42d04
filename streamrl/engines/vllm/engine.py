"""Everything streamrl says to vLLM: an engine built, asked, given weights and shut down.

vLLM is imported by whoever calls these functions, not with this module; all calls for one engine
must come from one thread.
"""

import logging
import os
import threading
import time
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from streamrl.engines.generator_config import GeneratorConfig, SamplingSettings, make_engine_args
from streamrl.engines.models.forward import load_skeleton
from streamrl.engines.vllm.load_check import LoadWarningHandler
from streamrl.engines.vllm.partial_weights import PartialWeightLoader
from streamrl.engines.vllm.rank_groups import RankGroup
from streamrl.engines.vllm.stop_conditions import StopConditions
from streamrl.engines.vllm.weight_loader import WeightLoader, keep_plain_linears
from streamrl.engines.vllm.worker_weights import (
    WorkerWeightLoader,
    has_lost_rank,
    unlink_shared_memory,
)
from streamrl.errors import GenerationError
from streamrl.messages import FinishReason
from streamrl.resharding.storage import ShardStorage
from streamrl.weights import LoadVerification, WeightLoadStats
from streamrl.weights.parameters import ParameterSet

if TYPE_CHECKING:
    from streamrl.engines.vllm.executor import FollowerWorker

#: vLLM's LLMEngine.
VllmEngine = Any

_ENGINE_LOCK = threading.Lock()
#: Of the process's only engine.
LOAD_WARNINGS = LoadWarningHandler()


@dataclass(frozen=True)
class EngineSpec:
    """What it takes to build an engine; `max_length` is in tokens, prompt and completion.

    When new weights come, what runs is interrupted: its keys and values are computed anew by them,
    unless it `keeps_kv`. An engine that `should_drain` lets it run to its end under the old ones
    first. Where ranks that are there share it, `rank_group` says which; else a split engine starts
    its own.
    """

    model_path: str
    config: GeneratorConfig
    seed: int
    max_length: int
    should_drain: bool = False
    should_keep_kv: bool = False
    rank_group: RankGroup | None = None


@dataclass(frozen=True)
class ModelInfo:
    """What a model directory says: parameters, by their names in transformers, and tokens."""

    parameters: ParameterSet
    vocab_size: int


@dataclass(frozen=True)
class SequenceRequest:
    """One rollout to sample: what comes before it, and how many tokens at most.

    `index` is its place in its request; the last `num_sampled` tokens were sampled before.
    """

    index: int
    token_ids: list[int]
    seed: int
    max_new_tokens: int
    num_sampled: int = 0


@dataclass(frozen=True)
class SamplingRequest:
    """What is sampled together, under a number that the answers carry.

    With `should_score_prompt` the answers bring the logprobs of what comes before, too.
    """

    request_id: int
    sequences: tuple[SequenceRequest, ...]
    sampling: SamplingSettings
    should_score_prompt: bool = False


@dataclass(frozen=True)
class SampledSequence:
    """What was sampled of one draw of a request: token ids, with logprob and version each.

    `prompt_logprobs` has one entry for each token before, except the first, if it was asked for.
    """

    request_id: int
    index: int
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    versions: Sequence[int]
    finish_reason: FinishReason
    prompt_logprobs: Sequence[float] = ()


class WeightLoaderProtocol(Protocol):
    """The parameters of an engine, see `WeightLoader`."""

    def load_weights(self, tensors: Mapping[str, torch.Tensor]) -> tuple[int, LoadVerification]: ...

    def get_storage(self) -> ShardStorage | None: ...


def make_vllm_request_id(number: int, index: int) -> str:
    """What vLLM calls one draw of a request."""
    return f"{number}:{index}"


@contextmanager
def claim_process_engine() -> Iterator[None]:
    """Two engines stepped by two threads corrupt each other: vLLM's forward context is global."""
    if not _ENGINE_LOCK.acquire(blocking=False):
        raise RuntimeError("this process has a generation engine already; vLLM allows one")
    set_num_threads = torch.set_num_threads
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads  # vLLM makes it do nothing
        _ENGINE_LOCK.release()


def read_model_info(model_path: str) -> ModelInfo:
    """What a model directory holds, without reading its weights."""
    model = load_skeleton(model_path)
    return ModelInfo(ParameterSet.from_module(model), model.config.get_text_config().vocab_size)


def build_vllm_engine(spec: EngineSpec) -> VllmEngine:
    """A vLLM engine in this process, whose environment must be that of `make_vllm_env`.

    One that is split computes in processes of its own, which end with this one, or in those of its
    team, of which this one leads.
    """
    arguments = _make_engine_args(spec)
    from vllm.v1.engine.llm_engine import LLMEngine

    with _keep_plain_on_cpu():
        engine = LLMEngine.from_engine_args(arguments, enable_multiprocessing=False)
    if spec.config.tensor_parallel > 1 and spec.rank_group is None and _is_on_cpu():
        unlink_shared_memory(engine)
    return engine


def build_follower_worker(spec: EngineSpec) -> "FollowerWorker":
    """The worker of a rank that shares the engine of another, which is built meanwhile."""
    assert spec.rank_group is not None
    arguments = _make_engine_args(spec)
    from streamrl.engines.vllm.executor import FollowerWorker

    with _keep_plain_on_cpu():
        return FollowerWorker(arguments.create_engine_config(), spec.rank_group)


def _make_engine_args(spec: EngineSpec) -> Any:
    """vLLM's EngineArgs."""
    if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") != "0":
        raise RuntimeError("make_vllm_env() must be in the environment before vLLM is imported")
    # What vLLM would do itself, if all loggers of the process were its own to configure.
    logger = logging.getLogger("vllm")
    logger.setLevel(logging.WARNING)
    logger.handlers, logger.propagate = [LOAD_WARNINGS], False
    with warnings.catch_warnings():
        # Of its own imports; nothing a user could act on.
        warnings.simplefilter("ignore", FutureWarning)
        from vllm.engine.arg_utils import EngineArgs
    arguments = make_engine_args(
        spec.model_path,
        spec.config,
        seed=spec.seed,
        max_length=spec.max_length,
        on_cpu=_is_on_cpu(),
    )
    if spec.rank_group is not None:
        from streamrl.engines.vllm.executor import make_rank_group_args

        arguments |= make_rank_group_args(spec.rank_group, spec.config.request_timeout_s)
    return EngineArgs(**arguments)


def _is_on_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def _keep_plain_on_cpu() -> AbstractContextManager[None]:
    return keep_plain_linears() if _is_on_cpu() else nullcontext()


def make_weight_loader(
    engine: VllmEngine, spec: EngineSpec, parameters: ParameterSet
) -> WeightLoaderProtocol:
    """What puts new weights into an engine that was just built."""
    if spec.rank_group is not None:
        worker = engine.model_executor.driver_worker.worker
        return PartialWeightLoader(worker, parameters, spec.model_path, spec.rank_group)
    if spec.config.tensor_parallel > 1:
        return WorkerWeightLoader(engine, parameters, spec.model_path)
    return WeightLoader(engine, parameters, spec.model_path)


def add_request(engine: VllmEngine, request: SamplingRequest, stops: StopConditions) -> str | None:
    """Queue the draws of a request; if vLLM refuses one, queue none and return the reason."""
    from vllm.exceptions import VLLMClientError

    salt = _make_cache_salt(engine)
    try:
        for draw in request.sequences:
            prompt = {
                "type": "token",
                "prompt_token_ids": list(draw.token_ids),
                "cache_salt": salt,
            }
            name = make_vllm_request_id(request.request_id, draw.index)
            params = _make_sampling_params(request, draw, stops.token_ids)
            internal_name = engine.add_request(name, prompt, params)
            sampled = draw.token_ids[len(draw.token_ids) - draw.num_sampled :]
            if detokenizer := stops.make_detokenizer(sampled):
                engine.output_processor.request_states[internal_name].detokenizer = detokenizer
    except (VLLMClientError, ValueError) as error:
        engine.abort_request(
            [make_vllm_request_id(request.request_id, draw.index) for draw in request.sequences]
        )
        return str(error)
    return None


def step_engine(engine: VllmEngine) -> list[SampledSequence]:
    """One more token of each rollout that runs; the rollouts this finished."""
    return [_to_sampled_sequence(output) for output in engine.step() if output.finished]


@contextmanager
def translate_lost_rank_errors(engine: VllmEngine) -> Iterator[None]:
    """What fails in here since a process of a split engine has died says so."""
    try:
        yield
    except RuntimeError as error:
        if has_lost_rank(engine):
            raise GenerationError("a process of the split engine has died") from error
        raise


def list_partial_sequences(engine: VllmEngine, numbers: Collection[int]) -> list[SampledSequence]:
    """What is sampled so far of the unfinished draws of some requests, if anything is."""
    from vllm.v1.engine import FinishReason as VllmFinishReason

    # Read where vLLM keeps them: to have every step tell would cost at every step.
    outputs = [
        state.make_request_output([], None, VllmFinishReason.ABORT, None)
        for state in _list_running_states(engine)
        if int(state.external_req_id.split(":")[0]) in numbers
    ]
    return [_to_sampled_sequence(output) for output in outputs]


def load_weights(
    engine: VllmEngine,
    weights: WeightLoaderProtocol,
    tensors: Mapping[str, torch.Tensor] | None,
    version: int,
    *,
    keeps_kv: bool,
) -> WeightLoadStats:
    """Put a full set of parameters into the model, going through it once, between two steps.

    Without `tensors` they have been changed where they lie. If this raises, the model is half old
    and half new.
    """
    began = time.monotonic()
    interrupted = len(_list_running_states(engine))
    copied_bytes, arrival = (
        (0, LoadVerification()) if tensors is None else weights.load_weights(tensors)
    )
    set_weight_version(engine, version)
    if keeps_kv:
        # The cache cannot be emptied while rollouts run; who starts now must not find it.
        _update_waiting_salts(engine)
    else:
        # Running rollouts go back to the queue and are prefilled anew: no key or value of the old
        # weights is left, neither theirs nor a cached prefix.
        engine.reset_prefix_cache(reset_running_requests=True)
    arrival = replace(arrival, warnings=LOAD_WARNINGS.drain_warnings())
    return WeightLoadStats(time.monotonic() - began, interrupted, copied_bytes, arrival)


def set_weight_version(engine: VllmEngine, version: int) -> None:
    """From the next token on, tokens are sampled by `version`."""
    engine.engine_core.set_weight_version(str(version))


def shut_down_engine(engine: VllmEngine) -> None:
    """Free what the engine holds, torch.distributed's default group included."""
    from vllm.distributed import cleanup_dist_env_and_memory

    engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()


def _make_cache_salt(engine: VllmEngine) -> str:
    """Prefixes are shared only among those who have the same: one for each version."""
    return f"version {engine.engine_core.get_weight_version()}"


def _update_waiting_salts(engine: VllmEngine) -> None:
    """Those who wait and have no token yet look for prefixes of the version served now.

    They were added under an older one, whose prefixes may still be in the cache.
    """
    salt = _make_cache_salt(engine)
    for request in engine.engine_core.engine_core.scheduler.waiting:
        if request.num_output_tokens == 0:
            request.cache_salt = salt
            request.block_hashes.clear()
            request.update_block_hashes()


def _list_running_states(engine: VllmEngine) -> list[Any]:
    """What vLLM keeps of each request that has a token and is not finished."""
    states = engine.output_processor.request_states.values()
    return [state for state in states if state.detokenizer.num_output_tokens()]


def _make_sampling_params(
    request: SamplingRequest, draw: SequenceRequest, stop_token_ids: Sequence[int]
) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        seed=draw.seed,
        temperature=request.sampling.temperature,
        top_p=request.sampling.top_p,
        top_k=request.sampling.top_k,
        stop_token_ids=list(stop_token_ids),
        max_tokens=draw.max_new_tokens,
        logprobs=0,
        # With it, vLLM reads no cached prefix: there would be no logprobs of it.
        prompt_logprobs=0 if request.should_score_prompt else None,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        # Nobody else has these parameters; a deep copy costs as much as the rest of an add.
        skip_clone=True,
    )


def _to_sampled_sequence(output: Any) -> SampledSequence:
    """One RequestOutput, which may be unfinished, as what it is to us."""
    completion = output.outputs[0]
    number, index = output.request_id.split(":")
    versions: list[int] = []
    for span in completion.weight_versions:
        versions += [int(span.version)] * (span.end - span.start)
    return SampledSequence(
        request_id=int(number),
        index=int(index),
        # Lists that vLLM goes on to fill.
        token_ids=tuple(completion.token_ids),
        logprobs=tuple(completion.logprobs.logprobs),
        versions=versions,
        finish_reason=FinishReason[completion.finish_reason.upper()],
        prompt_logprobs=output.prompt_logprobs.logprobs if output.prompt_logprobs else (),
    )

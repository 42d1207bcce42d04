"""Build, step, update and shut down a vLLM engine: streamrl's calls into vLLM's LLMEngine.

The functions import vLLM, the module does not. All calls for an engine must come from its thread
(`EngineThread`).
"""

import logging
import os
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from streamrl.distributed.devices import has_local_gpu, synchronize_stream
from streamrl.engines.generator_config import GeneratorConfig, SamplingSettings, make_engine_args
from streamrl.engines.memory.peak_memory import release_freed_memory
from streamrl.engines.models.forward import load_skeleton
from streamrl.engines.vllm.load_check import LoadWarningHandler
from streamrl.engines.vllm.rank_groups import RankGroup
from streamrl.engines.vllm.stop_conditions import StopConditions
from streamrl.engines.vllm.weight_loader import (
    PartialWeightLoader,
    WeightLoader,
    keep_plain_linears,
)
from streamrl.engines.vllm.worker_weights import (
    WorkerWeightLoader,
    end_workers_with_engine,
    has_lost_rank,
    unlink_shared_memory,
)
from streamrl.errors import ConfigError, GenerationError
from streamrl.messages import FinishReason
from streamrl.weights import LoadVerification, WeightLoadStats
from streamrl.weights.parameters import ParameterSet

if TYPE_CHECKING:
    from streamrl.engines.vllm.executor import FollowerWorker


#: vLLM's LLMEngine.
VllmEngine = Any
#: vLLM's worker, in the process of a rank.
VllmWorker = Any

_ENGINE_LOCK = threading.Lock()
#: Shared, since a process has at most one engine.
LOAD_WARNINGS = LoadWarningHandler()


@dataclass(frozen=True)
class EngineSpec:
    """Arguments for building a vLLM engine of a model directory.

    `max_length` bounds prompt plus completion, in tokens. A weight load recomputes the KV cache of
    running rollouts, unless `should_keep_kv`. With `should_drain`, running rollouts finish with the
    old weights first. `rank_group` places a tensor-parallel engine on existing trainer ranks;
    without it, vLLM starts its own processes. `seed` seeds vLLM itself; the seeds of a group's
    `group_size` rollouts derive from `run_seed`.
    """

    model_path: str
    config: GeneratorConfig
    max_length: int
    seed: int = 0
    should_drain: bool = False
    should_keep_kv: bool = False
    rank_group: RankGroup | None = None
    group_size: int = 1
    run_seed: int = 0


@dataclass(frozen=True)
class ModelInfo:
    """Parameters of a model directory, by their transformers names, and its vocabulary size."""

    parameters: ParameterSet
    vocab_size: int


@dataclass(frozen=True)
class SequenceRequest:
    """A rollout to sample, as sent to the engine: prefix, seed and number of new tokens.

    `index` is the position of the rollout in its request. `token_ids` is the prefix: the prompt and
    `num_sampled` tokens of a partial rollout.
    """

    index: int
    token_ids: list[int]
    seed: int
    max_new_tokens: int
    num_sampled: int = 0


@dataclass(frozen=True)
class SamplingRequest:
    """Rollouts of a prompt to sample with the same settings; results carry `request_id`.

    With `should_score_prompt`, results also contain the logprobs of the prefix. `stop_token_ids`
    end a rollout besides those of the engine.
    """

    request_id: int
    sequences: tuple[SequenceRequest, ...]
    sampling: SamplingSettings
    should_score_prompt: bool = False
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class SampledSequence:
    """Tokens that the engine has newly sampled for a rollout, with their logprobs and versions.

    `prompt_logprobs` has an entry for each token of the prefix except the first, if requested.
    """

    request_id: int
    index: int
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    versions: Sequence[int]
    finish_reason: FinishReason
    prompt_logprobs: Sequence[float] = ()


class TokenCount(NamedTuple):
    """Number of tokens that the engine has sampled for a sequence; whether it decodes it now.

    Otherwise the sequence waits in vLLM's queue, because it is new or was preempted.
    """

    num_tokens: int
    is_running: bool


#: The loaders have the same methods, which `WeightLoader` describes.
AnyWeightLoader = WeightLoader | WorkerWeightLoader | PartialWeightLoader


def make_vllm_request_id(request_id: int, index: int) -> str:
    return f"{request_id}:{index}"


@contextmanager
def claim_process_engine() -> Iterator[None]:
    """Reserve this process for a single vLLM engine within the context.

    vLLM's forward context is a global: two engines on two threads would corrupt each other. Raises
    RuntimeError if the process has an engine already.
    """
    if not _ENGINE_LOCK.acquire(blocking=False):
        raise RuntimeError("this process has a generation engine already; vLLM allows one")
    set_num_threads = torch.set_num_threads
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads  # vLLM replaces it by a no-op
        _ENGINE_LOCK.release()


def read_model_info(model_path: str) -> ModelInfo:
    model = load_skeleton(model_path)
    return ModelInfo(ParameterSet.from_module(model), model.config.get_text_config().vocab_size)


def build_vllm_engine(spec: EngineSpec) -> VllmEngine:
    """Build a vLLM engine in this process, whose environment must contain `make_vllm_env`.

    A tensor-parallel engine computes in child processes, or, with `spec.rank_group`, in the
    existing processes of the rank group, whose leader this process is.
    """
    from vllm.v1.engine.llm_engine import LLMEngine

    with _keep_plain_on_cpu():
        engine = LLMEngine.from_engine_args(_make_engine_args(spec), enable_multiprocessing=False)
    if spec.config.tensor_parallel > 1 and spec.rank_group is None:
        end_workers_with_engine(engine)
        if _is_on_cpu():
            unlink_shared_memory(engine)
    return engine


def build_follower_worker(spec: EngineSpec) -> "FollowerWorker":
    """Build the vLLM worker of a follower rank of a tensor-parallel engine.

    Collective: the leader builds the engine at the same time.
    """
    assert spec.rank_group is not None
    config = make_engine_config(spec)
    from streamrl.engines.vllm.executor import FollowerWorker

    with _keep_plain_on_cpu():
        return FollowerWorker(config, spec.rank_group)


def make_engine_config(spec: EngineSpec) -> Any:
    """Return vLLM's config of an engine; vLLM raises errors of any type for what it refuses."""
    return _make_engine_args(spec).create_engine_config()


def _make_engine_args(spec: EngineSpec) -> Any:
    if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") != "0":
        raise RuntimeError("make_vllm_env() must be in the environment before vLLM is imported")
    # VLLM_CONFIGURE_LOGGING=0 keeps vLLM from configuring logging, so configure its logger here.
    logger = logging.getLogger("vllm")
    logger.setLevel(logging.WARNING)
    logger.handlers, logger.propagate = [LOAD_WARNINGS], False
    with warnings.catch_warnings():
        # Raised by vLLM's own imports; users cannot act on these.
        warnings.simplefilter("ignore", FutureWarning)
        from vllm.engine.arg_utils import EngineArgs
    if _is_on_cpu() == has_local_gpu():
        devices = ("a CPU", "finds a GPU") if _is_on_cpu() else ("a GPU", "finds none")
        raise ConfigError(
            f"vLLM computes on {devices[0]}, but torch {devices[1]}: `streamrl doctor` names the"
            " build to install"
        )
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
    engine_args = EngineArgs(**arguments)
    # vLLM caches prefixes of such models in chunks of prompts only, which a CPU does not have.
    if _is_on_cpu() and engine_args.create_model_config().has_inner_state:
        engine_args.enable_prefix_caching = False
    return engine_args


def _is_on_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def _keep_plain_on_cpu() -> AbstractContextManager[None]:
    return keep_plain_linears() if _is_on_cpu() else nullcontext()


def make_weight_loader(
    engine: VllmEngine, spec: EngineSpec, parameters: ParameterSet
) -> AnyWeightLoader:
    """Return the loader for the engine: single process, vLLM's processes or a rank group."""
    if spec.rank_group is not None:
        worker = engine.model_executor.driver_worker.worker
        return PartialWeightLoader(worker, parameters, spec.model_path, spec.rank_group)
    if spec.config.tensor_parallel > 1:
        return WorkerWeightLoader(engine, parameters, spec.model_path)
    return WeightLoader(engine, parameters, spec.model_path)


def add_request(engine: VllmEngine, request: SamplingRequest, stops: StopConditions) -> str | None:
    """Add the sequences of a request to the engine; return None, or why vLLM rejects them.

    If vLLM rejects a sequence, no sequence of the request is added.
    """
    from vllm.exceptions import VLLMClientError

    salt = _make_cache_salt(engine)
    try:
        for sequence in request.sequences:
            prompt = {
                "type": "token",
                "prompt_token_ids": list(sequence.token_ids),
                "cache_salt": salt,
            }
            vllm_id = make_vllm_request_id(request.request_id, sequence.index)
            params = _make_sampling_params(
                request, sequence, (*stops.token_ids, *request.stop_token_ids)
            )
            internal_id = engine.add_request(vllm_id, prompt, params)
            sampled = sequence.token_ids[len(sequence.token_ids) - sequence.num_sampled :]
            if detokenizer := stops.make_detokenizer(sampled):
                engine.output_processor.request_states[internal_id].detokenizer = detokenizer
    except (VLLMClientError, ValueError) as error:
        engine.abort_request(
            [
                make_vllm_request_id(request.request_id, sequence.index)
                for sequence in request.sequences
            ]
        )
        return str(error)
    return None


def step_engine(engine: VllmEngine) -> list[SampledSequence]:
    return [_to_sampled_sequence(output) for output in engine.step() if output.finished]


@contextmanager
def translate_lost_rank_errors(engine: VllmEngine) -> Iterator[None]:
    """Raise GenerationError in place of a RuntimeError caused by a dead tensor-parallel process."""
    try:
        yield
    except RuntimeError as error:
        if has_lost_rank(engine):
            raise GenerationError("a process of the split engine has died") from error
        raise


def list_partial_sequences(
    engine: VllmEngine, request_ids: Collection[int]
) -> list[SampledSequence]:
    """Return the unfinished sequences of these requests that have at least one sampled token."""
    from vllm.v1.engine import FinishReason as VllmFinishReason

    # Read vLLM's internal state: streaming outputs (RequestOutputKind.DELTA) would cost time in
    # every step.
    outputs = [
        state.make_request_output([], None, VllmFinishReason.ABORT, None)
        for state in _list_running_states(engine)
        if int(state.external_req_id.split(":")[0]) in request_ids
    ]
    return [_to_sampled_sequence(output) for output in outputs]


def count_tokens(engine: VllmEngine) -> dict[str, TokenCount]:
    """Return the counts of all unfinished sequences, by the ids of `make_vllm_request_id`."""
    running = {request.request_id for request in engine.engine_core.engine_core.scheduler.running}
    return {
        state.external_req_id: TokenCount(state.detokenizer.num_output_tokens(), name in running)
        for name, state in engine.output_processor.request_states.items()
    }


def load_weights(
    engine: VllmEngine,
    loader: AnyWeightLoader,
    tensors: Mapping[str, torch.Tensor] | None,
    version: int,
    *,
    should_keep_kv: bool,
) -> WeightLoadStats:
    """Load all parameters of `version` into the engine between two decode steps.

    Iterates over `tensors` once. `tensors` None means that resharding has written the parameters
    into the storage already. After an exception the model may mix old and new parameters.
    """
    start_s = time.monotonic()
    interrupted = len(_list_running_states(engine))
    copied_bytes, verification = (
        (0, LoadVerification()) if tensors is None else loader.load_weights(tensors)
    )
    # The engine copies on a stream of its own, and the tensors are freed next.
    synchronize_stream()
    set_weight_version(engine, version)
    if should_keep_kv:
        # vLLM cannot reset the prefix cache while rollouts run. A new salt keeps waiting requests
        # from matching prefixes of the old weights.
        _update_waiting_salts(engine)
    else:
        # Preempts running rollouts, which are then prefilled with the new weights, and drops all
        # cached prefixes.
        engine.reset_prefix_cache(reset_running_requests=True)
    verification = replace(verification, warnings=LOAD_WARNINGS.drain_warnings())
    return WeightLoadStats(time.monotonic() - start_s, interrupted, copied_bytes, verification)


def set_weight_version(engine: VllmEngine, version: int) -> None:
    engine.engine_core.set_weight_version(str(version))


def shut_down_engine(engine: VllmEngine) -> None:
    from vllm.distributed import cleanup_dist_env_and_memory

    engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()


def _make_cache_salt(engine: VllmEngine) -> str:
    """Return the cache salt: requests share cached prefixes only within a version."""
    return f"version {engine.engine_core.get_weight_version()}"


def _update_waiting_salts(engine: VllmEngine) -> None:
    """Give waiting requests without sampled tokens the current version's cache salt."""
    salt = _make_cache_salt(engine)
    for request in engine.engine_core.engine_core.scheduler.waiting:
        if request.num_output_tokens == 0:
            request.cache_salt = salt
            request.block_hashes.clear()
            request.update_block_hashes()


def _list_running_states(engine: VllmEngine) -> list[Any]:
    states = engine.output_processor.request_states.values()
    return [state for state in states if state.detokenizer.num_output_tokens()]


def _make_sampling_params(
    request: SamplingRequest, sequence: SequenceRequest, stop_token_ids: Sequence[int]
) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        seed=sequence.seed,
        temperature=request.sampling.temperature,
        top_p=request.sampling.top_p,
        top_k=request.sampling.top_k,
        stop_token_ids=list(stop_token_ids),
        max_tokens=sequence.max_new_tokens,
        logprobs=0,
        # With prompt_logprobs vLLM bypasses the prefix cache, which holds no logprobs.
        prompt_logprobs=0 if request.should_score_prompt else None,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        # vLLM's deep copy of the parameters costs as much as the rest of add_request.
        skip_clone=True,
    )


def _to_sampled_sequence(output: Any) -> SampledSequence:
    completion = output.outputs[0]
    request_id, index = output.request_id.split(":")
    versions: list[int] = []
    for span in completion.weight_versions:
        versions += [int(span.version)] * (span.end - span.start)
    return SampledSequence(
        request_id=int(request_id),
        index=int(index),
        # Copy: vLLM keeps appending to these lists.
        token_ids=tuple(completion.token_ids),
        logprobs=tuple(completion.logprobs.logprobs),
        versions=versions,
        finish_reason=FinishReason[completion.finish_reason.upper()],
        prompt_logprobs=output.prompt_logprobs.logprobs if output.prompt_logprobs else (),
    )


KV_CACHE_TAG = "kv_cache"
"""vLLM's tag of the KV cache in sleep mode."""


class KvCacheMemory:
    """Frees and allocates the KV cache on all ranks of an engine; belongs to the engine's thread.

    On a GPU this uses vLLM's sleep mode; on a CPU, which has none, it resizes the storages.
    """

    def __init__(self, engine: VllmEngine) -> None:
        self._engine = engine
        self._has_sleep_mode: bool = engine.vllm_config.model_config.enable_sleep_mode
        self._is_asleep = False

    def sleep(self) -> None:
        """Free the KV cache; running rollouts are preempted and prefilled again later."""
        if self._is_asleep:
            return
        self._is_asleep = True
        self._engine.reset_prefix_cache(reset_running_requests=True)
        if self._has_sleep_mode:
            self._engine.model_executor.discard((KV_CACHE_TAG,))
        else:
            self._engine.collective_rpc(free_kv_caches)

    def wake_up(self) -> None:
        if not self._is_asleep:
            return
        self._is_asleep = False
        if self._has_sleep_mode:
            self._engine.model_executor.wake_up([KV_CACHE_TAG])
        else:
            self._engine.collective_rpc(allocate_kv_caches)


def is_freed_after(call: str | Callable[..., Any]) -> bool | None:
    """Return whether a worker's KV cache is freed after this call of `KvCacheMemory`'s.

    None: the call is another one.
    """
    if call in ("discard", free_kv_caches):
        return True
    return False if call in ("wake_up", allocate_kv_caches) else None


def free_kv_caches(worker: VllmWorker) -> None:
    for storage in _list_cache_storages(worker):
        storage.resize_(0)
    release_freed_memory()


def allocate_kv_caches(worker: VllmWorker) -> None:
    for storage, num_bytes in _list_cache_storages(worker).items():
        storage.resize_(num_bytes)
        # Zero the memory: masked positions must not hold NaN.
        torch.empty(0, dtype=torch.uint8).set_(storage).zero_()


def _list_cache_storages(worker: VllmWorker) -> dict[torch.UntypedStorage, int]:
    sizes: dict[int, tuple[torch.UntypedStorage, int]] = {}
    for cache in worker.model_runner.kv_caches:
        storage = cache.untyped_storage()
        dims = zip(cache.shape, cache.stride(), strict=True)
        last = cache.storage_offset() + sum((size - 1) * stride for size, stride in dims)
        _, num_bytes = sizes.get(storage._cdata, (storage, 0))
        sizes[storage._cdata] = storage, max(num_bytes, (last + 1) * cache.itemsize)
    return dict(sizes.values())

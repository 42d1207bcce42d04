"""A vLLM engine on a thread of its own: streamrl's calls into vLLM's LLMEngine.

`EngineThread` executes commands between decode steps and reports results:

    loop:  take commands -> execute them -> decode step -> report finished rollouts

Results go to the event loop, those of sampling batched per step. Any exception ends the thread,
since the engine's state is unknown afterwards: all pending futures fail, and threading's excepthook
prints the traceback. All calls for an engine must come from its thread.

The module loads vLLM, which reads the environment of `make_vllm_env` at its import.
"""

import asyncio
import logging
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase
from vllm import SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMClientError
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
    RoutedExpertsCapturer,
    bind_routed_experts_capturer,
)
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import FinishReason as VllmFinishReason
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.kv_cache_interface import FullAttentionSpec

from streamrl.data.chat_template import decode_ids, load_tokenizer
from streamrl.distributed.devices import has_local_gpu, synchronize_stream
from streamrl.engines.generator_config import GeneratorConfig, make_engine_args
from streamrl.engines.memory.peak_memory import release_freed_memory
from streamrl.engines.models.forward import load_skeleton
from streamrl.engines.vllm.executor import make_rank_group_args
from streamrl.engines.vllm.load_check import LoadWarningHandler
from streamrl.engines.vllm.plain_layers import keep_plain_linears
from streamrl.engines.vllm.rank_loader import RankLoader
from streamrl.engines.vllm.requests import (
    EngineSpec,
    ModelInfo,
    SampledSequence,
    SamplingRequest,
    SequenceRequest,
    TokenCount,
    make_vllm_request_id,
)
from streamrl.engines.vllm.weight_loader import (
    WeightLoader,
    WorkerWeightLoader,
    end_workers_with_engine,
    has_lost_rank,
    unlink_shared_memory,
)
from streamrl.errors import ConfigError, GenerationError
from streamrl.messages import NO_ENTRY, Array, FinishReason
from streamrl.resharding.storage import ShardStorage
from streamrl.weights import LoadVerification, WeightLoadStats
from streamrl.weights.parameters import ParameterSet

#: vLLM's LLMEngine.
VllmEngine = Any
#: vLLM's worker, in the process of a rank.
VllmWorker = Any

_ENGINE_LOCK = threading.Lock()
#: Shared, since a process has at most one engine.
LOAD_WARNINGS = LoadWarningHandler()


#: The loaders have the same methods, which `WeightLoader` describes.
AnyWeightLoader = WeightLoader | WorkerWeightLoader | RankLoader


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
    with keep_plain_on_cpu():
        engine = LLMEngine.from_engine_args(_make_engine_args(spec), enable_multiprocessing=False)
    if spec.config.tensor_parallel > 1 and spec.rank_group is None:
        end_workers_with_engine(engine)
        unlink_shared_memory(engine)
    return engine


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
    on_cpu = bool(current_platform.is_cpu())
    if on_cpu == has_local_gpu():
        devices = ("a CPU", "finds a GPU") if on_cpu else ("a GPU", "finds none")
        raise ConfigError(
            f"vLLM computes on {devices[0]}, but torch {devices[1]}: `streamrl doctor` names the"
            " build to install"
        )
    arguments = make_engine_args(
        spec.model_path,
        spec.config,
        seed=spec.seed,
        max_length=spec.max_length,
        on_cpu=on_cpu,
    )
    if spec.starts_empty:
        arguments["load_format"] = "dummy"
    # Only model runner V2 returns experts; `SlotExperts` records them on a CPU.
    arguments["enable_return_routed_experts"] = spec.returns_experts and not on_cpu
    if on_cpu and spec.config.tensor_parallel > 1:
        arguments["worker_cls"] = "streamrl.engines.vllm.plain_worker.PlainCpuWorker"
    if spec.rank_group is not None:
        arguments |= make_rank_group_args(spec.rank_group, spec.config.request_timeout_s)
    engine_args = EngineArgs(**arguments)
    # vLLM caches prefixes of such models in chunks of prompts only, which a CPU does not have.
    if on_cpu and engine_args.create_model_config().has_inner_state:
        engine_args.enable_prefix_caching = False
    return engine_args


def keep_plain_on_cpu() -> AbstractContextManager[None]:
    return keep_plain_linears() if current_platform.is_cpu() else nullcontext()


def make_weight_loader(
    engine: VllmEngine, spec: EngineSpec, parameters: ParameterSet
) -> AnyWeightLoader:
    """Return the loader for the engine: single process, vLLM's processes or a rank group."""
    if spec.rank_group is not None:
        worker = engine.model_executor.driver_worker.worker
        return make_group_loader(worker, spec, parameters)
    make = WorkerWeightLoader if spec.config.tensor_parallel > 1 else WeightLoader
    return make(engine, parameters, spec.model_path, is_loaded=not spec.starts_empty)


def make_group_loader(worker: VllmWorker, spec: EngineSpec, parameters: ParameterSet) -> RankLoader:
    """Return the loader of a rank of the rank group, whose worker has just read the directory."""
    assert spec.rank_group is not None
    rank, num_ranks = spec.rank_group.group_rank, spec.rank_group.size
    arguments = worker, parameters, spec.model_path
    return RankLoader(*arguments, is_loaded=True, rank=rank, num_ranks=num_ranks)


BYTES_PER_CHARACTER = 4
"""Maximum in UTF-8; with byte-level tokenizers a byte may be a token."""


class StopConditions:
    """Stop strings and stop token ids of an engine.

    vLLM's own stop strings need its detokenizer, which decodes every token of every request. This
    class decodes only the last tokens, as many as a stop string can span.
    """

    def __init__(self, model_path: str, config: GeneratorConfig) -> None:
        self.token_ids = list(config.stop_token_ids)
        self._texts = list(config.stop)
        self._tokenizer = load_tokenizer(model_path) if self._texts else None

    def make_detokenizer(self, sampled: Sequence[int]) -> Any:
        """Return a detokenizer that ends a vLLM request at a stop string; None if no string is set.

        `sampled` are tokens of a partial rollout from an earlier request, in which a stop string
        may start.
        """
        if self._tokenizer is None:
            return None
        return StopTextDetokenizer(self._tokenizer, self._texts, sampled)


class StopTextDetokenizer(IncrementalDetokenizer):
    """Decodes the last tokens of a request, as many as a stop string can span."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], sampled: Sequence[int]
    ) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._texts = texts
        self._window = 1 + max(len(text) for text in texts) * BYTES_PER_CHARACTER
        self._sampled = list(sampled[-self._window :])

    def update(self, new_token_ids: list[int], stop_terminated: bool) -> str | None:
        """Append new tokens; return the stop string in the decoded tail, or None."""
        super().update(new_token_ids, stop_terminated)
        tail = [*self._sampled, *self.token_ids[-self._window :]][-self._window :]
        text = decode_ids(self._tokenizer, tail)
        return next((stop for stop in self._texts if stop in text), None)


def add_request(engine: VllmEngine, request: SamplingRequest, stops: StopConditions) -> str | None:
    """Add the sequences of a request to the engine; return None, or why vLLM rejects them.

    If vLLM rejects a sequence, no sequence of the request is added.
    """
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


def shut_down_engine(engine: VllmEngine) -> None:
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
    return SamplingParams(
        seed=sequence.seed,
        temperature=request.sampling.temperature,
        top_p=request.sampling.top_p,
        top_k=request.sampling.top_k,
        min_p=request.sampling.min_p,
        stop_token_ids=list(stop_token_ids),
        max_tokens=sequence.max_new_tokens,
        logprobs=request.num_mask_words,
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
    logprobs, wide = completion.logprobs.logprobs, {}
    if len(logprobs) > len(completion.token_ids):
        logprobs, wide["sampling_mask"] = _read_sampling_masks(
            completion.logprobs, len(completion.token_ids)
        )
    return SampledSequence(
        request_id=int(request_id),
        index=int(index),
        # Copy: vLLM keeps appending to these lists.
        token_ids=tuple(completion.token_ids),
        logprobs=tuple(logprobs),
        versions=versions,
        finish_reason=FinishReason[completion.finish_reason.upper()],
        prompt_logprobs=output.prompt_logprobs.logprobs if output.prompt_logprobs else (),
        wide=wide,
    )


def _read_sampling_masks(scores: Any, num_tokens: int) -> tuple[Sequence[float], Array]:
    """Return logprobs of sampled tokens, and ids of the words they were sampled from, [T, K].

    scores: vLLM's, with the sampled token, then the K likeliest words; -inf where not kept.
    """
    ids = np.array(scores.token_ids, np.int32).reshape(num_tokens, -1)
    logprobs = np.array(scores.logprobs).reshape(num_tokens, -1)
    mask = np.where(logprobs > -np.inf, ids, np.int32(NO_ENTRY))[:, 1:]
    # vLLM keeps all words that tie for the last place. The sampled one takes it, and the logprob
    # is that among the words of the mask, as the trainer computes it.
    is_lost = (mask != ids[:, :1]).all(1)
    mask[is_lost, -1] = ids[is_lost, 0]
    return (logprobs[:, 0] - np.logaddexp.reduce(logprobs[:, 1:], axis=1)).tolist(), mask


class SlotExperts(RoutedExpertsCapturer):
    """Experts of each token in the KV cache of a CPU engine, by the token's slot.

    So tokens of a prefix that several rollouts share have theirs, computed once.
    """

    def __init__(self, engine: VllmEngine) -> None:
        self._runner = runner = engine.model_executor.driver_worker.worker.model_runner
        groups = runner.kv_cache_config.kv_cache_groups
        # Slots of sliding windows are reused while a rollout runs.
        whole = [i for i, g in enumerate(groups) if isinstance(g.kv_cache_spec, FullAttentionSpec)]
        if not whole:
            raise ValueError("algorithm.router_replay needs a layer with full attention")
        self._group = whole[0]
        self._layer_name = groups[self._group].layer_names[0]
        self._block_size = groups[self._group].kv_cache_spec.block_size
        num_slots = runner.kv_cache_config.num_blocks * self._block_size
        super().__init__(num_slots, engine.vllm_config)
        bind_routed_experts_capturer(runner.get_model(), self)

    def capture(self, layer_id: int, topk_ids: torch.Tensor) -> None:
        slots = get_forward_context().slot_mapping[self._layer_name][: len(topk_ids)]
        self.device_buffer[slots, layer_id] = topk_ids.to(self.device_buffer.dtype)

    def read(self, request_id: str, num_tokens: int) -> Array:
        """Return the experts of a request that has just finished, uint8 [T, layers, k]."""
        rows = self._runner.input_batch.req_id_to_index.items()
        row = next(i for name, i in rows if name.startswith(f"{request_id}-"))
        table = self._runner.input_batch.block_table[self._group].block_table.np[row]
        positions = np.arange(num_tokens)
        slots = table[positions // self._block_size] * self._block_size
        experts = self.device_buffer[torch.from_numpy(slots + positions % self._block_size)]
        return experts.to(torch.uint8).numpy()


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


EngineCommand = Callable[[VllmEngine], None]
Result = TypeVar("Result")


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
        self._commands.put(lambda engine: self._add_requests(engine, requests))

    def abort_sequences(self, request_id: int, indices: Sequence[int]) -> None:
        names = [make_vllm_request_id(request_id, index) for index in indices]
        self._commands.put(lambda engine: engine.abort_request(names))

    def swap_weights(
        self, tensors: Mapping[str, torch.Tensor] | None, version: int
    ) -> asyncio.Future[WeightLoadStats]:
        """Replace all parameters by those of `version` between two decode steps.

        Iterates over `tensors` once. `tensors` None means that resharding has written the
        parameters into the storage already. After an exception the model may mix old and new
        parameters.
        """

        def command(engine: VllmEngine) -> WeightLoadStats:
            start_s = time.monotonic()
            interrupted = len(_list_running_states(engine))
            copied_bytes, verification = (
                (0, LoadVerification())
                if tensors is None
                else self._weight_loader.set_parameters(tensors)
            )
            # The engine copies on a stream of its own, and the tensors are freed next.
            synchronize_stream()
            self._set_version(engine, version)
            if self._spec.should_keep_kv:
                # vLLM cannot reset the prefix cache while rollouts run. A new salt keeps waiting
                # requests from matching prefixes of the old weights.
                _update_waiting_salts(engine)
            else:
                # Preempts running rollouts, which are then prefilled with the new weights, and
                # drops all cached prefixes.
                engine.reset_prefix_cache(reset_running_requests=True)
            verification = replace(verification, warnings=LOAD_WARNINGS.drain_warnings())
            pause_s = time.monotonic() - start_s
            layouts = self._weight_loader.layouts
            return WeightLoadStats(pause_s, interrupted, copied_bytes, verification, layouts)

        return self._submit(command)

    def use_model_dir(self, version: int) -> asyncio.Future[WeightLoadStats]:
        """Label the weights that the engine was built with as `version`."""

        def command(engine: VllmEngine) -> WeightLoadStats:
            self._set_version(engine, version)
            return WeightLoadStats()

        return self._submit(command)

    def _set_version(self, engine: VllmEngine, version: int) -> None:
        engine.engine_core.set_weight_version(str(version))
        self.version = version

    def list_partials(
        self, request_ids: Collection[int]
    ) -> asyncio.Future[Sequence[SampledSequence]]:
        return self._submit(lambda engine: list_partial_sequences(engine, request_ids))

    def count_tokens(self) -> asyncio.Future[dict[str, TokenCount]]:
        return self._submit(count_tokens)

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
            with claim_process_engine():
                model_info = read_model_info(self._spec.model_path)
                self._stop_conditions = StopConditions(self._spec.model_path, self._spec.config)
                engine = build_vllm_engine(self._spec)
                self._kv_memory = KvCacheMemory(engine)
                records = self._spec.returns_experts and current_platform.is_cpu()
                self._slot_experts = SlotExperts(engine) if records else None
                self._weight_loader = make_weight_loader(engine, self._spec, model_info.parameters)
                try:
                    self._resolve(self._started, model_info)
                    with translate_lost_rank_errors(engine):
                        self._run_loop(engine)
                finally:
                    # Also after a failure: otherwise vLLM shuts down when the engine is garbage
                    # collected, and destroys the process groups of the next engine.
                    shut_down_engine(engine)
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
                batch = [self._to_sampled(o) for o in engine.step() if o.finished]
                if batch:
                    self._call_loop(self._on_sampled, batch)

    def _to_sampled(self, output: Any) -> SampledSequence:
        sampled = _to_sampled_sequence(output)
        if not self._spec.returns_experts:
            return sampled
        num_tokens = len(output.prompt_token_ids) + len(sampled.token_ids)
        chosen = output.outputs[0].routed_experts
        if self._slot_experts is not None:
            chosen = self._slot_experts.read(output.request_id, num_tokens - 1)
        # The last token has none: it was sampled, but not yet computed.
        experts = np.full((num_tokens, chosen[0].size), NO_ENTRY.astype(np.uint8))
        experts[: len(chosen)] = chosen.reshape(len(chosen), -1)
        return replace(sampled, wide={**sampled.wide, "routed_experts": experts})

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

    def _add_requests(self, engine: VllmEngine, requests: Sequence[SamplingRequest]) -> None:
        for request in requests:
            reason = add_request(engine, request, self._stop_conditions)
            if reason is not None:
                self._call_loop(self._on_rejected, request.request_id, reason)

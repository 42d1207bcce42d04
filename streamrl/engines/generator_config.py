"""Config section `generator` and its translation to vLLM's EngineArgs."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from streamrl.errors import ConfigError
from streamrl.files.hf_config import compute_max_positions, is_trusted, read_model_config
from streamrl.files.typed_settings import (
    FIXED_ON_RESUME,
    Conflict,
    above,
    at_least,
    check_conflicts,
    one_of,
)
from streamrl.weights.versions import NUM_SEQUENCES

GENERATOR_DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_CACHE_MB_ON_CPU = 64
MIN_TEMPERATURE = 0.01
#: Token budget of an engine step on a CPU. Without chunked prefill a longer prompt exceeds it.
STEP_TOKENS_ON_CPU = 4096
STEP_TOKENS_ON_GPU = 8192
"""Token budget of an engine step on a GPU, as vLLM's for batch inference on most GPUs.

vLLM itself would take 2048: it has no default for the way that the engine is built here. After each
version, all running rollouts are prefilled again in steps of this size.
"""
DEFAULT_GRAPH_SIZE = 512
"""Largest batch for which vLLM captures a CUDA graph by default; it skips larger ones."""
MAX_GRAPH_SIZE = 1024
"""Largest batch for which a CUDA graph is captured. Launching kernels one by one costs larger ones
little, while every graph takes time at the start and memory."""
GRAPH_STEP = 64
"""Distance of graph sizes above vLLM's defaults; a batch is padded to the next size."""

MAX_MASK_WORDS = 256
MASK_BOUNDS = {"top_k": at_least(1, MAX_MASK_WORDS), "top_p": above(0, 1), "min_p": at_least(0, 1)}
"""Settings of a sampling mask, as in vLLM. It returns words as Python numbers: 0.1 us each."""


@dataclass(frozen=True)
class SamplingSettings:
    """Sampling parameters of a request, as in vLLM: temperature 0 is greedy, top_k 0 is off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0


@dataclass
class GeneratorConfig:
    """Config section `generator`: replicas, sampling and resources."""

    request_timeout_s: ClassVar[float] = 600.0
    """Longest time in which an engine samples no token for a prompt or, while the prompt waits for
    others, for any, and longest load of a version of the weights, s.

    Then the generator counts as hung and is restarted. A rollout that grows may take any time.
    """
    #: Number of engines, each with a full copy of the model.
    replicas: Annotated[int, at_least(1)] = 1
    #: Tensor-parallel size of an engine: processes and devices per replica. In a colocated run the
    #: trainer's ranks run these processes.
    tensor_parallel: Annotated[int, at_least(1)] = 1
    #: Maximum length of a completion, tokens.
    max_new_tokens: Annotated[int, at_least(1)] = 256
    #: Sampling temperature. vLLM samples no sharper than 0.01.
    temperature: Annotated[float, at_least(MIN_TEMPERATURE)] = 1.0
    #: Truncation of the sampling distribution, as in {top_k: 20, top_p: 0.95, min_p: 0.05}. Needs
    #: top_k, at most 256. The words that sampling could draw are stored with each token, and the
    #: trainer computes log-probabilities and entropies among them. Empty: all words.
    sampling_mask: Annotated[dict[str, float], FIXED_ON_RESUME] = field(default_factory=dict)
    #: Stop strings, besides the model's end-of-sequence token. The token that completes a stop
    #: string is the last of the completion.
    stop: list[str] = field(default_factory=list)
    #: Stop token ids, besides the model's end-of-sequence token.
    stop_token_ids: list[Annotated[int, at_least(0)]] = field(default_factory=list)
    #: Rollouts that a replica samples concurrently; the rest wait in the replica's queue. A replica
    #: takes another group while it runs fewer.
    max_concurrent_rollouts: Annotated[int, at_least(1)] = 256
    #: KV cache per process of a replica, MB. Unset: 64 on a CPU; on a GPU, the rest of
    #: gpu_memory_utilization.
    kv_cache_mb: Annotated[int | None, at_least(1)] = None
    #: Fraction of a GPU's memory that a replica may use; ignored if kv_cache_mb is set.
    gpu_memory_utilization: Annotated[float, above(0, 1)] = 0.9
    #: CPU threads per process of a replica.
    threads: Annotated[int, at_least(1)] = 1
    #: Dtype of weights and activations: float32, bfloat16, float16 or auto. auto is float32 on a
    #: CPU; on a GPU the model's dtype, and bfloat16 for models in float32.
    dtype: Annotated[str, one_of(*GENERATOR_DTYPES)] = "auto"
    #: Timeout for starting an engine, s.
    start_timeout_s: Annotated[float, above(0)] = 600.0

    def __post_init__(self) -> None:
        if "" in self.stop:
            raise ConfigError("generator.stop: an empty text would end every completion at once")
        check_conflicts(self, self._iter_mask_conflicts(), "generator.")

    def _iter_mask_conflicts(self) -> Iterator[Conflict]:
        mask, known = self.sampling_mask, ", ".join(MASK_BOUNDS)
        for key, value in mask.items():
            bounds = MASK_BOUNDS.get(key)
            is_bad = bounds is None or not bounds.holds(value)
            yield is_bad, "sampling_mask", f"{key}: {bounds or f'must be one of {known}'}"
        yield (
            bool(mask) and mask.get("top_k", 0.5) % 1 != 0,
            "sampling_mask",
            "needs a whole top_k, which bounds the words stored with each token; add top_k: 50",
        )

    @property
    def num_mask_words(self) -> int:
        """Most words in the sampling mask of a token; 0: tokens have no mask."""
        return int(self.sampling_mask.get("top_k", 0))

    @property
    def sampling(self) -> SamplingSettings:
        """Return the settings with which training rollouts are sampled."""
        mask: dict[str, Any] = {**self.sampling_mask, "top_k": self.num_mask_words}
        return SamplingSettings(self.temperature, **mask)

    def resolve_dtype(self, *, on_gpu: bool) -> str:
        """Return the dtype of weights; auto on a GPU is taken to be bfloat16."""
        default = "bfloat16" if on_gpu else "float32"
        return default if self.dtype == "auto" else self.dtype

    def resolve_kv_cache_mb(self, *, on_gpu: bool) -> int | None:
        """Return the size of the KV cache; None for the rest of a GPU's memory."""
        return self.kv_cache_mb or (None if on_gpu else KV_CACHE_MB_ON_CPU)


def _make_hf_overrides(model_path: str, max_length: int) -> dict[str, Any]:
    """Return config.json overrides that make vLLM build the same model as transformers."""
    config, changes = read_model_config(model_path).get_text_config(), dict[str, Any]()
    if max_length > config.max_position_embeddings:
        # vLLM expects this number to include YaRN's scaling; in config.json it may not.
        changes["max_position_embeddings"] = compute_max_positions(config)
    if config.model_type == "deepseek_v3":
        # transformers hard-codes these for the family; vLLM reads them from the config.
        changes |= {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    return changes


MIN_GPU_FRACTION = 0.01


def list_graph_sizes(max_num_seqs: int) -> list[int] | None:
    """Return the batch sizes of captured CUDA graphs, or None if vLLM's defaults cover all batches.

    The largest size must not exceed `max_num_seqs`: vLLM drops such graphs for decode steps.
    """
    if max_num_seqs <= DEFAULT_GRAPH_SIZE:
        return None
    largest = min(max_num_seqs, MAX_GRAPH_SIZE)
    small = [1, 2, 4, *range(8, 256, 8), *range(256, DEFAULT_GRAPH_SIZE + 1, 16)]
    return [*small, *range(DEFAULT_GRAPH_SIZE + GRAPH_STEP, largest, GRAPH_STEP), largest]


def make_engine_args(
    model_path: str, config: GeneratorConfig, *, seed: int, max_length: int, on_cpu: bool
) -> dict[str, Any]:
    """Return vLLM's EngineArgs of one generator replica.

    `seed` seeds vLLM; `max_length` bounds prompt plus completion, in tokens.
    """
    # Spare slots for the logprob check, which must not wait for a rollout to finish.
    max_num_seqs = config.max_concurrent_rollouts + NUM_SEQUENCES
    arguments: dict[str, Any] = {
        "model": model_path,
        "dtype": config.dtype,
        "seed": seed,
        "max_model_len": max_length,
        "max_num_seqs": max_num_seqs,
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": MAX_MASK_WORDS,
        "enable_prefix_caching": True,
        # With async scheduling, a step is in flight when weights change or the KV cache is freed.
        # vLLM labels tokens with the version at their arrival: with weights.kv=keep, those of that
        # step would carry the new version although the old weights sampled them.
        "async_scheduling": False,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "trust_remote_code": is_trusted(model_path),
        # "auto" prefers Mistral's consolidated file, in which parameters have other names.
        "load_format": "hf",
        "config_format": "hf",
    }
    if changes := _make_hf_overrides(model_path, max_length):
        arguments["hf_overrides"] = changes
    if config.tensor_parallel > 1:
        arguments |= {
            "tensor_parallel_size": config.tensor_parallel,
            "distributed_executor_backend": "mp",
        }
    kv_cache_mb = config.resolve_kv_cache_mb(on_gpu=not on_cpu)
    if on_cpu:
        arguments |= {
            "dtype": config.resolve_dtype(on_gpu=False),
            "enforce_eager": True,
            # For DeepSeek's attention, which vLLM otherwise computes with AMX where the CPU has it:
            # in bfloat16 only, from a packed copy of weights. Other models ignore it.
            "attention_backend": "CPU_MLA",
            # After a chunk of a prompt, vLLM rewinds the request's random generator. CPU
            # generators do not support that, and the engine would die.
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(max_length, max_num_seqs, STEP_TOKENS_ON_CPU),
        }
    else:
        arguments["max_num_batched_tokens"] = max(max_num_seqs, STEP_TOKENS_ON_GPU)
        if graph_sizes := list_graph_sizes(max_num_seqs):
            arguments["compilation_config"] = {"cudagraph_capture_sizes": graph_sizes}
        if kv_cache_mb is not None:
            # The GPU is shared with other processes, which may use the KV cache's memory meanwhile.
            arguments["enable_sleep_mode"] = True
    if kv_cache_mb is None:
        arguments["gpu_memory_utilization"] = config.gpu_memory_utilization
    else:
        arguments["kv_cache_memory_bytes"] = kv_cache_mb << 20
        if not on_cpu:
            # vLLM refuses to start unless this fraction of the GPU is free, although it does not
            # use the fraction once the size of the KV cache is given.
            arguments["gpu_memory_utilization"] = MIN_GPU_FRACTION
    return arguments

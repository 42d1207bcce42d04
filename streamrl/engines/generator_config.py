"""The settings of the generators and what they mean to vLLM: environment and engine arguments."""

from dataclasses import dataclass, field
from typing import Any

from streamrl.errors import ConfigError
from streamrl.files.hf_config import compute_max_positions, is_trusted, read_model_config
from streamrl.weights.logprob_probe import NUM_SEQUENCES

GENERATOR_DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_CACHE_MB_ON_CPU = 64
MIN_TEMPERATURE = 0.01
#: Tokens of one engine step on a CPU; a step takes whole prompts, so a long one may exceed it.
STEP_TOKENS_ON_CPU = 4096


@dataclass(frozen=True)
class SamplingSettings:
    """How tokens are drawn: at 0 the likeliest; among the top_k likeliest, 0 for all of them, and
    the fewest that have the probability top_p together."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


@dataclass
class GeneratorConfig:
    """The generators: how many, what they sample, and what they may use."""

    #: Number of engines, each with the whole model.
    replicas: int = 1
    #: Processes, and devices, that the layers of one engine are split over; in a colocated run,
    #: ranks of the trainer.
    tensor_parallel: int = 1
    #: Longest completion, tokens.
    max_new_tokens: int = 256
    #: Temperature of the sampling distribution. There is no top-p and no top-k: logprobs would be
    #: those of another distribution than the one that is trained.
    temperature: float = 1.0
    #: Texts that end a completion, besides the model's end of sequence. The token that completes
    #: one is the completion's last.
    stop: list[str] = field(default_factory=list)
    #: Token ids that end a completion likewise.
    stop_token_ids: list[int] = field(default_factory=list)
    #: Rollouts one replica samples at the same time; more wait in its queue. While there are fewer
    #: than so many, another group is taken on.
    max_concurrent_rollouts: int = 256
    #: Memory for keys and values, MB per replica; of a split one, in each process. Unset: 64 on a
    #: CPU, and on a GPU what gpu_memory_utilization leaves.
    kv_cache_mb: int | None = None
    #: Fraction of a GPU's memory a replica may use; without meaning if kv_cache_mb is set.
    gpu_memory_utilization: float = 0.9
    #: CPU threads a replica computes with; if it is split, each of its processes.
    threads: int = 1
    #: Type of weights and activations: float32, bfloat16, float16, or auto, which is the model's
    #: own on a GPU and float32 on a CPU.
    dtype: str = "auto"
    #: Deadline of starting an engine, s.
    start_timeout_s: float = 600.0
    #: Deadline of the rollouts of one prompt, and of applying one version of the weights, s.
    request_timeout_s: float = 600.0

    def __post_init__(self) -> None:
        for name in (
            "replicas",
            "tensor_parallel",
            "max_new_tokens",
            "temperature",
            "max_concurrent_rollouts",
            "kv_cache_mb",
            "gpu_memory_utilization",
            "threads",
            "start_timeout_s",
            "request_timeout_s",
        ):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"generator.{name}={value}: must be above 0")
        if self.temperature < MIN_TEMPERATURE:
            raise ConfigError(
                f"generator.temperature={self.temperature}: must be at least {MIN_TEMPERATURE};"
                " vLLM samples no sharper than that"
            )
        if "" in self.stop:
            raise ConfigError("generator.stop: an empty text would end every completion at once")
        for token_id in self.stop_token_ids:
            if token_id < 0:
                raise ConfigError(f"generator.stop_token_ids: {token_id}: must be 0 or more")
        if self.gpu_memory_utilization > 1:
            raise ConfigError(
                f"generator.gpu_memory_utilization={self.gpu_memory_utilization}: must be at most 1"
            )
        if self.dtype not in GENERATOR_DTYPES:
            raise ConfigError(
                f"generator.dtype={self.dtype}: must be one of {', '.join(GENERATOR_DTYPES)}"
            )


def _make_hf_overrides(model_path: str, max_length: int) -> dict[str, Any]:
    """Return what a config.json has to say for vLLM to build what transformers builds of it."""
    config, changes = read_model_config(model_path).get_text_config(), dict[str, Any]()
    if max_length > config.max_position_embeddings:
        # vLLM takes this number for one that includes the scaling of YaRN.
        changes["max_position_embeddings"] = compute_max_positions(config)
    if config.model_type == "deepseek_v3":
        # To transformers the family says as much.
        changes |= {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    return changes


MIN_GPU_FRACTION = 0.01
"""A part of a GPU."""


def make_engine_args(
    model_path: str, config: GeneratorConfig, *, seed: int, max_length: int, on_cpu: bool
) -> dict[str, Any]:
    """vLLM's EngineArgs for one replica; `max_length` is in tokens, prompt and completion."""
    arguments: dict[str, Any] = {
        "model": model_path,
        "dtype": config.dtype,
        "seed": seed,
        "max_model_len": max_length,
        # A probe must not wait for a rollout to end.
        "max_num_seqs": config.max_concurrent_rollouts + NUM_SEQUENCES,
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": True,
        # With it, a step is in flight while the weights change between two steps.
        "async_scheduling": False,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "trust_remote_code": is_trusted(model_path),
        # Else a consolidated file, of Mistral's own names, is taken for the others.
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
    kv_cache_mb = config.kv_cache_mb
    if on_cpu:
        kv_cache_mb = kv_cache_mb or KV_CACHE_MB_ON_CPU
        arguments |= {
            "dtype": "float32" if config.dtype == "auto" else config.dtype,
            "enforce_eager": True,
            # A prompt cut in two makes vLLM rewind the request's random generator, which a CPU
            # generator cannot do: the engine would die.
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(
                max_length, config.max_concurrent_rollouts + NUM_SEQUENCES, STEP_TOKENS_ON_CPU
            ),
        }
    elif kv_cache_mb is not None:
        # Others have a part of the GPU, and may have that of the keys and values in between.
        arguments["enable_sleep_mode"] = True
    if kv_cache_mb is None:
        arguments["gpu_memory_utilization"] = config.gpu_memory_utilization
    else:
        arguments["kv_cache_memory_bytes"] = kv_cache_mb << 20
        if not on_cpu:
            # vLLM would not start unless this part of the GPU were free, which it then has no use
            # for.
            arguments["gpu_memory_utilization"] = MIN_GPU_FRACTION
    return arguments

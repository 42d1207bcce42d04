"""Rules of tensor parallelism: which models can be split over how many ranks.

The rules take sizes from config.json or from the planner's ModelShape.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from streamrl.errors import ConfigError
from streamrl.files.hf_config import read_model_config
from streamrl.placement.model_shapes import ModelShape

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

TENSOR_PARALLEL_FAMILIES = ("llama", "mistral", "qwen2")
"""Values of model_type in config.json whose layers consist of COLUMN_PARALLEL and ROW_PARALLEL."""
EXPERT_COUNT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
HEADS_KEY, KV_HEADS_KEY, INTERMEDIATE_KEY = (
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
)
EXPERT_INTERMEDIATE_KEY = "moe_intermediate_size"
"""Key of an expert's size in some mixture-of-experts families; others use INTERMEDIATE_KEY."""
DIVIDED_KEYS = (HEADS_KEY, KV_HEADS_KEY, INTERMEDIATE_KEY)

SplitSizes = Mapping[str, int]
"""Sizes that the number of tensor-parallel ranks must divide, by their key in config.json."""


def has_experts(model_path: str) -> bool:
    config = vars(read_model_config(model_path).get_text_config())
    return any(config.get(name) for name in EXPERT_COUNT_KEYS)


def check_generator_split(model_path: str, ranks: int) -> None:
    """Raise ConfigError if vLLM cannot split the model over `ranks` tensor-parallel ranks."""
    names = (*DIVIDED_KEYS, EXPERT_INTERMEDIATE_KEY) if has_experts(model_path) else DIVIDED_KEYS
    sizes = _read_sizes(read_model_config(model_path).get_text_config(), names)
    if reason := explain_unservable_split(sizes, ranks):
        raise ConfigError(f"generator.tensor_parallel={ranks}: {reason}")


def check_tensor_parallel(model_path: str, ranks: int, *, section: str) -> None:
    """Raise ConfigError if training cannot split the model over `ranks` tensor-parallel ranks.

    `section` is the config section that error messages name.
    """
    if ranks == 1:
        return
    config = read_model_config(model_path)
    if reason := explain_untrainable_split(
        config.model_type, _read_sizes(config, DIVIDED_KEYS), ranks
    ):
        raise ConfigError(f"{section}.tensor_parallel={ranks}: {reason}")


def get_split_sizes(shape: ModelShape) -> SplitSizes:
    sizes = {HEADS_KEY: shape.heads, KV_HEADS_KEY: shape.kv_heads}
    if not shape.experts:
        return sizes | {INTERMEDIATE_KEY: shape.intermediate}
    dense_sizes = {INTERMEDIATE_KEY: shape.dense_intermediate} if shape.dense_intermediate else {}
    return sizes | dense_sizes | {EXPERT_INTERMEDIATE_KEY: shape.intermediate}


def explain_unservable_split(sizes: SplitSizes, ranks: int) -> str:
    """Explain why vLLM cannot split a model over `ranks` tensor-parallel ranks; "" if it can.

    With fewer key-value heads than ranks, vLLM replicates heads.
    """
    replicates_kv = KV_HEADS_KEY in sizes and not ranks % sizes[KV_HEADS_KEY]
    return _explain_indivisible(
        {name: size for name, size in sizes.items() if name != KV_HEADS_KEY or not replicates_kv},
        ranks,
    )


def explain_untrainable_split(family: str, sizes: SplitSizes, ranks: int) -> str:
    """Explain why training cannot split a model over `ranks` tensor-parallel ranks; "" if it can.

    `sizes` are those that `ranks` must divide. `family` is the model_type; "" skips the check of
    the family, for a planner that does not know it.
    """
    if family and family not in TENSOR_PARALLEL_FAMILIES:
        return f"splits models of type {', '.join(TENSOR_PARALLEL_FAMILIES)}, not {family}"
    return _explain_indivisible(sizes, ranks)


def explain_unloadable_split(ranks: int, *, has_experts: bool, on_gpu: bool) -> str:
    """Explain why vLLM cannot load new weights into a model split over `ranks`; "" if it can."""
    if on_gpu or ranks == 1 or not has_experts:
        return ""
    return (
        f"generator.tensor_parallel={ranks}: on a CPU vLLM cannot load new weights of a mixture"
        " of experts that is split; use 1"
    )


def _read_sizes(config: "PreTrainedConfig", names: Iterable[str]) -> SplitSizes:
    # getattr instead of to_dict(): transformers maps the names that families use to standard ones.
    sizes = {name: getattr(config, name) for name in names if hasattr(config, name)}
    return {name: size for name, size in sizes.items() if size}


def _explain_indivisible(sizes: SplitSizes, ranks: int) -> str:
    reasons = (f"must divide the model's {k}={size}" for k, size in sizes.items() if size % ranks)
    return next(reasons, "")

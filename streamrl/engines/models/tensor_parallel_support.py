"""Which models can be split over tensor-parallel ranks, and over how many.

Each rule takes what a model's config.json says, or the planner's shape of it does.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from streamrl.errors import ConfigError
from streamrl.files.hf_config import read_model_config
from streamrl.placement import ModelShape

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

TENSOR_PARALLEL_FAMILIES = ("llama", "mistral", "qwen2")
"""Types of models, as config.json has them, whose layers have the matrices that are split, and no
others."""
EXPERT_COUNT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
"""How configs call the number of experts of a layer."""
HEADS_KEY, KV_HEADS_KEY, INTERMEDIATE_KEY = (
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
)
EXPERT_INTERMEDIATE_KEY = "moe_intermediate_size"
"""Of models with experts; many call it as they do that of other layers."""
DIVIDED_KEYS = (HEADS_KEY, KV_HEADS_KEY, INTERMEDIATE_KEY)
"""What of a model's config is shared out."""

SplitSizes = Mapping[str, int]
"""What is shared out, as a model's config calls it."""


def has_experts(model_path: str) -> bool:
    """Whether the model in a directory is a mixture of experts."""
    config = vars(read_model_config(model_path).get_text_config())
    return any(config.get(name) for name in EXPERT_COUNT_KEYS)


def check_generator_split(model_path: str, ranks: int) -> None:
    """Raise ConfigError if vLLM cannot split the model in a directory over that many ranks."""
    names = (*DIVIDED_KEYS, EXPERT_INTERMEDIATE_KEY) if has_experts(model_path) else DIVIDED_KEYS
    sizes = _read_sizes(read_model_config(model_path).get_text_config(), names)
    if why := explain_unservable_split(sizes, ranks):
        raise ConfigError(f"generator.tensor_parallel={ranks}: {why}")


def check_tensor_parallel(model_path: str, ranks: int, *, section: str) -> None:
    """Raise ConfigError if the model in a directory cannot be split over that many ranks."""
    if ranks == 1:
        return
    config = read_model_config(model_path)
    if why := explain_untrainable_split(
        config.model_type, _read_sizes(config, DIVIDED_KEYS), ranks
    ):
        raise ConfigError(f"{section}.tensor_parallel={ranks}: {why}")


def get_split_sizes(shape: ModelShape) -> SplitSizes:
    """What is shared out of a model of this shape."""
    sizes = {HEADS_KEY: shape.heads, KV_HEADS_KEY: shape.kv_heads}
    if not shape.experts:
        return sizes | {INTERMEDIATE_KEY: shape.intermediate}
    own = {INTERMEDIATE_KEY: shape.dense_intermediate} if shape.dense_intermediate else {}
    return sizes | own | {EXPERT_INTERMEDIATE_KEY: shape.intermediate}


def explain_unservable_split(sizes: SplitSizes, ranks: int) -> str:
    """Why vLLM cannot split a model over that many ranks; empty if it can.

    Key and value heads may be fewer: ranks then have the same.
    """
    repeated = KV_HEADS_KEY in sizes and not ranks % sizes[KV_HEADS_KEY]
    return _explain_indivisible(
        {name: size for name, size in sizes.items() if name != KV_HEADS_KEY or not repeated}, ranks
    )


def explain_untrainable_split(family: str, sizes: SplitSizes, ranks: int) -> str:
    """Why a model of a family is not trained split over that many ranks; empty if it is.

    One whose family is not known, of which the planner was told sizes alone, may be.
    """
    if family and family not in TENSOR_PARALLEL_FAMILIES:
        return f"splits models of type {', '.join(TENSOR_PARALLEL_FAMILIES)}, not {family}"
    return _explain_indivisible(sizes, ranks)


def explain_unloadable_split(ranks: int, *, has_experts: bool, on_gpu: bool) -> str:
    """Why vLLM cannot load new weights of a model that is split over that many ranks, if so."""
    if on_gpu or ranks == 1 or not has_experts:
        return ""
    return (
        f"generator.tensor_parallel={ranks}: on a CPU vLLM cannot load new weights of a mixture"
        " of experts that is split; use 1"
    )


def _read_sizes(config: "PreTrainedConfig", names: Iterable[str]) -> SplitSizes:
    # Families have names of their own for some, which transformers knows.
    known = {name: getattr(config, name) for name in names if hasattr(config, name)}
    return {name: size for name, size in known.items() if size}


def _explain_indivisible(sizes: SplitSizes, ranks: int) -> str:
    found = (f"must divide the model's {k}={size}" for k, size in sizes.items() if size % ranks)
    return next(found, "")

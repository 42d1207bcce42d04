"""Which models can be split over tensor-parallel ranks, and over how many."""

from streamrl.errors import ConfigError
from streamrl.model_config import read_model_config
from streamrl.placement import ModelShape

FAMILIES = ("llama", "mistral", "qwen2")
"""Types of models, as config.json has them, whose layers have the matrices that are split, and no
others."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""How configs call the number of experts of a layer."""
DIVIDED = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
"""What of a model's config is shared out."""


def has_experts(model_path: str) -> bool:
    """Whether the model in a directory is a mixture of experts."""
    config = vars(read_model_config(model_path).get_text_config())
    return any(config.get(name) for name in EXPERTS)


def check_split_generator(model_path: str, ranks: int) -> None:
    """Raise ConfigError if vLLM cannot split the model in a directory over that many ranks.

    Key and value heads may be fewer: ranks then have the same.
    """
    config = vars(read_model_config(model_path).get_text_config())
    for name in DIVIDED:
        size = config.get(name)
        repeats = name == "num_key_value_heads" and size and ranks % size == 0
        if size and size % ranks and not repeats:
            raise ConfigError(
                f"generator.tensor_parallel={ranks}: must divide the model's {name}={size}"
            )


def check_tensor_parallel(model_path: str, ranks: int, *, section: str) -> None:
    """Raise ConfigError if the model in a directory cannot be split over that many ranks."""
    if ranks == 1:
        return
    config = read_model_config(model_path)
    said = f"{section}.tensor_parallel={ranks}"
    if config.model_type not in FAMILIES:
        raise ConfigError(
            f"{said}: splits models of type {', '.join(FAMILIES)}, not {config.model_type}"
        )
    for name in DIVIDED:
        if vars(config)[name] % ranks:
            raise ConfigError(f"{said}: must divide the model's {name}={vars(config)[name]}")


def is_served(shape: ModelShape, ranks: int) -> bool:
    """Whether `check_split_generator` lets a model of this shape be split over that many ranks."""
    has_heads = shape.kv_lora or not shape.kv_heads % ranks or not ranks % shape.kv_heads
    return bool(has_heads) and not (shape.heads % ranks or shape.intermediate % ranks)


def is_trained_in_parts(shape: ModelShape, ranks: int) -> bool:
    """Whether `check_tensor_parallel` lets a model of this shape be split over that many ranks.

    One of an unknown family may be.
    """
    sizes = (shape.heads, shape.kv_heads, shape.intermediate)
    return shape.family in ("", *FAMILIES) and not any(size % ranks for size in sizes)

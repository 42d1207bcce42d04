"""Parameters that LoRA trains (arXiv:2106.09685).

A linear layer from n to m features gets two matrices of rank r: r * (n + m) parameters. Layers have
the names that transformers gives them, as in trainer.lora_targets.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from streamrl.engines.models.model_shapes import ModelShape
from streamrl.errors import ConfigError


def add_adapter_params(
    shape: ModelShape, rank: int, targets: Sequence[str] = (), *, setting: str = "lora_targets"
) -> ModelShape:
    """Return a model shape with LoRA adapters of this rank and, if present, a trained scalar head.

    Rank 0 adds no adapters: the whole model is trained. `targets` are suffixes of layer names;
    empty means all layers but the head. Raise ConfigError, naming `setting`, for a target that
    matches no layer.
    """
    if not rank:
        return replace(shape, adapter_params=0)
    sizes = dict(iter_linear_layers(shape))
    for target in targets:
        if not any(is_lora_target(name, target) for name in sizes):
            raise ConfigError(f"{setting}: {target}: matches no linear layer of {shape.name}")
    target_sizes = [
        size
        for name, size in sizes.items()
        if not targets or any(is_lora_target(name, target) for target in targets)
    ]
    head = shape.hidden if shape.has_scalar_head else 0
    return replace(shape, adapter_params=rank * sum(target_sizes) + head)


def iter_linear_layers(shape: ModelShape) -> Iterator[tuple[str, int]]:
    """Yield name and in_features + out_features of every linear layer except the head."""
    hidden, wide = shape.hidden, shape.heads * shape.head_dim
    narrow = shape.kv_heads * shape.head_dim
    attention = {"q_proj": hidden + wide, "o_proj": wide + hidden}
    if shape.kv_latent_width:
        attention["kv_a_proj_with_mqa"] = hidden + shape.kv_latent_width
        attention["kv_b_proj"] = shape.kv_latent_width + 2 * wide
    else:
        attention |= {"k_proj": hidden + narrow, "v_proj": hidden + narrow}
    for layer in range(shape.layers):
        location = f"model.layers.{layer}"
        yield from ((f"{location}.self_attn.{name}", size) for name, size in attention.items())
        yield from (
            (f"{location}.mlp.{name}", size) for name, size in _iter_mlp_layers(shape, layer)
        )


def _iter_mlp_layers(shape: ModelShape, layer: int) -> Iterator[tuple[str, int]]:
    has_experts = bool(shape.experts) and layer >= shape.dense_layers
    width = shape.intermediate if has_experts else shape.dense_intermediate or shape.intermediate
    widths = {"": width}
    if has_experts:
        yield "gate", shape.hidden + shape.experts
        widths = {f"experts.{i}.": width for i in range(shape.experts)}
        # transformers builds the shared experts as a single MLP of their total width.
        widths |= {"shared_experts.": width * shape.shared_experts} if shape.shared_experts else {}
    for location, wide in widths.items():
        for name in ("gate_proj", "up_proj", "down_proj"):
            yield f"{location}{name}", shape.hidden + wide


def is_lora_target(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")

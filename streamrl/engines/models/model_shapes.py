"""Layers and widths of a model, by name or from a Hugging Face config."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from streamrl.errors import ConfigError
from streamrl.files.bounded_read import read_small_json, wrap_file_errors
from streamrl.files.typed_settings import Conflict, check_conflicts, suggest_nearest
from streamrl.resharding.tensor_specs import FusedComponent, ModelSpec, TensorSpec

BF16_BYTES = 2
MAX_LAYERS, MAX_SIZE = 10_000, 10_000_000
NON_TEXT_CONFIGS = ("vision_config", "audio_config")
"""Sections of a Hugging Face config for the vision and audio encoders of a multimodal model."""
TIED_EMBEDDING_FAMILIES = ("gemma", "gpt2")
"""Model families that tie embedding and head unless the Hugging Face config says otherwise."""
TEXT_ONLY_NOTE = "its language model alone: weights of other towers are not counted"


@dataclass(frozen=True)
class ModelShape:
    """Decoder-only transformer with gated MLPs and grouped-query attention.

    intermediate: MLP width; with `experts`, width of an expert.
    experts_per_token: routed experts per token.
    shared_experts: experts that process every token.
    dense_layers: leading layers with one MLP of `dense_intermediate` instead of experts.
    kv_latent_width: width of a token's compressed keys and values per layer (DeepSeek's MLA); 0
      without compression.
    has_qkv_bias: whether the query, key and value projections have a bias.
    has_scalar_head: a critic's or reward model's head replaces the vocabulary head.
    adapter_params: trained adapter parameters; 0 trains the model's own parameters.
    family: model_type of the Hugging Face config.
    architectures: as in the Hugging Face config; None for an entry of `MODEL_SHAPES`.
    """

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocab: int
    head_dim: int
    has_tied_embeddings: bool = False
    has_qkv_bias: bool = False
    experts: int = 0
    experts_per_token: int = 0
    shared_experts: int = 0
    dense_layers: int = 0
    dense_intermediate: int = 0
    kv_latent_width: int = 0
    has_scalar_head: bool = False
    adapter_params: int = 0
    family: str = ""
    architectures: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        sizes = ("layers", "hidden", "intermediate", "heads", "kv_heads", "vocab", "head_dim")
        experts, active = self.experts, self.experts_per_token
        kv_heads, layers = max(1, self.kv_heads), self.layers
        conflicts: list[Conflict] = [
            *((vars(self)[key] < 1, key, "must be at least 1") for key in sizes),
            (layers > MAX_LAYERS, "layers", f"must be at most {MAX_LAYERS}"),
            (self.heads % kv_heads, "heads", f"must be a multiple of the {kv_heads} kv_heads"),
        ]
        if experts:
            is_bad, rule = self.dense_layers > layers, f"must be at most the {layers} layers"
            conflicts.append((is_bad, "dense_layers", rule))
            rule = f"must be from 1 to the {experts} experts"
            conflicts.append((not 1 <= active <= experts, "experts_per_token", rule))
        check_conflicts(self, conflicts, f"model {self.name}: ")

    @property
    def moe_layers(self) -> int:
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def expert_params(self) -> int:
        return 3 * self.hidden * self.intermediate

    @property
    def token_mlp_width(self) -> int:
        """Width of a token's MLP in most layers: of all experts that it passes through."""
        experts = self.experts_per_token + self.shared_experts
        return self.intermediate * (experts if self.experts else 1)

    @property
    def routed_params(self) -> int:
        return self.moe_layers * self.experts * self.expert_params

    @property
    def embedding_params(self) -> int:
        head = self.hidden if self.has_scalar_head else self.vocab * self.hidden
        return self.vocab * self.hidden + (0 if self.has_tied_head else head)

    @property
    def has_tied_head(self) -> bool:
        return self.has_tied_embeddings and not self.has_scalar_head

    @property
    def num_params(self) -> int:
        return _count_params(self)

    @property
    def trained_fraction(self) -> float:
        return self.adapter_params / self.num_params if self.adapter_params else 1.0

    @property
    def active_matmul_params(self) -> int:
        """Number of parameters that one token is multiplied with: active experts, no embedding."""
        inactive = self.moe_layers * (self.experts - self.experts_per_token) * self.expert_params
        norms = (2 * self.layers + 1) * self.hidden
        embedding = 0 if self.has_tied_head else self.vocab * self.hidden
        return self.num_params - inactive - norms - embedding

    def count_kv_bytes_per_token(self, itemsize: int = BF16_BYTES) -> int:
        """Return the KV-cache bytes of one token over all layers; `itemsize` is bytes per value."""
        if self.kv_latent_width:
            return self.layers * self.kv_latent_width * itemsize
        return 2 * self.layers * self.kv_heads * self.head_dim * itemsize

    def to_critic(self) -> "ModelShape":
        return replace(self, has_scalar_head=True, has_tied_embeddings=False)

    def to_model_spec(self, itemsize: int = BF16_BYTES) -> ModelSpec:
        """Return every tensor of the model and the dimension that tensor parallelism splits.

        itemsize: bytes per value.

        Query, key and value are one tensor; so are gate and up, and the experts of a layer.
        """
        last = self.layers + 1
        shape = (self.vocab, self.hidden)
        tensors = [TensorSpec("embedding", shape, (0, last) if self.has_tied_head else (0,), 0)]
        for layer in range(self.layers):
            tensors += self._make_layer_specs(layer)
        tensors.append(TensorSpec("norm", (self.hidden,), (last,)))
        if self.has_scalar_head:
            tensors.append(TensorSpec("score", (1, self.hidden), (last,)))
        elif not self.has_tied_embeddings:
            tensors.append(TensorSpec("head", shape, (last,), 0))
        sized = tuple(replace(tensor, itemsize=itemsize) for tensor in tensors)
        return ModelSpec(sized, self.layers + 2)

    def _make_layer_specs(self, layer: int) -> list[TensorSpec]:
        wide, narrow = self.heads * self.head_dim, self.kv_heads * self.head_dim
        positions, name = (layer + 1,), f"layer.{layer}"
        tensors = [TensorSpec(f"{name}.norms", (2, self.hidden), positions)]
        if latent := self.kv_latent_width:
            tensors += [
                TensorSpec(f"{name}.q", (wide, self.hidden), positions, 0),
                TensorSpec(f"{name}.kv_down", (latent, self.hidden), positions),
                TensorSpec(f"{name}.kv_up", (2 * wide, latent), positions, 0),
            ]
        else:
            kv = FusedComponent(narrow, self.kv_heads)
            parts, rows = (FusedComponent(wide, self.heads), kv, kv), wide + 2 * narrow
            tensors.append(TensorSpec(f"{name}.qkv", (rows, self.hidden), positions, 0, parts))
            if self.has_qkv_bias:
                tensors.append(TensorSpec(f"{name}.qkv_bias", (rows,), positions, 0, parts))
        tensors.append(TensorSpec(f"{name}.o", (self.hidden, wide), positions, 1))
        return tensors + self._make_mlp_specs(layer)

    def _make_mlp_specs(self, layer: int) -> list[TensorSpec]:
        positions, name = (layer + 1,), f"layer.{layer}"
        has_experts = bool(self.experts) and layer >= self.dense_layers
        width = self.intermediate if has_experts else self.dense_intermediate or self.intermediate
        tensors = []
        copies = self.experts + self.shared_experts if has_experts else 1
        if has_experts:
            tensors.append(TensorSpec(f"{name}.router", (self.experts, self.hidden), positions))
        parts = (FusedComponent(width), FusedComponent(width))
        up, down = (copies, 2 * width, self.hidden), (copies, self.hidden, width)
        tensors.append(TensorSpec(f"{name}.gate_up", up, positions, 1, parts))
        tensors.append(TensorSpec(f"{name}.down", down, positions, 2))
        return tensors


@cache
def _count_params(shape: ModelShape) -> int:
    return shape.to_model_spec(itemsize=1).num_bytes


def _make_shape(
    name: str,
    *sizes: int,
    head_dim: int | None = None,
    is_tied: bool = False,
    experts: int = 0,
    experts_per_token: int = 0,
) -> ModelShape:
    """Make a model of a known family; sizes: layers, hidden, MLP, heads, KV heads, vocabulary."""
    layers, hidden, intermediate, heads, kv_heads, vocab = sizes
    prefix = next(prefix for prefix in FAMILIES if name.startswith(prefix))
    is_qwen_mixture = prefix.startswith("qwen") and experts
    return ModelShape(
        name,
        *(layers, hidden, intermediate, heads, kv_heads, vocab, head_dim or hidden // heads),
        has_tied_embeddings=is_tied or prefix.startswith("gemma"),
        has_qkv_bias=prefix in ("qwen2", "gpt-oss"),
        experts=experts,
        experts_per_token=experts_per_token,
        family=FAMILIES[prefix] + "_moe" * bool(is_qwen_mixture),
    )


FAMILIES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "gpt-oss": "gpt_oss",
}
"""model_type by the beginning of a name in `MODEL_SHAPES`."""


_GPT_OSS: dict[str, Any] = {"head_dim": 64, "experts_per_token": 4}
_QWEN3_MOE: dict[str, Any] = {"head_dim": 128, "experts": 128, "experts_per_token": 8}
MODEL_SHAPES = {
    shape.name: shape
    for shape in (
        _make_shape("llama-7b", 32, 4096, 11008, 32, 32, 32000),
        _make_shape("llama-13b", 40, 5120, 13824, 40, 40, 32000),
        # Llama 2 has no published 34B; the sizes are CodeLlama's.
        _make_shape("llama-34b", 48, 8192, 22016, 64, 8, 32000),
        _make_shape("llama-33b", 60, 6656, 17920, 52, 52, 32000),
        _make_shape("llama-65b", 80, 8192, 22016, 64, 64, 32000),
        _make_shape("llama-70b", 80, 8192, 28672, 64, 8, 32000),
        _make_shape("llama3-8b", 32, 4096, 14336, 32, 8, 128256),
        _make_shape("llama3-70b", 80, 8192, 28672, 64, 8, 128256),
        _make_shape("llama3.1-8b", 32, 4096, 14336, 32, 8, 128256),
        _make_shape("llama3.1-70b", 80, 8192, 28672, 64, 8, 128256),
        _make_shape("llama3.2-1b", 16, 2048, 8192, 32, 8, 128256, is_tied=True),
        _make_shape("llama3.2-3b", 28, 3072, 8192, 24, 8, 128256, is_tied=True),
        _make_shape("qwen2.5-0.5b", 24, 896, 4864, 14, 2, 151936, is_tied=True),
        _make_shape("qwen2.5-1.5b", 28, 1536, 8960, 12, 2, 151936, is_tied=True),
        _make_shape("qwen2.5-3b", 36, 2048, 11008, 16, 2, 151936, is_tied=True),
        _make_shape("qwen2.5-7b", 28, 3584, 18944, 28, 4, 152064),
        _make_shape("qwen2.5-14b", 48, 5120, 13824, 40, 8, 152064),
        _make_shape("qwen2.5-32b", 64, 5120, 27648, 40, 8, 152064),
        _make_shape("qwen2.5-72b", 80, 8192, 29568, 64, 8, 152064),
        _make_shape("qwen3-0.6b", 28, 1024, 3072, 16, 8, 151936, head_dim=128, is_tied=True),
        _make_shape("qwen3-1.7b", 28, 2048, 6144, 16, 8, 151936, head_dim=128, is_tied=True),
        _make_shape("qwen3-4b", 36, 2560, 9728, 32, 8, 151936, head_dim=128, is_tied=True),
        _make_shape("qwen3-8b", 36, 4096, 12288, 32, 8, 151936, head_dim=128),
        _make_shape("qwen3-14b", 40, 5120, 17408, 40, 8, 151936, head_dim=128),
        _make_shape("qwen3-32b", 64, 5120, 25600, 64, 8, 151936, head_dim=128),
        _make_shape("qwen3-30b-a3b", 48, 2048, 768, 32, 4, 151936, **_QWEN3_MOE),
        _make_shape("qwen3-235b-a22b", 94, 4096, 1536, 64, 4, 151936, **_QWEN3_MOE),
        _make_shape("gemma2-9b", 42, 3584, 14336, 16, 8, 256000, head_dim=256),
        _make_shape("gemma2-27b", 46, 4608, 36864, 32, 16, 256000, head_dim=128),
        _make_shape("gemma3-1b", 26, 1152, 6912, 4, 1, 262144, head_dim=256),
        _make_shape("gemma3-4b", 34, 2560, 10240, 8, 4, 262208, head_dim=256),
        _make_shape("gemma3-12b", 48, 3840, 15360, 16, 8, 262208, head_dim=256),
        _make_shape("gemma3-27b", 62, 5376, 21504, 32, 16, 262208, head_dim=128),
        _make_shape("gpt-oss-20b", 24, 2880, 2880, 64, 8, 201088, experts=32, **_GPT_OSS),
        _make_shape("gpt-oss-120b", 36, 2880, 2880, 64, 8, 201088, experts=128, **_GPT_OSS),
        ModelShape(
            "deepseek-v3",
            *(61, 7168, 2048, 128, 128, 129280, 128),
            experts=256,
            experts_per_token=8,
            shared_experts=1,
            dense_layers=3,
            dense_intermediate=18432,
            kv_latent_width=576,
            family="deepseek_v3",
        ),
    )
}
"""Published sizes of well-known models, by name."""


def load_model_shape(model: str) -> ModelShape:
    """Return a model's shape by name in `MODEL_SHAPES`, or by path of a Hugging Face model.

    A path is that of a model directory or its config.json. Raise ConfigError that suggests the
    nearest name.
    """
    if model.lower() in MODEL_SHAPES:
        return MODEL_SHAPES[model.lower()]
    path = Path(model)
    if os.path.isdir(path):
        path /= "config.json"
    if not os.path.isfile(path):
        raise ConfigError(
            f"model {model}: neither a known model name nor a model directory;"
            f" {suggest_nearest(model, MODEL_SHAPES, 'model')}"
        )
    with wrap_file_errors(f"model {path}"):
        config = read_small_json(path)
    if not isinstance(config, dict):
        raise ConfigError(f"model {path}: must be a JSON object")
    return _from_huggingface(config, str(path))


def _from_huggingface(config: Mapping[str, Any], location: str) -> ModelShape:
    """Convert a Hugging Face config; of a multimodal one, only the language model."""
    name = Path(location).parent.name
    hint = "; a config.json with a language model's sizes would do"
    text, architectures = config.get("text_config"), config.get("architectures")
    if isinstance(text, Mapping):
        config, location = {**config, **text}, f"{location}: text_config"
    if any(isinstance(config.get(key), Mapping) for key in ("text_config", *NON_TEXT_CONFIGS)):
        name = f"{name} ({TEXT_ONLY_NOTE})"

    def number(*names: str, default: int | None = None) -> int:
        """Return the first of these keys that the config has, as an integer. Raise ConfigError."""
        for key in names:
            value = config.get(key)
            if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_SIZE:
                return value
            if value is not None:
                raise ConfigError(
                    f"model {location}: {key}={value!r:.40}: must be a whole number"
                    f" up to {MAX_SIZE}"
                )
        if default is None:
            raise ConfigError(f"model {location}: {names[0]} is missing{hint}")
        return default

    family = str(config.get("model_type"))
    hidden, heads = number("hidden_size", "n_embd"), number("num_attention_heads", "n_head")
    experts = number("num_experts", "num_local_experts", "n_routed_experts", default=0)
    intermediate = number("intermediate_size", "n_inner", default=4 * hidden)
    expert_intermediate = number("moe_intermediate_size", default=intermediate)
    # Qwen2-MoE has a shared expert of a width of its own.
    shared_width = number("shared_expert_intermediate_size", default=0)
    return ModelShape(
        name,
        number("num_hidden_layers", "n_layer"),
        hidden,
        expert_intermediate if experts else intermediate,
        heads,
        number("num_key_value_heads", default=heads),
        number("vocab_size"),
        number("head_dim", default=hidden // max(1, heads)),
        has_tied_embeddings=bool(
            config.get("tie_word_embeddings", family.startswith(TIED_EMBEDDING_FAMILIES))
        ),
        has_qkv_bias=bool(config.get("attention_bias", family.startswith("qwen2"))),
        experts=experts,
        experts_per_token=number("num_experts_per_tok", default=min(experts, 1)),
        shared_experts=number("n_shared_experts", default=-(-shared_width // expert_intermediate)),
        dense_layers=number("first_k_dense_replace", default=0),
        dense_intermediate=intermediate if experts else 0,
        kv_latent_width=number("kv_lora_rank", default=0) + number("qk_rope_head_dim", default=0),
        family=family,
        architectures=tuple(map(str, architectures)) if isinstance(architectures, list) else (),
    )


def add_adapter_params(shape: ModelShape, rank: int) -> ModelShape:
    """Return a model shape with LoRA adapters of this rank and, if present, a trained scalar head.

    Rank 0 adds no adapters: the whole model is trained.
    """
    head = shape.hidden if shape.has_scalar_head and rank else 0
    return replace(shape, adapter_params=rank * _sum_linear_sizes(shape) + head)


def _sum_linear_sizes(shape: ModelShape) -> int:
    """Return in_features + out_features, summed over all linear layers except the head."""
    hidden, wide, experts = shape.hidden, shape.heads * shape.head_dim, shape.experts
    attention = 2 * (hidden + wide)  # queries and outputs
    if shape.kv_latent_width:
        attention += hidden + shape.kv_latent_width + shape.kv_latent_width + 2 * wide
    else:
        attention += 2 * (hidden + shape.kv_heads * shape.head_dim)

    def sum_mlp(width: int) -> int:
        return 3 * (hidden + width)  # gate, up and down

    plain = sum_mlp(shape.dense_intermediate or shape.intermediate)
    mixture = hidden + experts + experts * sum_mlp(shape.intermediate)
    if shape.shared_experts:
        # transformers builds the shared experts as a single MLP of their total width.
        mixture += sum_mlp(shape.intermediate * shape.shared_experts)
    plain_layers = shape.layers - shape.moe_layers
    return shape.layers * attention + plain_layers * plain + shape.moe_layers * mixture

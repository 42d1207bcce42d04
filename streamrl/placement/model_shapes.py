"""How large a model is: its layers and widths, by name or from a Hugging Face config."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from streamrl.errors import ConfigError
from streamrl.files.bounded_read import read_small_json
from streamrl.files.typed_settings import describe_read_error, suggest_nearest
from streamrl.resharding import FusedComponent, ModelSpec, TensorSpec

BF16_BYTES = 2
MAX_LAYERS, MAX_SIZE = 10_000, 10_000_000
NON_TEXT_CONFIGS = ("vision_config", "audio_config")
"""What a model has beside its language model, in a Hugging Face config."""
TIED_EMBEDDING_FAMILIES = ("gemma", "gpt2")
"""Families whose embedding is the head, too, unless a Hugging Face config says it is not."""
TEXT_ONLY_NOTE = "its language model alone: weights of other towers are not counted"


@dataclass(frozen=True)
class ModelShape:
    """A decoder-only transformer with gated MLPs and grouped-query attention.

    intermediate: width of an MLP; of one expert where there are `experts`, of which each token
    passes `experts_per_token`. dense_layers: layers at the front that have one MLP of
    `dense_intermediate` instead of experts. shared_experts: that every token passes besides.
    kv_lora: width of a token's compressed keys and values in a layer (DeepSeek's MLA); 0 for none.
    qkv_bias: whether query, key and value have one. scalar_head: a critic's or a reward model's
    head in place of the vocabulary's. trained: parameters of adapters that are trained in place of
    the model's own; 0 where these are. family: as model_type in a Hugging Face config.
    architectures: as there; None of a size that is no model.
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
        for key in ("layers", "hidden", "intermediate", "heads", "kv_heads", "vocab", "head_dim"):
            if vars(self)[key] < 1:
                raise ConfigError(f"model {self.name}: {key}={vars(self)[key]}: must be at least 1")
        if self.layers > MAX_LAYERS:
            raise ConfigError(
                f"model {self.name}: layers={self.layers}: must be at most {MAX_LAYERS}"
            )
        if self.experts and self.dense_layers > self.layers:
            raise ConfigError(
                f"model {self.name}: dense_layers={self.dense_layers}: must be at most the"
                f" {self.layers} layers"
            )
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"model {self.name}: {self.heads} heads do not share {self.kv_heads} kv_heads"
            )
        if self.experts and not 1 <= self.experts_per_token <= self.experts:
            raise ConfigError(
                f"model {self.name}: experts_per_token={self.experts_per_token}: must be from 1 to"
                f" the {self.experts} experts"
            )

    @property
    def attention_params(self) -> int:
        """Parameters of one layer's attention."""
        wide = self.heads * self.head_dim
        if self.kv_latent_width:
            # Down to the compressed width and up again, for keys and for values.
            up = self.kv_latent_width * 2 * wide
            return self.hidden * (2 * wide + self.kv_latent_width) + up
        narrow = self.kv_heads * self.head_dim
        bias = wide + 2 * narrow if self.has_qkv_bias else 0
        return self.hidden * (2 * wide + 2 * narrow) + bias

    @property
    def moe_layers(self) -> int:
        """Layers with experts."""
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def expert_params(self) -> int:
        """Parameters of one expert."""
        return 3 * self.hidden * self.intermediate

    @property
    def routed_params(self) -> int:
        """Parameters of the experts of all layers that tokens pass by choice."""
        return self.moe_layers * self.experts * self.expert_params

    def _mlp_params(self, experts: int) -> int:
        """Parameters of the MLPs of all layers, with so many experts counted in each."""
        plain = self.layers - self.moe_layers
        width = self.dense_intermediate or self.intermediate
        own = self.expert_params * (experts + self.shared_experts)
        router = self.hidden * self.experts
        return plain * 3 * self.hidden * width + self.moe_layers * (own + router)

    @property
    def embedding_params(self) -> int:
        """Parameters of embedding and head together, each once."""
        head = self.hidden if self.has_scalar_head else self.vocab * self.hidden
        tied = self.has_tied_embeddings and not self.has_scalar_head
        return self.vocab * self.hidden + (0 if tied else head)

    @property
    def num_params(self) -> int:
        """All parameters."""
        norms = (2 * self.layers + 1) * self.hidden
        return (
            self.layers * self.attention_params
            + self._mlp_params(self.experts)
            + self.embedding_params
            + norms
        )

    @property
    def trained_fraction(self) -> float:
        """What is trained, as a part of all parameters."""
        return self.adapter_params / self.num_params if self.adapter_params else 1.0

    @property
    def active_matmul_params(self) -> int:
        """Parameters that a token is multiplied with: its experts, and no embedding."""
        head = self.hidden if self.has_scalar_head else self.vocab * self.hidden
        return self.layers * self.attention_params + self._mlp_params(self.experts_per_token) + head

    def kv_bytes_per_token(self, itemsize: int = BF16_BYTES) -> int:
        """Bytes of keys and values of one token in all layers."""
        if self.kv_latent_width:
            return self.layers * self.kv_latent_width * itemsize
        return 2 * self.layers * self.kv_heads * self.head_dim * itemsize

    def to_critic(self) -> "ModelShape":
        """The same with a scalar head."""
        return replace(self, has_scalar_head=True, has_tied_embeddings=False)

    def to_model_spec(self, itemsize: int = BF16_BYTES) -> ModelSpec:
        """What resharding has to move: every tensor, and how tensor parallelism splits it.

        Query, key and value are one tensor, as are gate and up, and the experts of a layer.
        """
        wide, narrow = self.heads * self.head_dim, self.kv_heads * self.head_dim
        found = [self._embedding_spec(itemsize)]
        for layer in range(self.layers):
            found += self._layer_specs(layer, wide, narrow, itemsize)
        last = self.layers + 1
        found.append(TensorSpec("norm", (self.hidden,), (last,), itemsize=itemsize))
        if self.has_scalar_head:
            found.append(TensorSpec("score", (1, self.hidden), (last,), itemsize=itemsize))
        elif not self.has_tied_embeddings:
            shape = (self.vocab, self.hidden)
            found.append(TensorSpec("head", shape, (last,), 0, itemsize=itemsize))
        return ModelSpec(tuple(found), self.layers + 2)

    def _embedding_spec(self, itemsize: int) -> TensorSpec:
        places = (
            (0, self.layers + 1) if self.has_tied_embeddings and not self.has_scalar_head else (0,)
        )
        return TensorSpec("embedding", (self.vocab, self.hidden), places, 0, itemsize=itemsize)

    def _layer_specs(self, layer: int, wide: int, narrow: int, itemsize: int) -> list[TensorSpec]:
        at, name = (layer + 1,), f"layer.{layer}"
        whole = (self.hidden,)
        found = [TensorSpec(f"{name}.norms", (2, *whole), at, itemsize=itemsize)]
        if self.kv_latent_width:
            found += [
                TensorSpec(f"{name}.q", (wide, self.hidden), at, 0, itemsize=itemsize),
                TensorSpec(
                    f"{name}.kv_down", (self.kv_latent_width, self.hidden), at, itemsize=itemsize
                ),
                TensorSpec(
                    f"{name}.kv_up", (2 * wide, self.kv_latent_width), at, 0, itemsize=itemsize
                ),
            ]
        else:
            parts = (
                FusedComponent(wide, self.heads),
                FusedComponent(narrow, self.kv_heads),
                FusedComponent(narrow, self.kv_heads),
            )
            rows = wide + 2 * narrow
            shape = (rows, self.hidden)
            found.append(TensorSpec(f"{name}.qkv", shape, at, 0, parts, itemsize))
            if self.has_qkv_bias:
                found.append(TensorSpec(f"{name}.qkv_bias", (rows,), at, 0, parts, itemsize))
        found.append(TensorSpec(f"{name}.o", (self.hidden, wide), at, 1, itemsize=itemsize))
        return found + self._mlp_specs(layer, itemsize)

    def _mlp_specs(self, layer: int, itemsize: int) -> list[TensorSpec]:
        at, name = (layer + 1,), f"layer.{layer}"
        has_experts = bool(self.experts) and layer >= self.dense_layers
        width = self.intermediate if has_experts else self.dense_intermediate or self.intermediate
        found = []
        copies = self.experts + self.shared_experts if has_experts else 1
        if has_experts:
            shape = (self.experts, self.hidden)
            found.append(TensorSpec(f"{name}.router", shape, at, itemsize=itemsize))
        parts = (FusedComponent(width), FusedComponent(width))
        up, down = (copies, 2 * width, self.hidden), (copies, self.hidden, width)
        found.append(TensorSpec(f"{name}.gate_up", up, at, 1, parts, itemsize))
        found.append(TensorSpec(f"{name}.down", down, at, 2, itemsize=itemsize))
        return found


def _make_llama(
    name: str, layers: int, hidden: int, intermediate: int, heads: int, **more: int
) -> ModelShape:
    kv_heads = more.get("kv_heads", heads)
    vocab, head_dim = more.get("vocab", 32000), hidden // heads
    sizes = (layers, hidden, intermediate, heads, kv_heads, vocab, head_dim)
    return ModelShape(name, *sizes, family="llama")


def _make_qwen(
    name: str, layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int, **more: int
) -> ModelShape:
    return ModelShape(
        name,
        layers,
        hidden,
        intermediate,
        heads,
        kv_heads,
        more.get("vocab", 152064),
        more.get("head_dim", hidden // heads),
        has_tied_embeddings=bool(more.get("tied", 0)),
        has_qkv_bias=bool(more.get("bias", 1)),
        experts=more.get("experts", 0),
        experts_per_token=more.get("active", 0),
        family=name.split("-")[0].split(".")[0] + ("_moe" if more.get("experts") else ""),
    )


MODEL_SHAPES = {
    shape.name: shape
    for shape in (
        _make_llama("llama-7b", 32, 4096, 11008, 32),
        _make_llama("llama-13b", 40, 5120, 13824, 40),
        # Llama 2 has no 34B of its own: this is CodeLlama's.
        _make_llama("llama-34b", 48, 8192, 22016, 64, kv_heads=8),
        _make_llama("llama-33b", 60, 6656, 17920, 52),
        _make_llama("llama-65b", 80, 8192, 22016, 64),
        _make_llama("llama-70b", 80, 8192, 28672, 64, kv_heads=8),
        _make_llama("llama3-8b", 32, 4096, 14336, 32, kv_heads=8, vocab=128256),
        _make_llama("llama3-70b", 80, 8192, 28672, 64, kv_heads=8, vocab=128256),
        _make_qwen("qwen2.5-0.5b", 24, 896, 4864, 14, 2, vocab=151936, tied=1),
        _make_qwen("qwen2.5-1.5b", 28, 1536, 8960, 12, 2, vocab=151936, tied=1),
        _make_qwen("qwen2.5-3b", 36, 2048, 11008, 16, 2, vocab=151936, tied=1),
        _make_qwen("qwen2.5-7b", 28, 3584, 18944, 28, 4),
        _make_qwen("qwen2.5-14b", 48, 5120, 13824, 40, 8),
        _make_qwen("qwen2.5-32b", 64, 5120, 27648, 40, 8),
        _make_qwen("qwen2.5-72b", 80, 8192, 29568, 64, 8),
        _make_qwen("qwen3-4b", 36, 2560, 9728, 32, 8, vocab=151936, head_dim=128, tied=1, bias=0),
        _make_qwen("qwen3-8b", 36, 4096, 12288, 32, 8, vocab=151936, head_dim=128, bias=0),
        _make_qwen("qwen3-32b", 64, 5120, 25600, 64, 8, vocab=151936, head_dim=128, bias=0),
        _make_qwen(
            "qwen3-30b-a3b",
            *(48, 2048, 768, 32, 4),
            **{"vocab": 151936, "head_dim": 128, "bias": 0, "experts": 128, "active": 8},
        ),
        _make_qwen(
            "qwen3-235b-a22b",
            *(94, 4096, 1536, 64, 4),
            **{"vocab": 151936, "head_dim": 128, "bias": 0, "experts": 128, "active": 8},
        ),
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
"""Published sizes."""


def load_model_shape(model: str) -> ModelShape:
    """The shape of a name of SHAPES, or of a Hugging Face model directory or its config.json.

    Raises ConfigError with the nearest name.
    """
    if model.lower() in MODEL_SHAPES:
        return MODEL_SHAPES[model.lower()]
    path = Path(model)
    if os.path.isdir(path):
        path /= "config.json"
    if not os.path.isfile(path):
        raise ConfigError(
            f"model {model}: no size of that name, and no model directory;"
            f" {suggest_nearest(model, MODEL_SHAPES)}"
        )
    try:
        found = read_small_json(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model {path}: {describe_read_error(error)}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"model {path}: must be a JSON object")
    return _from_huggingface(found, str(path))


def _from_huggingface(found: Mapping[str, Any], place: str) -> ModelShape:
    """Of the language model alone, if there is more: sizes are then under text_config."""
    name, hint = Path(place).parent.name, "; a config.json with a language model's sizes would do"
    text, architectures = found.get("text_config"), found.get("architectures")
    if isinstance(text, Mapping):
        found, place = {**found, **text}, f"{place}: text_config"
    if any(isinstance(found.get(key), Mapping) for key in ("text_config", *NON_TEXT_CONFIGS)):
        name = f"{name} ({TEXT_ONLY_NOTE})"

    def number(*names: str, default: int | None = None) -> int:
        for key in names:
            value = found.get(key)
            if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_SIZE:
                return value
            if value is not None:
                raise ConfigError(
                    f"model {place}: {key}={value!r:.40}: must be a whole number up to {MAX_SIZE}"
                )
        if default is None:
            raise ConfigError(f"model {place}: {names[0]} is missing{hint}")
        return default

    family = str(found.get("model_type"))
    hidden, heads = number("hidden_size", "n_embd"), number("num_attention_heads", "n_head")
    experts = number("num_experts", "num_local_experts", "n_routed_experts", default=0)
    intermediate = number("intermediate_size", "n_inner", default=4 * hidden)
    return ModelShape(
        name,
        number("num_hidden_layers", "n_layer"),
        hidden,
        number("moe_intermediate_size", default=intermediate) if experts else intermediate,
        heads,
        number("num_key_value_heads", default=heads),
        number("vocab_size"),
        number("head_dim", default=hidden // max(1, heads)),
        has_tied_embeddings=bool(
            found.get("tie_word_embeddings", family.startswith(TIED_EMBEDDING_FAMILIES))
        ),
        has_qkv_bias=bool(found.get("attention_bias", family.startswith("qwen2"))),
        experts=experts,
        experts_per_token=number("num_experts_per_tok", default=min(experts, 1)),
        shared_experts=number("n_shared_experts", default=0),
        dense_layers=number("first_k_dense_replace", default=0),
        dense_intermediate=intermediate if experts else 0,
        kv_latent_width=number("kv_lora_rank", default=0) + number("qk_rope_head_dim", default=0),
        family=family,
        architectures=tuple(map(str, architectures)) if isinstance(architectures, list) else (),
    )

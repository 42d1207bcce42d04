"""How many parameters a model has, and how many are trained, by its config alone.

Only of families whose layers are known here. To build any other without weights takes the classes
of all models, which is two seconds of a process that has no model.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from streamrl.engines.lora_names import is_meant
from streamrl.engines.split_models import FAMILIES
from streamrl.engines.trainer_config import TrainerConfig
from streamrl.model_config import read_model_config


@dataclass(frozen=True)
class Outline:
    """A model by its sizes.

    linear: features of the linear layers but heads, in and out, by name. biases, others: elements
    of their biases, and of all else but the value head. value_head: elements of that.
    """

    linear: Mapping[str, tuple[int, int]]
    biases: int
    others: int
    value_head: int

    def num_trained(self, config: TrainerConfig) -> int:
        """Elements that are trained, each of them once: all, or adapters and a value head."""
        if not config.lora_rank:
            matrices = sum(given * made for given, made in self.linear.values())
            return matrices + self.biases + self.others + self.value_head
        targets = config.lora_targets or list(self.linear)
        meant = [name for name in self.linear if any(is_meant(name, t) for t in targets)]
        return config.lora_rank * sum(sum(self.linear[name]) for name in meant) + self.value_head


def read_outline(model_path: str, *, has_output: bool, has_value: bool) -> Outline | None:
    """The model in a directory with an output head, a value head, or both; None of others."""
    config = read_model_config(model_path)
    if config.model_type not in FAMILIES:
        return None
    known = vars(config)
    hidden, layers = known["hidden_size"], known["num_hidden_layers"]
    one = _layer(known)
    biased = _biased(config.model_type, known)
    embedding = known["vocab_size"] * hidden
    has_own = has_output and not config.tie_word_embeddings
    return Outline(
        linear={
            f"model.layers.{i}.{name}": size for i in range(layers) for name, size in one.items()
        },
        biases=layers * sum(made for name, (_, made) in one.items() if name in biased),
        # Two norms in each layer, and one behind the last.
        others=embedding * (1 + has_own) + (2 * layers + 1) * hidden,
        value_head=(hidden + 1) * has_value,
    )


def _layer(known: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Features of the linear layers of one of the model's layers, in and out."""
    hidden, inner, heads = (
        known[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads")
    )
    head = known.get("head_dim") or hidden // heads
    wide, narrow = heads * head, known["num_key_value_heads"] * head
    return {
        "self_attn.q_proj": (hidden, wide),
        "self_attn.k_proj": (hidden, narrow),
        "self_attn.v_proj": (hidden, narrow),
        "self_attn.o_proj": (wide, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }


def _biased(family: str, known: Mapping[str, Any]) -> set[str]:
    """Which of these have a bias."""
    attention = {f"self_attn.{name}_proj" for name in "qkv"}
    if family == "qwen2":
        return attention
    found = attention | {"self_attn.o_proj"} if known.get("attention_bias") else set()
    mlp = {f"mlp.{name}_proj" for name in ("gate", "up", "down")}
    return found | mlp if known.get("mlp_bias") else found

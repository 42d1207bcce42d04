"""Parameter counts from config.json equal those of the built models."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from streamrl.engines.models.forward import add_value_head, load_skeleton, load_value_skeleton
from streamrl.engines.models.lora import count_trained_params
from streamrl.engines.models.model_shapes import count_trained_params_from_config
from streamrl.engines.trainer_config import TrainerConfig

SIZES = {
    "vocab_size": 50,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {"model_type": "qwen2"},
    "qwen2 of wide heads": {"model_type": "qwen2", "head_dim": 8},
    "mistral": {"model_type": "mistral"},
    "mistral of narrow heads": {"model_type": "mistral", "head_dim": 4},
    "llama": {"model_type": "llama"},
}
TRAINERS = (
    TrainerConfig(),
    TrainerConfig(lora_rank=4),
    TrainerConfig(lora_rank=2, lora_targets=["q_proj", "layers.1.mlp.down_proj"]),
)


def write(folder: Path, model: dict[str, Any]) -> str:
    (folder / "config.json").write_text(json.dumps({**SIZES, **model}))
    return str(folder)


def count(
    path: str, config: TrainerConfig, *, has_output: bool = True, has_value: bool = False
) -> int | None:
    return count_trained_params_from_config(
        path, config, has_output=has_output, has_value=has_value
    )


@pytest.mark.parametrize(("model", "tied"), product(MODELS, (False, True)))
def test_the_count_from_config_equals_the_built_models(tmp_path: Path, model: str, tied: bool):
    path = write(tmp_path, {**MODELS[model], "tie_word_embeddings": tied})
    policy, two_headed, critic = load_skeleton(path), load_skeleton(path), load_value_skeleton(path)
    add_value_head(two_headed, dtype=two_headed.dtype)
    for config in TRAINERS:
        for module, has_output, has_value in (
            (policy, True, False),
            (two_headed, True, True),
            (critic, False, True),
        ):
            counted = count(path, config, has_output=has_output, has_value=has_value)
            assert counted == count_trained_params(module, config)


@pytest.mark.parametrize(
    "model",
    [
        {"model_type": "qwen3"},
        {"model_type": "llama", "attention_bias": True},
        {"model_type": "llama", "hidden_size": None},
    ],
)
def test_unsupported_families_have_no_count(tmp_path: Path, model: dict[str, Any]):
    assert count(write(tmp_path, model), TrainerConfig()) is None

"""Trained LoRA parameters, by hand and as the engine counts them."""

from pathlib import Path

import pytest

from streamrl.engines.models.forward import load_skeleton, load_value_skeleton
from streamrl.engines.models.lora import count_trained_params
from streamrl.engines.models.model_shapes import MODEL_SHAPES, add_adapter_params, load_model_shape
from streamrl.engines.trainer_config import TrainerConfig
from streamrl.errors import ConfigError
from tests.toy import write_model


def test_adapters_add_two_matrices_per_layer():
    llama = MODEL_SHAPES["llama-7b"]
    # Query and value projections of 32 layers, 4096 features in and out.
    expected = 8 * 32 * 2 * (4096 + 4096)
    assert add_adapter_params(llama, 8, ["q_proj", "v_proj"]).adapter_params == expected
    attention, mlp = 4 * (4096 + 4096), 3 * (4096 + 11008)
    assert add_adapter_params(llama, 16).adapter_params == 16 * 32 * (attention + mlp)
    assert add_adapter_params(llama, 16, ["layers.0.mlp.up_proj"]).adapter_params == 16 * (
        4096 + 11008
    )
    # A critic's head is trained as a whole.
    assert (
        add_adapter_params(llama.to_critic(), 16).adapter_params
        == 16 * 32 * (attention + mlp) + 4096
    )
    assert add_adapter_params(add_adapter_params(llama, 16), 0) == llama


def test_adapters_add_two_matrices_per_expert():
    moe = MODEL_SHAPES["qwen3-30b-a3b"]
    router = add_adapter_params(moe, 4, ["gate"]).adapter_params
    assert router == 4 * moe.layers * (moe.hidden + moe.experts)
    down = add_adapter_params(moe, 4, ["down_proj"]).adapter_params
    assert down == 4 * moe.layers * moe.experts * (moe.hidden + moe.intermediate)


def test_target_that_matches_no_layer_is_refused():
    message = "lora_targets: lm_head: matches no linear layer of llama-7b"
    with pytest.raises(ConfigError, match=message):
        add_adapter_params(MODEL_SHAPES["llama-7b"], 8, ["q_proj", "lm_head"])


@pytest.mark.parametrize("targets", [[], ["q_proj", "down_proj"], ["layers.1.self_attn.k_proj"]])
def test_adapter_params_equal_those_of_the_engine(targets: list[str], tmp_path: Path):
    write_model(tmp_path)
    config = TrainerConfig(lora_rank=4, lora_targets=targets)
    shape = load_model_shape(str(tmp_path))
    policy = count_trained_params(load_skeleton(str(tmp_path)), config)
    assert add_adapter_params(shape, 4, targets).adapter_params == policy
    critic = count_trained_params(load_value_skeleton(str(tmp_path)), config)
    # The skeleton's head has a bias, which shapes do not model.
    assert add_adapter_params(shape.to_critic(), 4, targets).adapter_params == critic - 1

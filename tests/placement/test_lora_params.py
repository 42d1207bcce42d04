"""How much of a model LoRA trains: by hand, and as the engine counts it."""

from pathlib import Path

import pytest

from streamrl.engines.models.forward import load_skeleton, load_value_skeleton
from streamrl.engines.models.lora import num_trained
from streamrl.engines.trainer_config import TrainerConfig
from streamrl.errors import ConfigError
from streamrl.placement.lora_params import adapted
from streamrl.placement.model_shapes import SHAPES, shape_of
from tests.toy import write_model


def test_a_layer_has_a_pair_of_matrices_of_its_rank() -> None:
    llama = SHAPES["llama-7b"]
    # Query and value: 32 layers, twice 4096 in and out.
    assert adapted(llama, 8, ["q_proj", "v_proj"]).trained == 8 * 32 * 2 * (4096 + 4096)
    attention, mlp = 4 * (4096 + 4096), 3 * (4096 + 11008)
    assert adapted(llama, 16).trained == 16 * 32 * (attention + mlp)
    assert adapted(llama, 16, ["layers.0.mlp.up_proj"]).trained == 16 * (4096 + 11008)
    # A critic's head is trained whole.
    assert adapted(llama.critic(), 16).trained == 16 * 32 * (attention + mlp) + 4096
    assert adapted(adapted(llama, 16), 0) == llama


def test_experts_have_a_pair_each() -> None:
    moe = SHAPES["qwen3-30b-a3b"]
    router = adapted(moe, 4, ["gate"]).trained
    assert router == 4 * moe.layers * (moe.hidden + moe.experts)
    down = adapted(moe, 4, ["down_proj"]).trained
    assert down == 4 * moe.layers * moe.experts * (moe.hidden + moe.intermediate)


def test_a_target_that_means_no_layer_is_refused() -> None:
    with pytest.raises(ConfigError, match="lora_targets: lm_head: no linear layer of llama-7b"):
        adapted(SHAPES["llama-7b"], 8, ["q_proj", "lm_head"])


@pytest.mark.parametrize("targets", [[], ["q_proj", "down_proj"], ["layers.1.self_attn.k_proj"]])
def test_as_many_are_trained_as_the_engine_trains(targets: list[str], tmp_path: Path) -> None:
    write_model(tmp_path)
    config, shape = TrainerConfig(lora_rank=4, lora_targets=targets), shape_of(str(tmp_path))
    policy = num_trained(load_skeleton(str(tmp_path)), config)
    assert adapted(shape, 4, targets).trained == policy
    critic = num_trained(load_value_skeleton(str(tmp_path)), config)
    # But for the bias of its head, which shapes do not have.
    assert adapted(shape.critic(), 4, targets).trained == critic - 1

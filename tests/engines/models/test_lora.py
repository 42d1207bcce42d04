"""LoRA adapters replace the model in training; followers compute the same as the trainer."""

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import AutoModelForCausalLM

from streamrl.engines.models.forward import load_skeleton, load_value_model
from streamrl.engines.models.lora import count_trained_params, find_lora_layers
from streamrl.engines.trainer_config import TrainerConfig
from streamrl.weights.parameters import LORA_A_SUFFIX, LORA_B_SUFFIX, LORA_SCALE
from tests.engines.conftest import parametrize_layouts
from tests.engines.plain_step import PlainOptimizer, measure_max_difference, plain_loss
from tests.engines.tiny_qwen import tiny_model
from tests.engines.trainer_layouts import LAYOUTS, ONE, SHARDED
from tests.engines.trainer_ranks import (
    GROUPS,
    LORA,
    SEVERAL_LR,
    TrainerCase,
    compute_divisor,
)

pytestmark = pytest.mark.xdist_group("ranks")

RANK, SCALE = LORA["lora_rank"], LORA["lora_alpha"] / LORA["lora_rank"]
# Outputs and inputs of the linear layers of one of the two layers.
LINEAR = {
    "self_attn.q_proj": (64, 64),
    "self_attn.k_proj": (32, 64),
    "self_attn.v_proj": (32, 64),
    "self_attn.o_proj": (64, 64),
    "mlp.gate_proj": (128, 64),
    "mlp.up_proj": (128, 64),
    "mlp.down_proj": (64, 128),
}
LAYERS = {f"model.layers.{i}.{name}": shape for i in range(2) for name, shape in LINEAR.items()}
SEVERAL = [
    layout
    for layout in LAYOUTS
    if layout.num_shares == 2 or layout.label in ("torch-1", "deepspeed1-1")
]
QUICK = [ONE, SHARDED]


def logits_of(model: nn.Module, weights: Mapping[str, Tensor]) -> Callable[[Tensor], Tensor]:
    """Return the logits of a model with other weights."""

    def run(ids: Tensor) -> Tensor:
        logits: Tensor = functional_call(model, dict(weights), (ids,)).logits
        return logits

    return run


def keep_adapters(published):
    return {name: tensor for name, tensor in published.items() if name != LORA_SCALE}


@pytest.fixture(scope="module")
def expected(results):
    """Compute two steps by hand: the weight is W0 + scale * B A, with leaves A and B."""
    model = tiny_model(tied=True, seed=0).requires_grad_(False)
    start = keep_adapters(results["lora/torch-1"][0]["start"])
    trained = {name: tensor.clone().requires_grad_() for name, tensor in start.items()}
    optimizer = PlainOptimizer(trained.values(), SEVERAL_LR)
    for _ in range(2):
        weights = {
            f"{layer}.weight": model.get_parameter(f"{layer}.weight")
            + SCALE * trained[layer + LORA_B_SUFFIX] @ trained[layer + LORA_A_SUFFIX]
            for layer in LAYERS
        }
        loss = plain_loss(logits_of(model, weights))
        (loss / compute_divisor(GROUPS)).backward()
        optimizer.step()
    return optimizer.norms, {name: tensor.detach() for name, tensor in trained.items()}


@pytest.mark.ranks(TrainerCase("lora_updates", ONE))
@parametrize_layouts("lora_updates", on=SEVERAL, quick=QUICK)
def test_the_lora_update_equals_a_plain_process_on_any_number_of_ranks(results, expected, layout):
    norms, trained = expected
    cases = results[f"lora/{layout.label}"]
    assert len(cases) == layout.world_size
    for case in cases:
        assert case["norms"] == pytest.approx(norms, rel=1e-4)
        assert measure_max_difference(keep_adapters(case["published"]), trained) < 0.01 * SEVERAL_LR
        assert measure_max_difference(case["published"], case["start"]) > SEVERAL_LR


@parametrize_layouts("lora_updates", on=SEVERAL, quick=QUICK)
def test_resume_continues_as_if_uninterrupted(results, layout):
    for case in results[f"lora/{layout.label}"]:
        (report, trained, num_updates), resumed = case["runs"]
        assert resumed[0] == report
        assert measure_max_difference(resumed[1], trained) == 0
        assert resumed[2] == num_updates == 2


@parametrize_layouts("lora_updates", on=SEVERAL, quick=QUICK)
def test_the_state_of_other_adapters_is_rejected(results, layout):
    for case in results[f"lora/{layout.label}"]:
        assert "lora_rank=2 lora_alpha=3.0, not lora_rank=" in case["refusal"]
        assert case["refusal"].endswith("lora_rank=2 lora_alpha=4.0")


@parametrize_layouts("lora_updates", on=SEVERAL, quick=QUICK)
def test_a_saved_policy_is_a_merged_hugging_face_model(results, folder, one_kv_head_path, layout):
    directory = folder / f"lora-{layout.label}" / "model"
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    base = tiny_model(tied=True, seed=0)
    published = results[f"lora/{layout.label}"][0]["published"]
    for name, parameter in model.named_parameters():
        layer = name.removesuffix(".weight")
        change = 0.0
        if layer in LAYERS:
            change = SCALE * published[layer + LORA_B_SUFFIX] @ published[layer + LORA_A_SUFFIX]
        torch.testing.assert_close(parameter, base.get_parameter(name) + change)


def test_trained_elements_are_counted_on_the_meta_device(one_kv_head_path):
    config = TrainerConfig(lora_rank=4)
    adapters = 4 * sum(sum(shape) for shape in LAYERS.values())
    assert count_trained_params(load_skeleton(one_kv_head_path), config) == adapters
    all_elements = sum(p.numel() for p in tiny_model(tied=True, seed=0).parameters())
    assert count_trained_params(load_skeleton(one_kv_head_path), TrainerConfig()) == all_elements


def test_all_linear_layers_but_the_head_of_a_critic_get_adapters(one_kv_head_path):
    critic = load_value_model(one_kv_head_path, dtype=torch.float32)
    assert set(find_lora_layers(critic)) == LAYERS.keys()

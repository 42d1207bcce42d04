"""Tensors loaded into an engine have the names and shapes of the model's files."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from streamrl.engines.models.forward import load_model
from streamrl.engines.models.supported_models import check_model_support
from streamrl.engines.vllm.rank_loader import iter_stored_tensors
from tests.engines.models.test_supported_models import FILE, write


def list_loaded_tensors(path: str) -> dict[str, torch.Tensor]:
    """Return all tensors that an engine would load for a model, by name."""
    model = load_model(path, dtype=torch.float32)
    named = model.named_parameters(remove_duplicate=False)
    pairs = list(iter_stored_tensors(path, {name: tensor.detach() for name, tensor in named}))
    assert len(pairs) == len(dict(pairs)), "nothing twice"
    return dict(pairs)


def test_recomputed_buffers_are_not_loaded(tmp_path: Path):
    path = write(tmp_path, "gpt_neox")
    before = list_loaded_tensors(path).keys()
    prefix = "gpt_neox.layers.0.attention."
    buffers = {
        f"{prefix}bias": torch.ones(1, 1, 8, 8).to(torch.uint8),
        f"{prefix}masked_bias": torch.tensor(-1e9),
        f"{prefix}rotary_emb.inv_freq": torch.zeros(4),
    }
    save_file({**load_file(tmp_path / FILE), **buffers}, tmp_path / FILE)
    check_model_support(path)
    assert list_loaded_tensors(path).keys() == before


def test_an_untrained_router_bias_is_loaded(tmp_path: Path):
    path = write(tmp_path, "glm4_moe")
    (name,) = (n for n in load_file(tmp_path / FILE) if n.endswith("e_score_correction_bias"))
    assert name in list_loaded_tensors(path)


@pytest.mark.parametrize("family", ["qwen3_moe", "olmoe"])
def test_stacked_experts_are_loaded_one_by_one(tmp_path: Path, family: str):
    path = write(tmp_path, family)
    separate = list_loaded_tensors(path)
    stacked = load_model(path, dtype=torch.float32).state_dict()
    save_file({n: tensor.clone() for n, tensor in stacked.items()}, tmp_path / FILE)
    assert load_file(tmp_path / FILE).keys() != separate.keys()
    check_model_support(path)
    loaded = list_loaded_tensors(path)
    assert loaded.keys() == separate.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in separate.items())

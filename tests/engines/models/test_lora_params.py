"""Trained LoRA parameters, by hand and as the engine counts them."""

import pytest

from streamrl.engines.models.model_shapes import MODEL_SHAPES, add_adapter_params
from streamrl.errors import ConfigError


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


def test_target_that_matches_no_layer_is_refused():
    message = "lora_targets: lm_head: matches no linear layer of llama-7b"
    with pytest.raises(ConfigError, match=message):
        add_adapter_params(MODEL_SHAPES["llama-7b"], 8, ["q_proj", "lm_head"])

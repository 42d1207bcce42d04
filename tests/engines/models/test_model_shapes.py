"""Model sizes against published sizes and transformers."""

import json
from pathlib import Path

import pytest
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    Qwen2Config,
)

from streamrl.engines.models.model_shapes import (
    MODEL_SHAPES,
    add_adapter_params,
    load_model_shape,
)
from streamrl.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-7b", 6.738),
        ("llama-34b", 33.744),
        ("llama-70b", 68.977),
        ("qwen2.5-7b", 7.616),
        ("qwen2.5-72b", 72.706),
        ("qwen3-14b", 14.768),
        ("qwen3-30b-a3b", 30.532),
        ("llama3.1-8b", 8.030),
        ("gemma3-12b", 11.766),
        ("gemma3-27b", 27.009),
        # Biases of experts and sinks are not counted.
        ("gpt-oss-20b", 20.915),
        ("gpt-oss-120b", 116.829),
    ],
)
def test_parameter_counts_equal_published_ones(name: str, billions: float):
    assert load_model_shape(name).num_params / 1e9 == pytest.approx(billions, rel=4e-4)


def make_sizes(hidden: int, intermediate: int, layers: int, kv_heads: int) -> dict[str, int]:
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "vocab_size": 100}
    heads = {"num_attention_heads": 4, "num_key_value_heads": kv_heads}
    return {**sizes, **heads, "num_hidden_layers": layers}


@pytest.mark.parametrize(
    "settings",
    [
        LlamaConfig(**make_sizes(64, 96, 3, 2)),
        Qwen2Config(**make_sizes(32, 48, 2, 1), tie_word_embeddings=True),
    ],
)
def test_shape_of_a_directory_equals_the_model_of_transformers(
    settings: AutoConfig, tmp_path: Path
):
    settings.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_config(settings)
    assert load_model_shape(str(tmp_path)).num_params == model.num_parameters()
    assert load_model_shape(str(tmp_path / "config.json")).num_params == model.num_parameters()


WIDTHS = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 100}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ([], "must be a JSON object"),
        ({"hidden_size": 8}, "num_attention_heads is missing"),
        ({"text_config": {}}, "text_config: hidden_size is missing; a config.json with a language"),
        ({**WIDTHS, "num_attention_heads": 0}, "heads=0: must be at least 1"),
        ({**WIDTHS, "num_hidden_layers": 10**6}, "layers=1000000: must be at most 10000"),
        ({**WIDTHS, "intermediate_size": [1, 2]}, r"intermediate_size=\[1, 2\]: must be a whole"),
        ({**WIDTHS, "num_key_value_heads": 3}, "heads=4: must be a multiple of the 3 kv_heads"),
        ({**WIDTHS, "num_experts": 8, "first_k_dense_replace": 3}, "at most the 2 layers"),
        ({**WIDTHS, "num_experts": 8, "num_experts_per_tok": 9}, "from 1 to the 8 experts"),
    ],
)
def test_impossible_sizes_are_refused(settings: object, message: str, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match=message):
        load_model_shape(str(tmp_path))


def test_adapters_add_two_matrices_per_layer():
    llama = MODEL_SHAPES["llama-7b"]
    attention, mlp = 4 * (4096 + 4096), 3 * (4096 + 11008)
    expected = 16 * 32 * (attention + mlp)
    assert add_adapter_params(llama, 16).adapter_params == expected
    # A critic's head is trained as a whole.
    assert add_adapter_params(llama.to_critic(), 16).adapter_params == expected + 4096
    assert add_adapter_params(add_adapter_params(llama, 16), 0) == llama

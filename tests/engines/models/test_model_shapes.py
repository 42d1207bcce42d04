"""Model sizes against published sizes and transformers."""

import json
from pathlib import Path

import pytest
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen2Config,
    SiglipVisionConfig,
)

from streamrl.engines.models.model_shapes import MODEL_SHAPES, load_model_shape
from streamrl.errors import ConfigError
from streamrl.resharding.grids import RankGrid
from streamrl.resharding.layouts import create_layout
from streamrl.resharding.plans import NodeTopology, plan_copies


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-7b", 6.738),
        ("llama-13b", 13.016),
        ("llama-34b", 33.744),
        ("llama-65b", 65.286),
        ("llama-70b", 68.977),
        ("qwen2.5-0.5b", 0.494),
        ("qwen2.5-7b", 7.616),
        ("qwen2.5-32b", 32.764),
        ("qwen2.5-72b", 72.706),
        ("qwen3-30b-a3b", 30.532),
    ],
)
def test_parameter_counts_equal_published_ones(name: str, billions: float):
    assert load_model_shape(name).num_params / 1e9 == pytest.approx(billions, abs=0.0006)


def test_active_params_count_only_routed_experts():
    shape = load_model_shape("qwen3-30b-a3b")
    assert shape.active_matmul_params / 1e9 == pytest.approx(3.0, abs=0.1)
    assert load_model_shape("deepseek-v3").active_matmul_params / 1e9 == pytest.approx(37.5, abs=4)


@pytest.mark.parametrize("name", list(MODEL_SHAPES))
def test_model_spec_holds_all_parameters(name: str):
    shape = load_model_shape(name)
    if not shape.experts:
        assert shape.to_model_spec(1).num_bytes == shape.num_params
    assert shape.to_model_spec(2).num_bytes == pytest.approx(2 * shape.num_params, rel=1e-9)


@pytest.mark.parametrize("name", ["llama-7b", "qwen2.5-0.5b", "llama-70b"])
def test_critic_has_a_scalar_head(name: str):
    shape = load_model_shape(name)
    critic = shape.to_critic()
    head = 0 if shape.has_tied_embeddings else shape.vocab * shape.hidden
    assert critic.num_params == shape.num_params - head + shape.hidden


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


def test_split_model_divides_among_its_ranks():
    model = load_model_shape("qwen2.5-0.5b").to_model_spec()
    trained = create_layout(model, RankGrid(1, 2, 1).assign_ranks())
    served = create_layout(model, RankGrid(1, 1, 2).assign_ranks())
    report = plan_copies(trained, served, NodeTopology(8)).report_bytes()
    # Split tensors are halved; norms are whole on every rank.
    norms = sum(s.num_bytes for s in model.tensors if s.split_dim is None)
    assert report.rank_bytes[0].received_bytes == (model.num_bytes - norms) // 2


def test_unknown_model_error_suggests_the_nearest_name(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"llama-7c: neither a known model name.*llama-7b"):
        load_model_shape("llama-7c")
    broken = tmp_path / "config.json"
    broken.write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_model_shape(str(tmp_path))
    broken.write_text(json.dumps({"hidden_size": 8}))
    with pytest.raises(ConfigError, match="num_attention_heads is missing"):
        load_model_shape(str(tmp_path))
    broken.write_text("[]")
    with pytest.raises(ConfigError, match="must be a JSON object"):
        load_model_shape(str(tmp_path))


WIDTHS = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 100}


def test_multimodal_config_counts_only_the_language_model(tmp_path: Path):
    vision = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2}
    text = LlamaConfig(**WIDTHS, intermediate_size=96, num_key_value_heads=2)
    config = LlavaConfig(
        text_config=text,
        vision_config=SiglipVisionConfig(**vision, num_attention_heads=4),
        tie_word_embeddings=False,
    )
    # Write the whole config: save_pretrained drops sizes that equal the text config's defaults.
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    model = LlavaForConditionalGeneration(config)
    language = model.model.language_model.num_parameters() + model.lm_head.weight.numel()
    shape = load_model_shape(str(tmp_path))
    assert shape.num_params == language < model.num_parameters()
    assert shape.name.endswith(
        "(its language model alone: weights of other towers are not counted)"
    )


def test_shape_name_notes_uncounted_towers(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({**WIDTHS, "vision_config": {}}))
    assert "are not counted" in load_model_shape(str(tmp_path)).name


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"text_config": {}}, "text_config: hidden_size is missing; a config.json with a language"),
        ({**WIDTHS, "num_attention_heads": 0}, "heads=0: must be at least 1"),
        ({**WIDTHS, "num_hidden_layers": 10**6}, "layers=1000000: must be at most 10000"),
        ({**WIDTHS, "vocab_size": 10**30}, "vocab_size=10{30}: must be a whole number"),
        ({**WIDTHS, "intermediate_size": [1, 2]}, r"intermediate_size=\[1, 2\]: must be a whole"),
        ({**WIDTHS, "head_dim": True}, "head_dim=True: must be a whole number"),
        ({**WIDTHS, "num_experts": 8, "first_k_dense_replace": 3}, "at most the 2 layers"),
    ],
)
def test_impossible_sizes_are_refused(settings: dict[str, object], message: str, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match=message):
        load_model_shape(str(tmp_path))

"""Models that cannot be trained and served equally are rejected by their directory alone."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from streamrl.engines.models.supported_models import (
    check_model_support,
    check_weight_files,
    describe_forward,
    describe_untrained_layers,
)
from streamrl.engines.trainer_config import TrainerConfig
from streamrl.errors import ConfigError
from tests.engines.test_architectures import COMMON, QUICK, SLOW

LLAMA4 = {"num_local_experts": 2, "head_dim": 32, "intermediate_size_mlp": 96}
FAMILY_SETTINGS = QUICK | SLOW | {"gpt2": {"n_layer": 2, "n_head": 4}, "llama4_text": LLAMA4}
FILE = "model.safetensors"
SECOND = re.compile(r"\.(layers|h)\.1\.")


def write(folder: Path, family: str, **settings: Any) -> str:
    """Save a freshly initialized model of a family with given settings."""
    config = AutoConfig.for_model(family, **{**COMMON, **FAMILY_SETTINGS[family], **settings})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


def change(folder: Path, **settings: Any) -> None:
    """Change settings in config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


@pytest.mark.parametrize(
    "family", ["qwen3_moe", "gpt_oss", "gpt_neox", "glm4_moe", "mixtral", "gpt2"]
)
def test_a_complete_directory_is_accepted_and_one_missing_a_layer_rejected(
    tmp_path: Path, family: str
):
    path = write(tmp_path, family)
    check_model_support(path, "auto")
    assert describe_untrained_layers(path) == []
    tensors = load_file(tmp_path / FILE)
    missing = next(name for name in tensors if SECOND.search(name) and tensors[name].dim() > 1)
    save_file({name: t for name, t in tensors.items() if name != missing}, tmp_path / FILE)
    with pytest.raises(ConfigError, match=r"\.1\..* (of|has) shape|a tensor of the experts"):
        check_model_support(path, "auto")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"hidden_size": 10**15}, "config.json"),
        ({"vocab_size": 33}, "has shape (320, 128) in its files, (33, 128)"),
        ({"intermediate_size": 100}, "mlp."),
        ({"num_hidden_layers": 10**9, "layer_types": None}, "its files hold 2 layers"),
        ({"num_key_value_heads": 1}, "self_attn."),
        (
            {"hidden_act": "nope", "hidden_activation": "nope"},
            "makes no such model: KeyError: 'nope'",
        ),
        ({"rope_parameters": {"rope_type": "none", "rope_theta": 1.0}}, "config.json"),
        ({"num_hidden_layers": 0, "layer_types": []}, "its files hold 2 layers"),
        ({"pad_token_id": 320}, "makes no such model: AssertionError: Padding_idx"),
    ],
)
@pytest.mark.parametrize("family", ["qwen2", "gemma2"])
def test_a_config_that_contradicts_the_files_is_rejected(
    tmp_path: Path, family: str, settings: dict[str, Any], words: str
):
    path = write(tmp_path, family)
    change(tmp_path, **settings)
    with pytest.raises(ConfigError) as caught:
        check_weight_files(path, "model.path")
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert path in str(caught.value)


@pytest.mark.parametrize("family", ["qwen2", "gemma2", "phi3"])
def test_missing_and_misshapen_tensors_are_named(tmp_path: Path, family: str):
    path = write(tmp_path, family, tie_word_embeddings=family == "gemma2")
    check_weight_files(path, "model.path")
    tensors = load_file(tmp_path / FILE)
    names_of_layer_1 = {re.sub(r"\.\d+\.", ".1.", name) for name in tensors}
    for name in sorted(names_of_layer_1):
        for odd in ({}, {name: tensors[name].flatten()[:-1].clone()}):
            save_file({**{n: t for n, t in tensors.items() if n != name}, **odd}, tmp_path / FILE)
            with pytest.raises(ConfigError) as caught:
                check_weight_files(path, "model.path")
            text = str(caught.value)
            assert name in text and "\n" not in text, text


def rename(folder: Path, old: str, new: str) -> None:
    """Rename tensors by prefix or by a part of their names."""
    tensors = load_file(folder / FILE)
    assert any(old in name for name in tensors)
    save_file({name.replace(old, new): t for name, t in tensors.items()}, folder / FILE)


def test_names_that_transformers_converts_are_accepted(tmp_path: Path):
    path = write(tmp_path, "llama", tie_word_embeddings=True)
    rename(tmp_path, "model.", "")
    check_weight_files(path, "critic.path", is_served=False)
    with pytest.raises(ConfigError, match=r"layers\.0\..*, a name that vLLM does not take; load"):
        check_model_support(path, "auto")
    rename(tmp_path, "layers.", "model.language_model.layers.")
    with pytest.raises(ConfigError, match=r"lack .* and hold .*language_model.* not a parameter"):
        check_weight_files(path, "model.path")


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe", "gpt_neox"])
def test_a_tensor_with_an_unknown_name_is_rejected(tmp_path: Path, family: str):
    path = write(tmp_path, family)
    part = ".attention.dense." if family == "gpt_neox" else ".self_attn.o_proj."
    rename(tmp_path, part, part.replace("o_proj", "out_proj").replace("dense", "linear"))
    with pytest.raises(ConfigError, match=r"its files lack .* and hold .*(out_proj|linear)"):
        check_weight_files(path, "model.path")
    rename(tmp_path, "out_proj" if family != "gpt_neox" else "linear", part.split(".")[2])
    check_weight_files(path, "model.path")
    tensors = load_file(tmp_path / FILE)
    save_file({**tensors, "adapter.weight": torch.zeros(2, 2)}, tmp_path / FILE)
    with pytest.raises(ConfigError, match=r"hold adapter.weight, which is not a parameter of"):
        check_weight_files(path, "model.path")


ROPE = {"rope_type": "default", "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("family", "settings", "words"),
    [
        ("qwen3", {"quantization_config": {"quant_method": "fp8"}}, "fp8 weights: quantized weig"),
        ("llama", {"rope_parameters": ROPE | {"rope_theta": 0}}, "rope_theta=0: must be a number"),
        ("mistral", {"sliding_window": 0}, "sliding_window=0: must be a number above 0"),
        ("llama", {"rope_parameters": ROPE | {"factor": "2"}}, "factor='2': must be a number abov"),
        ("gpt_neox", {"layer_norm_eps": 0.0}, "layer_norm_eps=0.0: must be a number above 0"),
        # vLLM would compute these in another way, or not at all.
        (
            "qwen2",
            {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]},
            "max_window_layers: ",
        ),
        ("qwen3_moe", {"use_sliding_window": True}, "use_sliding_window=true: "),
        ("gemma2", {"tie_word_embeddings": False}, "tie_word_embeddings=false: "),
        ("olmoe", {"clip_qkv": 1.0}, "clip_qkv=1.0: "),
        ("qwen3_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok=9: must be from 1 to"),
        ("llama", {"num_key_value_heads": 3}, "num_key_value_heads=3: must divide num_attention"),
        ("llama", {"architectures": ["MyLlama"]}, r'MyLlama"\]: must be \["LlamaForCausalLM"\]'),
    ],
)
def test_settings_of_config_json_are_rejected(
    tmp_path: Path, family: str, settings: dict[str, Any], words: str
):
    path = write(tmp_path, family)
    change(tmp_path, **settings)
    with pytest.raises(ConfigError, match=words):
        check_model_support(path, "auto")


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_a_bias_that_vllm_has_no_parameter_for_is_rejected(tmp_path: Path, family: str):
    path = write(tmp_path, family, attention_bias=True)
    words = "attention_bias=true: vLLM has no parameter for model.layers.0.self_attn.o_proj.bias"
    with pytest.raises(ConfigError, match=words):
        check_model_support(path, "auto")
    check_model_support(path, "auto", key="critic.path", is_served=False)


@pytest.mark.parametrize(
    ("family", "attention", "words"),
    [
        ("gemma2", "sdpa", "ignores attention logit soft-capping"),
        ("gpt_oss", "sdpa", "ignores the attention sinks"),
        ("qwen3", "flash", "needs the package flash-attn"),
    ],
)
def test_attention_that_computes_differently_is_rejected(
    tmp_path: Path, family: str, attention: str, words: str
):
    path = write(tmp_path, family)
    check_model_support(path, "eager")
    with pytest.raises(ConfigError, match=f"^trainer.attention={attention}: {words}"):
        check_model_support(path, attention)


def test_a_warning_names_multi_token_prediction_layers(tmp_path: Path):
    path = write(tmp_path, "glm4_moe")
    tensors = load_file(tmp_path / FILE)
    extra_tensors = {
        n.replace(".1.", ".2."): t.clone() for n, t in tensors.items() if ".layers.1." in n
    }
    save_file({**tensors, **extra_tensors}, tmp_path / FILE)
    check_model_support(path, "auto")
    (text,) = describe_untrained_layers(path)
    assert "num_nextn_predict_layers=1: " in text


@pytest.mark.parametrize(
    ("family", "attention", "words"),
    [
        ("qwen2", "auto", ""),
        ("qwen2", "eager", "its attention function, eager, is not sdpa"),
        ("gemma2", "auto", "its attention function, eager, is not sdpa"),
        ("gemma3_text", "auto", ""),
        ("gpt2", "auto", ""),
        ("gpt_oss", "auto", "its attention function, eager, is not sdpa"),
    ],
)
def test_a_note_says_which_models_are_padded(
    tmp_path: Path, family: str, attention: str, words: str
):
    path = write(tmp_path, family)
    notes = describe_forward(path, TrainerConfig(attention=attention), 1024, key="model.path")
    prefix = f"model.path={path}: micro-batches are padded, not packed: "
    assert notes == ([prefix + words] if words else [])


def test_a_note_says_how_much_memory_logits_take_that_cannot_be_cut(tmp_path: Path):
    path = write(tmp_path, "llama4_text")
    settings = TrainerConfig(dtype="float32")
    _, note = describe_forward(path, settings, 1 << 20, key="critic.path")
    # 2^20 tokens, 320 words, logits and gradients of 4 bytes.
    assert note.startswith(f"critic.path={path}: logits and their gradient take 2.5 GiB per")
    assert note.endswith("knows no output head of this class apart from its base")


@pytest.mark.parametrize("name", ["adapter_model", "consolidated", "model-00001-of-00001"])
def test_without_an_index_only_one_weight_file_is_accepted(tmp_path: Path, name: str):
    path = write(tmp_path, "qwen2")
    save_file({"x": torch.zeros(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ConfigError, match=f"{name}.safetensors. Move it elsewhere"):
        check_model_support(path, "auto")


def test_an_adapter_beside_the_weights_is_rejected(tmp_path: Path):
    path = write(tmp_path, "llama")
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"adapter_config\.json: .* move it elsewhere"):
        check_model_support(path, "auto")

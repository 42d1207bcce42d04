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
    check_trained_model,
    check_weight_files,
)
from streamrl.engines.trainer_config import TrainerConfig
from streamrl.errors import ConfigError
from tests.engines.tiny_families import COMMON, FAMILIES

FILE = "model.safetensors"
SECOND = re.compile(r"\.(layers|h)\.1\.")


def write(folder: Path, family: str, **settings: Any) -> str:
    """Save a freshly initialized model of a family with given settings."""
    config = AutoConfig.for_model(family, **{**COMMON, **FAMILIES[family], **settings})
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
    check_model_support(path)
    tensors = load_file(tmp_path / FILE)
    missing = next(name for name in tensors if SECOND.search(name) and tensors[name].dim() > 1)
    save_file({name: t for name, t in tensors.items() if name != missing}, tmp_path / FILE)
    with pytest.raises(ConfigError, match=r"\.1\..* (of|has) shape|makes no policy of"):
        check_model_support(path)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"hidden_size": 10**15}, "config.json"),
        ({"vocab_size": 33}, "has shape (320, 128) in its files, (33, 128)"),
        ({"intermediate_size": 100}, "mlp."),
        ({"num_hidden_layers": 10**9, "layer_types": None}, "must be at most 10000"),
        ({"num_hidden_layers": 0, "layer_types": []}, "which is not a parameter"),
        ({"pad_token_id": 320}, "these files: AssertionError: Padding_idx"),
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
def test_missing_misshapen_and_unknown_tensors_are_named(tmp_path: Path, family: str):
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
    save_file({**tensors, "adapter.weight": torch.zeros(2, 2)}, tmp_path / FILE)
    with pytest.raises(ConfigError, match=r"hold adapter.weight, which is not a parameter of"):
        check_weight_files(path, "model.path")


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
        check_model_support(path)
    rename(tmp_path, "layers.", "model.language_model.layers.")
    with pytest.raises(ConfigError, match=r"lack .* and hold .*language_model.* not a parameter"):
        check_weight_files(path, "model.path")


@pytest.mark.parametrize(
    ("family", "settings", "words"),
    [
        ("qwen3", {"quantization_config": {"quant_method": "fp8"}}, "quantized weights cannot be"),
        # vLLM would compute these in another way, or not at all.
        (
            "qwen2",
            {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]},
            "max_window_layers: ",
        ),
        ("qwen3_moe", {"use_sliding_window": True}, "use_sliding_window=true: "),
        ("gemma2", {"tie_word_embeddings": False}, "tie_word_embeddings=false: "),
        ("olmoe", {"clip_qkv": 1.0}, "clip_qkv=1.0: "),
        ("llama", {"architectures": ["MyLlama"]}, r'MyLlama"\]: must be \["LlamaForCausalLM"\]'),
        (
            "qwen3",
            {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"]},
            r'must be \["Qwen3_5ForCausalLM"\]',
        ),
    ],
)
def test_settings_of_config_json_are_rejected(
    tmp_path: Path, family: str, settings: dict[str, Any], words: str
):
    path = write(tmp_path, family)
    change(tmp_path, **settings)
    with pytest.raises(ConfigError, match=words):
        check_model_support(path)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_a_bias_that_vllm_has_no_parameter_for_is_rejected(tmp_path: Path, family: str):
    path = write(tmp_path, family, attention_bias=True)
    words = "attention_bias=true: vLLM has no parameter for model.layers.0.self_attn.o_proj.bias"
    with pytest.raises(ConfigError, match=words):
        check_model_support(path)
    check_model_support(path, key="critic.path", is_served=False)


def list_notes(path: str, **settings: Any) -> list[str]:
    config = TrainerConfig(**settings)
    notes = check_trained_model(path, config, key="x.path", is_served=True)
    assert all(note.startswith(f"x.path={path}: ") for note in notes)
    return [note.removeprefix(f"x.path={path}: ") for note in notes]


def test_a_note_names_multi_token_prediction_layers(tmp_path: Path):
    path = write(tmp_path, "glm4_moe")
    tensors = load_file(tmp_path / FILE)
    extra_tensors = {
        n.replace(".1.", ".2."): t.clone() for n, t in tensors.items() if ".layers.1." in n
    }
    save_file({**tensors, **extra_tensors}, tmp_path / FILE)
    (note,) = list_notes(path)
    assert note.startswith("num_nextn_predict_layers=1: ")


PADDED = "micro-batches are padded, not packed: its attention function, eager, is not sdpa"
CHUNKED = "micro-batches are padded, not packed: its layers of type chunked_attention mix tokens"
WHOLE = (
    "logits exist for all tokens of a micro-batch at once: transformers knows no output head of"
    " this class apart from its base"
)


@pytest.mark.parametrize(
    ("family", "attention", "notes"),
    [
        ("qwen2", "auto", []),
        ("qwen2", "eager", [PADDED]),
        ("gemma2", "auto", [PADDED]),
        ("gpt2", "auto", []),
        ("gpt_oss", "auto", [PADDED]),
        ("llama4_text", "auto", [CHUNKED, WHOLE]),
    ],
)
def test_notes_say_which_models_cost_more(
    tmp_path: Path, family: str, attention: str, notes: list[str]
):
    assert list_notes(write(tmp_path, family), attention=attention) == notes


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        (
            "gemma2",
            {"sequence_parallel": 2, "world_size": 2},
            "trainer.sequence_parallel=2: needs packed rows, but .* is padded: its attention",
        ),
        ("gpt2", {"lora_rank": 2}, "trainer.lora_rank: the model has no linear layers"),
        (
            "qwen2",
            {"backend": "torch", "tensor_parallel": 8, "world_size": 8},
            "trainer.tensor_parallel=8: must divide the model's num_attention_heads=4",
        ),
    ],
)
def test_a_trainer_that_does_not_fit_the_model_is_rejected(
    tmp_path: Path, family: str, settings: dict[str, Any], message: str
):
    with pytest.raises(ConfigError, match=message):
        list_notes(write(tmp_path, family), **settings)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("consolidated.safetensors", "consolidated.safetensors. Move it elsewhere"),
        ("model-00001-of-00001.safetensors", "00001.safetensors. Move it elsewhere"),
        ("adapter_config.json", r"adapter_config\.json: .* move it elsewhere"),
    ],
)
def test_a_file_of_other_weights_beside_the_only_one_is_rejected(
    tmp_path: Path, name: str, words: str
):
    path = write(tmp_path, "qwen2")
    save_file({"x": torch.zeros(1)}, tmp_path / name)
    with pytest.raises(ConfigError, match=words):
        check_model_support(path)

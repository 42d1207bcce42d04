"""Metadata of a model directory, and its refusal before a model is built."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from streamrl.data.chat_template import load_tokenizer
from streamrl.engines.generator_config import GeneratorConfig, make_engine_args
from streamrl.engines.models.forward import load_model, load_skeleton
from streamrl.engines.training.model_trainer import write_hf_model as write_model_directory
from streamrl.errors import ConfigError
from streamrl.files.hf_config import (
    TRUSTED_MODELS_ENV,
    compute_max_positions,
    make_trusted_env,
    read_eos_token_ids,
    read_model_config,
    read_model_length,
    read_stored_shapes,
)
from tests.toy import write_model


@pytest.fixture(scope="module")
def toy_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("toy") / "model"
    write_model(path)
    return path


@pytest.fixture
def copy_with_config(toy_model: Path, tmp_path: Path) -> Any:
    """Copy the toy model with changed settings in its config.json."""

    def copy(settings: dict[str, Any]) -> Path:
        path = tmp_path / "model"
        shutil.copytree(toy_model, path)
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | settings))
        return path

    return copy


def yarn(factor: float) -> dict[str, Any]:
    return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": 128}


@pytest.mark.parametrize(
    ("scaling", "positions", "tokens"),
    [
        (None, 128, 128),
        (yarn(4.0), 128, 512),
        # Some configs state the length after scaling.
        (yarn(4.0), 512, 512),
        ({"rope_type": "linear", "factor": 2.0}, 128, 256),
        # Scaled by the current length, which vLLM does not support.
        ({"rope_type": "dynamic", "factor": 2.0}, 128, 128),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
            128,
            128,
        ),
    ],
)
def test_rope_scaling_extends_the_context_length(
    scaling: dict[str, Any] | None, positions: int, tokens: int, copy_with_config: Any
):
    settings = {"max_position_embeddings": positions, "rope_scaling": scaling}
    path = str(copy_with_config(settings | ({"rope_parameters": None} if scaling else {})))
    assert compute_max_positions(read_model_config(path)) == tokens
    assert read_model_length(path, limit=tokens) == read_model_length(path, limit=None) == tokens
    with pytest.raises(ConfigError, match=f"at most {tokens} tokens"):
        read_model_length(path, limit=tokens + 1)
    arguments = make_engine_args(path, GeneratorConfig(), seed=0, max_length=tokens, on_cpu=True)
    vllm_positions = arguments.get("hf_overrides", {}).get("max_position_embeddings", positions)
    assert vllm_positions == max(tokens, positions)


def test_gemma_3_states_positions_after_scaling():
    rope = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    config = AutoConfig.for_model(
        "gemma3_text", max_position_embeddings=1024, rope_parameters={"full_attention": rope}
    )
    assert compute_max_positions(config) == 1024


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"eos', "Unterminated string"),
        ("[]", "not a JSON object"),
        ('{"eos_token_id": "x"}', "eos_token_id=['x']: must be token ids"),
        ('{"eos_token_id": 10000000}', "must be token ids below"),
    ],
)
def test_invalid_generation_defaults_are_refused(content: str, words: str, copy_with_config: Any):
    path = copy_with_config({})
    (path / "generation_config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"generation_config\.json: ") as caught:
        read_model_length(str(path), limit=None)
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "token_ids"), [('{"eos_token_id": [2, 5]}', [2, 5]), ('{"eos_token_id": 7}', [7])]
)
def test_eos_tokens_are_read_from_the_generation_config(
    content: str, token_ids: list[int], tmp_path: Path
):
    assert read_eos_token_ids(tmp_path) == []
    (tmp_path / "generation_config.json").write_text(content)
    assert read_eos_token_ids(tmp_path) == token_ids


def test_generation_defaults_are_copied_into_checkpoints(copy_with_config: Any, tmp_path: Path):
    path = copy_with_config({})
    defaults = '{"do_sample": false, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [2, 5]}'
    (path / "generation_config.json").write_text(defaults)
    assert read_model_length(str(path), limit=None) == 128
    model = load_model(str(path), dtype=torch.float32)
    write_model_directory(
        tmp_path / "saved", model, model.named_parameters(), tokenizer_from=str(path)
    )
    assert (tmp_path / "saved" / "generation_config.json").read_text() == defaults


CODE = {
    "configuration_mine.py": """
from transformers import Qwen2Config

class MineConfig(Qwen2Config):
    model_type = "mine"
""",
    "modeling_mine.py": """
from transformers import Qwen2ForCausalLM
from .configuration_mine import MineConfig

class MineForCausalLM(Qwen2ForCausalLM):
    config_class = MineConfig
""",
}
MINE = {
    "model_type": "mine",
    "architectures": ["MineForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_mine.MineConfig",
        "AutoModelForCausalLM": "modeling_mine.MineForCausalLM",
    },
}


@pytest.fixture
def with_code(copy_with_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Model directory with its own Python code; a prompt for trust would fail the test."""

    def refuse_prompt(question: str = "") -> str:
        raise AssertionError(f"a question: {question}")

    monkeypatch.setattr("builtins.input", refuse_prompt)
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    path: Path = copy_with_config(MINE)
    for name, source in CODE.items():
        (path / name).write_text(source)
    return path


@pytest.mark.parametrize("read", [lambda path: read_model_length(path, limit=None), load_skeleton])
def test_untrusted_model_code_is_refused_without_a_prompt(with_code: Path, read: Any):
    with pytest.raises(ConfigError, match=r"model.trust_remote_code=true runs the code") as caught:
        read(str(with_code))
    assert "\n" not in str(caught.value)


def test_untrusted_tokenizer_code_is_refused_without_a_prompt(with_code: Path):
    settings = {"auto_map": {"AutoTokenizer": ["tokenization_mine.Mine", None]}}
    (with_code / "config.json").write_text(json.dumps({**MINE, "auto_map": {}}))
    (with_code / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match=r"model.trust_remote_code=true runs the code"):
        load_tokenizer(str(with_code))


def test_only_code_of_trusted_directories_runs(
    with_code: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv(
        TRUSTED_MODELS_ENV, make_trusted_env("/elsewhere", str(with_code))[TRUSTED_MODELS_ENV]
    )
    assert read_model_length(str(with_code), limit=None) == 128
    assert type(load_model(str(with_code), dtype=torch.float32)).__name__ == "MineForCausalLM"
    untrusted_copy = shutil.copytree(with_code, tmp_path / "other")
    with pytest.raises(ConfigError, match="trust_remote_code"):
        read_model_length(str(untrusted_copy), limit=None)
    assert make_trusted_env() == {}


def test_a_family_known_to_transformers_needs_no_code(copy_with_config: Any):
    auto_map = {"AutoConfig": "configuration_none.NoneConfig"}
    assert read_model_length(str(copy_with_config({"auto_map": auto_map})), limit=None) == 128


DESCRIPTIONS = ["config.json", "generation_config.json", "model.safetensors.index.json"]


@pytest.mark.parametrize("name", DESCRIPTIONS)
@pytest.mark.parametrize("text", ["[" * 10**5 + "]" * 10**5, "[[]]", '{"weight_map": 3, '])
def test_a_malformed_config_json_is_a_one_line_error(copy_with_config: Any, name: str, text: str):
    path = copy_with_config({})
    (path / name).write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_model_length(str(path), limit=None)
        read_stored_shapes(path, "model.path")
    assert name in str(caught.value) and "\n" not in str(caught.value)


def test_a_directory_without_config_json_is_no_model_directory(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"not a model directory: config\.json is missing"):
        read_model_config(str(tmp_path))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_fifo_in_a_model_directory_is_refused_without_blocking(tmp_path: Path, name: str):
    os.mkfifo(tmp_path / name)
    for read in (read_model_config, lambda path: read_stored_shapes(Path(path), "model.path")):
        with pytest.raises(ConfigError, match=f"{name}: not a regular file"):
            read(str(tmp_path))

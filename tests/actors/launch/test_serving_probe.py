"""vLLM's verdict on model directories, as a run asks for it before Ray starts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from streamrl.engines.vllm.environment import make_vllm_env
from tests.engines.tiny_families import COMMON

PROBE = "from streamrl.actors.launch.serving_probe import main; main()"
HIDE_CLASS = (
    "from vllm import ModelRegistry;"
    "ModelRegistry.register_model('GPT2LMHeadModel', 'needs_a_package:Model');"
)


def probe(folder: Path, family: str, code: str = PROBE, **settings: bool) -> str:
    """Save a model of a family and return vLLM's verdict on it."""
    config = AutoConfig.for_model(family, **COMMON, n_layer=2, n_head=4, state_size=8, **settings)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    (folder / "needs_a_package.py").write_text("import no_such_package")
    completed = subprocess.run(
        [sys.executable, "-c", code, json.dumps([str(folder), {"max_new_tokens": 8}, 64, False])],
        env={**os.environ, **make_vllm_env("cpu"), "PYTHONPATH": f"{folder}:{Path.cwd()}"},
        stdout=subprocess.PIPE,
        check=True,
    )
    verdict: str = json.loads(completed.stdout)
    return verdict


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "verdict"),
    [
        ("gpt2", ""),
        ("mamba", "a trial on this CPU failed: "),
    ],
)
def test_vllm_judges_the_directory_and_tries_what_is_not_proven(
    tmp_path: Path, family: str, verdict: str
):
    assert (probe(tmp_path, family) + "\n").startswith(verdict or "\n")


@pytest.mark.slow
def test_what_a_class_asserts_about_settings_is_the_reason(tmp_path: Path):
    reason = probe(tmp_path, "gpt2", scale_attn_by_inverse_layer_idx=True)
    assert "assert not config.scale_attn_by_inverse_layer_idx" in reason


@pytest.mark.slow
def test_a_class_that_cannot_be_imported_names_the_missing_package(tmp_path: Path):
    assert probe(tmp_path, "gpt2", HIDE_CLASS + PROBE) == (
        "its class cannot be imported: No module named 'no_such_package'"
    )

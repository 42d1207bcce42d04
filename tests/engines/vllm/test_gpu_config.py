"""vLLM's config of every recipe and of unusual settings on a GPU, built in one process without."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen2Config

from streamrl.config.run_config import load_config
from streamrl.weights.versions import NUM_SEQUENCES

ROOT = Path(__file__).parents[3]
RECIPES = sorted((ROOT / "configs").glob("*.yaml"))
TIMEOUT_S = 300

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # Settings, and facts of vLLM's config.
    "default": ({}, {"step_tokens": 8192, "dtype": "bfloat16", "ranks": 1, "sleep_mode": False}),
    "4096 rollouts": (
        {"max_concurrent_rollouts": 4096},
        {"step_tokens": 8192, "sequences": 4096 + NUM_SEQUENCES},
    ),
    "16384 rollouts": (
        {"max_concurrent_rollouts": 16384},
        {"step_tokens": 16384 + NUM_SEQUENCES},
    ),
    "shared GPU": ({"kv_cache_mb": 1024}, {"sleep_mode": True}),
    "tensor parallel 8": ({"tensor_parallel": 8}, {"ranks": 8}),
    "float32": ({"dtype": "float32"}, {"dtype": "float32"}),
    **{path.stem: (vars(load_config(path).generator), {}) for path in RECIPES},
}


def write_model(folder: Path) -> str:
    """Write config.json of a model of 32B parameters, without weights."""
    settings = {"hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64}
    heads = {"num_attention_heads": 40, "num_key_value_heads": 8}
    config = Qwen2Config(**settings, **heads, architectures=["Qwen2ForCausalLM"], dtype="bfloat16")
    config.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Facts of vLLM's config, or its error, by recipe and by name of settings."""
    model = write_model(tmp_path_factory.mktemp("model"))
    cases = [
        {"model": model, "generator": settings, "max_length": 4096}
        for settings, _ in CASES.values()
    ]
    done = subprocess.run(
        [sys.executable, "-m", "tests.engines.vllm.stub_gpu"],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(CASES, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_vllm_accepts_the_arguments_on_a_gpu_and_follows_the_settings(
    name: str, facts: dict[str, dict[str, Any]]
):
    built, (_, expected) = facts[name], CASES[name]
    assert built | expected == built
    assert "error" not in built
    assert built["v2_runner"], "the model runner is pinned"
    assert not built["async_scheduling"], "no step is in flight when weights change"
    assert built["chunked_prefill"] and built["prefix_caching"]
    assert built["step_tokens"] >= max(8192, built["sequences"])
    assert built["graph_mode"] == "FULL_AND_PIECEWISE"
    assert max(built["graph_sizes"]) >= min(built["sequences"], 1024)

"""vLLM's config of every recipe and of unusual settings on a GPU, built in one process without."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from streamrl.config.run_config import load_config
from streamrl.engines.models.model_shapes import MODEL_SHAPES, ModelShape
from streamrl.weights.versions import NUM_SEQUENCES

ROOT = Path(__file__).parents[3]
RECIPES = sorted(path.stem for path in (ROOT / "configs").glob("*.yaml"))
#: Longest rollout of recipes whose model is a toy.
TOY_TOKENS = 256
PROMPT_TOKENS = 1024
TIMEOUT_S = 300

SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "4096 rollouts": {"max_concurrent_rollouts": 4096},
    "16384 rollouts": {"max_concurrent_rollouts": 16384},
    "shared GPU": {"kv_cache_mb": 1024},
    "tensor parallel 8": {"tensor_parallel": 8},
    "float32": {"dtype": "float32"},
    "float16": {"dtype": "float16"},
}


def write_model(shape: ModelShape, folder: Path) -> str:
    """Write config.json of a model, without weights."""
    family = "qwen3_moe" if shape.experts else shape.family
    config = {
        "architectures": [{"qwen3_moe": "Qwen3MoeForCausalLM"}.get(family, "Qwen2ForCausalLM")],
        "model_type": family if shape.experts else "qwen2",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": shape.has_tied_embeddings,
        "dtype": "bfloat16",
    }
    if shape.experts:
        config |= {
            "head_dim": shape.head_dim,
            "num_experts": shape.experts,
            "num_experts_per_tok": shape.experts_per_token,
            "moe_intermediate_size": shape.intermediate,
        }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def make_recipe_case(name: str, folder: Path) -> dict[str, Any]:
    config = load_config(ROOT / "configs" / f"{name}.yaml")
    model = Path(config.model.path).name.lower()
    tokens = config.max_completion_tokens + PROMPT_TOKENS if model in MODEL_SHAPES else TOY_TOKENS
    shape = MODEL_SHAPES.get(model, MODEL_SHAPES["qwen2.5-0.5b"])
    return {
        "model": write_model(shape, folder / shape.name),
        "generator": vars(config.generator),
        "max_length": tokens,
    }


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Facts of vLLM's config, or its error, by recipe and by name of settings."""
    folder = tmp_path_factory.mktemp("models")
    model = write_model(MODEL_SHAPES["qwen2.5-32b"], folder / "qwen2.5-32b")
    cases = {name: make_recipe_case(name, folder) for name in RECIPES}
    for name, settings in SETTINGS.items():
        cases[name] = {"model": model, "generator": settings, "max_length": 4096}
    cases["long"] = {"model": model, "generator": {}, "max_length": 32768}
    done = subprocess.run(
        [sys.executable, "-m", "tests.engines.vllm.stub_gpu"],
        input=json.dumps([*cases.values()]),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(cases, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("name", [*RECIPES, *SETTINGS, "long"])
def test_vllm_accepts_the_arguments_on_a_gpu(name: str, facts: dict[str, dict[str, Any]]):
    built = facts[name]
    assert "error" not in built
    assert built["v2_runner"], "the model runner is pinned"
    assert not built["async_scheduling"], "no step is in flight when weights change"
    assert built["chunked_prefill"] and built["prefix_caching"]
    assert built["step_tokens"] >= max(8192, built["sequences"])
    assert built["graph_mode"] == "FULL_AND_PIECEWISE"
    assert max(built["graph_sizes"]) >= min(built["sequences"], 1024)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("default", {"step_tokens": 8192, "dtype": "bfloat16", "ranks": 1, "sleep_mode": False}),
        ("4096 rollouts", {"step_tokens": 8192, "sequences": 4096 + NUM_SEQUENCES}),
        ("16384 rollouts", {"step_tokens": 16384 + NUM_SEQUENCES}),
        ("shared GPU", {"sleep_mode": True}),
        ("tensor parallel 8", {"ranks": 8}),
        ("float32", {"dtype": "float32"}),
        ("float16", {"dtype": "float16"}),
        ("long", {"max_length": 32768, "step_tokens": 8192}),
    ],
)
def test_the_config_on_a_gpu_follows_the_settings(
    name: str, expected: dict[str, Any], facts: dict[str, dict[str, Any]]
):
    assert facts[name] | expected == facts[name]

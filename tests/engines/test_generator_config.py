import json
from pathlib import Path
from typing import Any

import pytest

from streamrl.engines.generator_config import GeneratorConfig, make_engine_args
from streamrl.weights.versions import NUM_SEQUENCES


@pytest.fixture(autouse=True)
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a model directory `m` with a maximum length."""
    (tmp_path / "m").mkdir()
    config = {"model_type": "qwen2", "max_position_embeddings": 8192}
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)


def arguments(config: GeneratorConfig, *, on_cpu: bool) -> dict[str, Any]:
    return make_engine_args("m", config, seed=3, max_length=8192, on_cpu=on_cpu)


def test_on_a_cpu_the_engine_is_eager_float32_with_a_small_cache():
    args = arguments(GeneratorConfig(max_concurrent_rollouts=10), on_cpu=True)
    assert args["enforce_eager"] is True
    assert args["dtype"] == "float32"
    assert args["kv_cache_memory_bytes"] == 64 * 2**20
    assert args["max_num_seqs"] == 10 + NUM_SEQUENCES, "the logprob check has slots of its own"
    # The budget of a step holds the longest prompt.
    assert args["enable_chunked_prefill"] is False
    assert args["max_num_batched_tokens"] == 8192

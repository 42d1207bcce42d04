"""Memory of a colocated worker, as sums to check by hand, and memory budgets."""

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.engines.memory.worker_memory import WorkerMemory
from streamrl.errors import ConfigError

MB = 1 << 20
SIZES = (
    *("weights", "serving_weights", "optimizer", "gradients", "activations"),
    *("update_buffers", "kv_cache"),
)


def make_memory(**changes: int) -> WorkerMemory:
    """Return a memory of 4 MB weights, 8 optimizer, 4 gradients, 30 activations, 64 KV cache.

    Update buffers are smaller than activations, so they do not determine the peak.
    """
    sizes = {"weights": 4, "serving_weights": 0, "optimizer": 8, "gradients": 4, "activations": 30}
    sizes |= {"update_buffers": 12, "kv_cache": 64}
    sizes_bytes: dict[str, Any] = {name: size * MB for name, size in {**sizes, **changes}.items()}
    return WorkerMemory(**sizes_bytes)


def test_summary_line_shows_the_sum_of_each_phase():
    line = make_memory(serving_weights=5).summary_line
    assert "85 MB to generate = 4 weights + 5 the generator's weights + 8 optimizer" in line
    assert "115 MB to train = 4 weights" in line and "+ 30 activations + 64 KV cache" in line


@pytest.mark.parametrize(
    ("changes", "budget_mb", "phase", "words"),
    [
        ({}, 71, "generate", "72 MB = 4 weights + 4 gradients + 64 KV cache"),
        ({"activations": 100}, 90, "train", "116 MB = 4 weights + 8 optimizer + 4 gradients + 100"),
        (
            {"update_buffers": 90},
            105,
            "train",
            "106 MB = 4 weights + 8 optimizer + 4 gradients + 90 f",
        ),
    ],
)
def test_fit_budget_refuses_an_impossible_budget_with_the_sum(
    changes: dict[str, int], budget_mb: int, phase: str, words: str
):
    refusal = f"placement.memory_mb={budget_mb}: to {phase}, a worker holds {words}"
    with pytest.raises(ConfigError, match=re.escape(refusal)):
        make_memory(**changes).fit_budget(budget_mb)


@given(st.fixed_dictionaries({name: st.integers(0, 50) for name in SIZES}), st.integers(1, 400))
def test_fit_budget_keeps_or_refuses_any_budget_without_needless_offloads(
    sizes: dict[str, int], budget_mb: int
):
    memory = make_memory(**sizes)
    try:
        fitted = memory.fit_budget(budget_mb)
    except ConfigError:
        smallest = replace(memory, releases_kv=True, offloads_optimizer=True)
        assert max(smallest.train_bytes, smallest.generate_bytes) > budget_mb * MB
        return
    assert max(fitted.train_bytes, fitted.generate_bytes) <= budget_mb * MB
    assert fitted.releases_kv is (memory.train_bytes > budget_mb * MB)
    assert fitted.offloads_optimizer is (memory.generate_bytes > budget_mb * MB)
    texts = [fitted.format_sum("train"), fitted.format_sum("generate")]
    sums = [sum(int(term.split()[0]) for term in text.split(" + ") if term) for text in texts]
    assert sums == [fitted.train_bytes // MB, fitted.generate_bytes // MB]

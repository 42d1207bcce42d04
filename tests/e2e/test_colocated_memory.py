"""A colocated run of ranks that have a part of the parameters each, within a budget of memory."""

from pathlib import Path

import pytest

from streamrl.engines.forward import load_skeleton
from tests.e2e.launched import Launched, rows
from tests.toy import write_toy

pytestmark = pytest.mark.slow


def test_weights_come_once_from_the_other_rank_and_keys_values_and_optimizer_make_room(
    tmp_path: Path,
) -> None:
    toy = write_toy(tmp_path)
    words = [
        *("train", str(toy / "recipe.yaml"), f"run.dir={toy}/runs", "run.name=first"),
        *("placement.mode=colocated", "trainer.world_size=2", "trainer.zero_stage=3"),
        *("pipeline.max_staleness=0", "generator.kv_cache_mb=256", "placement.memory_mb=257"),
        *("weights.probe_every=1", "run.steps=3"),
    ]
    # Each rank has half from the other and copies its own, so that all that comes for a version is
    # a model's bytes, and as much is copied.
    parameters = load_skeleton(str(toy / "model")).parameters()
    model_bytes = sum(parameter.numel() * 4 for parameter in parameters)
    run = Launched(words, toy)
    assert run.wait() == 0, run.output
    said = " ".join(run.output.split())
    assert "the KV cache is released while it trains" in said
    assert "the optimizer's state is offloaded while it generates" in said
    found = rows(toy / "runs" / "first")
    assert [row["weights/bytes"] % (model_bytes // 2) for row in found] == [0] * 3
    assert sum(row["weights/bytes"] for row in found) >= 2 * model_bytes
    taken = [row for row in found if row["weights/bytes"]]
    assert all(row["weights/copied_bytes"] == row["weights/bytes"] for row in taken)
    assert all(row["weights/probe_diff"] < 1e-4 for row in found)
    # Steps that are reported together have one peak.
    peaks = [row for row in found if "memory/train_mb" in row]
    assert peaks
    for row in peaks:
        assert row["memory/generate_mb"] - row["memory/train_mb"] > 128

"""A colocated run of ranks that have a part of the parameters each, within a budget of memory."""

from pathlib import Path

import pytest

from tests.e2e.launched import Launched, rows
from tests.toy import write_toy

pytestmark = pytest.mark.slow
MODEL_BYTES = 4 * (
    32 * 64 + 2 * (2 * (64 * 64 + 64) + 2 * (64 * 32 + 32) + 3 * 64 * 128 + 128) + 64
)


def test_weights_come_once_from_the_other_rank_and_keys_and_values_make_room(
    tmp_path: Path,
) -> None:
    toy = write_toy(tmp_path)
    words = [
        *("train", str(toy / "recipe.yaml"), f"run.dir={toy}/runs", "run.name=first"),
        *("placement.mode=colocated", "trainer.world_size=2", "trainer.zero_stage=3"),
        *("pipeline.max_staleness=0", "generator.kv_cache_mb=256", "placement.memory_mb=260"),
        *("weights.probe_every=1", "run.steps=3"),
    ]
    run = Launched(words, toy)
    assert run.wait() == 0, run.output
    assert "the KV cache is released while it trains" in " ".join(run.output.split())
    found = rows(toy / "runs" / "first")
    # Half of it for each of two ranks, of so many versions as were taken up since the last row.
    assert [row["weights/bytes"] % (MODEL_BYTES // 2) for row in found] == [0] * 3
    assert sum(row["weights/bytes"] for row in found) >= 3 * MODEL_BYTES
    assert all(row["weights/probe_diff"] < 1e-4 for row in found)
    last = found[-1]
    assert last["memory/generate_mb"] - last["memory/train_mb"] > 128

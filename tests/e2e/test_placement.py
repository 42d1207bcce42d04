"""Placement never changes the result: pipelined and one stage at a time, same seeds, on-policy."""

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.launched import Launched, rows
from tests.toy import write_toy

pytestmark = pytest.mark.slow

SAME = ("reward/mean", "rollout/length_mean", "rollout/length_max", "policy/entropy", "loss/policy")


def run(toy: Path, mode: str) -> list[dict[str, Any]]:
    words = ["train", str(toy / "recipe.yaml"), f"run.dir={toy}/runs", f"run.name={mode}"]
    launched = Launched(
        [
            *words,
            f"placement.mode={mode}",
            "pipeline.max_staleness=0",
            "pipeline.micro_batch_tokens=64",
            "run.steps=5",
            "trainer.lr=1e-3",
            "evaluation.at_start=false",
            "evaluation.at_end=false",
            "checkpoint.at_end=false",
        ],
        toy,
    )
    assert launched.wait() == 0, launched.output
    return rows(toy / "runs" / mode)


def test_sequential_and_pipelined_runs_are_the_same_run(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    toy = write_toy(tmp_path_factory.mktemp("toy"))
    pipelined, sequential = run(toy, "disaggregated"), run(toy, "sequential")
    for one, other in zip(pipelined, sequential, strict=True):
        for name in SAME:
            assert one[name] == pytest.approx(other[name], rel=1e-4, abs=1e-6), name
        assert one["staleness/max"] == other["staleness/max"] == 0

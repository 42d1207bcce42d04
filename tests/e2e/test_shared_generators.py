"""Runs whose trainer splits layers over its ranks, which fill their generators, or parts of one."""

import json
import os
import re
import signal
from pathlib import Path

import pytest

from streamrl.engines.models.forward import load_skeleton
from tests.e2e.launched import Launched, events, rows
from tests.e2e.recorded import trained
from tests.e2e.test_placements import ON_POLICY, check_same
from tests.toy import write_toy

pytestmark = pytest.mark.slow

STEPS = 3
MESH = ["trainer.backend=torch", "trainer.world_size=2", "trainer.tensor_parallel=2"]
SHARED = ["placement.mode=colocated", "generator.tensor_parallel=2"]
MODES = {
    "sequential": ["placement.mode=sequential"],
    "shared": SHARED,
    # A generator for each rank, which is sent the other's half of every layer.
    "whole": ["placement.mode=colocated"],
}
# Keys and values make room for training, on both ranks, and are there again to generate.
TIGHT = [*("generator.kv_cache_mb=56", "placement.memory_mb=60", "pipeline.micro_batch_tokens=512")]


def test_generators_of_ranks_that_split_layers_sample_the_same_tokens_and_the_losses_are_the_same(
    tmp_path: Path,
) -> None:
    folder = write_toy(tmp_path)
    runs = [
        [
            *ON_POLICY,
            *MESH,
            *settings,
            f"run.steps={STEPS}",
            f"run.dir={folder}/runs",
            f"run.name={mode}",
        ]
        for mode, settings in MODES.items()
    ]
    words = [str(folder / "recipe.yaml"), str(folder), *map(json.dumps, runs)]
    run = Launched(words, folder, module="tests.e2e.recorded")
    assert run.wait() == 0, run.output
    assert run.orphans() == []
    alone, *others = (trained(folder, mode) for mode in MODES)
    assert {version for version, _, _ in alone} == set(range(STEPS))
    assert others == [alone, alone]
    first, shared, whole = (rows(folder / "runs" / mode) for mode in MODES)
    check_same(first, shared)
    check_same(first, whole)
    # Each rank serves what it trains; rows of so small a vocabulary are all on one.
    for name in ("weights/bytes", "weights/copied_bytes"):
        assert not any(row[name] for row in shared)
    # Columns do not lie there in one piece.
    named = load_skeleton(str(folder / "model")).named_parameters()
    columns = sum(4 * p.numel() for name, p in named if "o_proj" in name or "down_proj" in name)
    copied = [row["weights/copied_bytes"] or 0 for row in whole]
    assert sum(copied) and {num_bytes % columns for num_bytes in copied} == {0}
    # A pull may end after its step has been noted, and is then in the next row.
    assert sum(row["weights/bytes"] for row in whole) > 0


@pytest.mark.parametrize(
    ("sent", "told"),
    [(signal.SIGKILL, "died|which leads it, has ended"), (signal.SIGSTOP, "does not answer")],
    ids=["killed", "stopped"],
)
def test_where_a_rank_that_shares_a_generator_is_killed_or_stopped_the_run_ends_and_says_so(
    tmp_path: Path, sent: signal.Signals, told: str
) -> None:
    folder = write_toy(tmp_path)
    run_dir = folder / "runs" / "hit"
    words = ["train", str(folder / "recipe.yaml"), *MESH, *SHARED, *TIGHT, "run.steps=100000"]
    around = ["pipeline.max_staleness=1", "placement.slice_s=0.05", "generator.max_new_tokens=60"]
    waits = ["pipeline.stall_s=30", "trainer.collective_timeout_s=15"]
    place = [f"run.dir={run_dir.parent}", "run.name=hit"]
    run = Launched([*words, *around, *waits, *place], folder)
    run.until(lambda: len(rows(run_dir)) > 2)
    notes = [event["text"] for event in events(run_dir, "note")]
    assert any("the KV cache is released while it trains" in note for note in notes)
    assert any("its shard of its group's generator; ranks 0-1" in note for note in notes)
    os.kill(run.named("ray::HybridActor")[-1].pid, sent)
    assert run.wait(timeout_s=240.0) == 1, run.output
    last = run.output.strip().splitlines()[-1]
    assert last.startswith("streamrl: ") and re.search(told, last)
    who = ("trainer-", "generator-", "rank ")
    assert any(f"{what}{number}" in last for what in who for number in range(2))
    if sent == signal.SIGSTOP:
        # Who waited for it may be named as well, but after it.
        process = r"the process of generator-(\d) and trainer-\1 does not answer; "
        assert re.match(rf"streamrl: {process}(?!the process)", last), last
    assert "Traceback" not in run.output
    assert run.orphans() == []

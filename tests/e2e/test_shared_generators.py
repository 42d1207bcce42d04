"""Colocated runs of a tensor-parallel trainer: a generator per rank, or one for all ranks."""

import os
import re
import signal
from pathlib import Path

import pytest

from streamrl.engines.models.forward import load_skeleton
from tests.e2e.launched import events, rows, train
from tests.e2e.recorded import play
from tests.e2e.test_placements import ON_POLICY, check_same, check_tokens
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
# The KV cache has to be released for training, on both ranks.
TIGHT = [*("generator.kv_cache_mb=56", "placement.memory_mb=60", "pipeline.micro_batch_tokens=512")]


def test_tensor_parallel_colocated_runs_have_the_same_tokens_and_losses(tmp_path: Path):
    folder = write_toy(tmp_path)
    common = [*ON_POLICY, *MESH, f"run.steps={STEPS}"]
    runs = play(folder, {mode: [*common, *settings] for mode, settings in MODES.items()})
    check_tokens([run.trained for run in runs.values()], STEPS)
    first, shared, per_rank = (run.rows for run in runs.values())
    check_same(first, shared)
    check_same(first, per_rank)
    # Each rank serves the layers that it trains. vLLM keeps rows of so small a vocabulary on one
    # rank, and the trainer half of them on each.
    assert not any(row["weights/copied_bytes"] for row in shared)
    named = list(load_skeleton(str(folder / "model")).named_parameters())
    halves = sum(2 * p.numel() for name, p in named if "embed_tokens" in name or "lm_head" in name)
    sent = [row["weights/bytes"] or 0 for row in shared]
    assert sum(sent) and {num_bytes % halves for num_bytes in sent} == {0}
    # Parameters split by columns are not contiguous in memory, so they are copied.
    columns = sum(4 * p.numel() for name, p in named if "o_proj" in name or "down_proj" in name)
    copied = [row["weights/copied_bytes"] or 0 for row in per_rank]
    assert sum(copied) and {num_bytes % columns for num_bytes in copied} == {0}
    # A pull may end after its step was logged, and is then in the next row.
    assert sum(row["weights/bytes"] for row in per_rank) > 0


@pytest.mark.parametrize(
    ("sent", "message"),
    [(signal.SIGKILL, "died|which leads it, has ended"), (signal.SIGSTOP, "does not answer")],
    ids=["killed", "stopped"],
)
def test_a_killed_or_stopped_rank_of_a_shared_generator_ends_the_run_and_is_named(
    tmp_path: Path, sent: signal.Signals, message: str
):
    folder = write_toy(tmp_path)
    words = [*MESH, *SHARED, *TIGHT, "run.steps=100000"]
    around = ["pipeline.max_staleness=1", "placement.slice_s=0.05", "generator.max_new_tokens=60"]
    waits = ["pipeline.stall_s=30", "trainer.collective_timeout_s=15"]
    run, run_dir = train(folder, "hit", *words, *around, *waits)
    run.until(lambda: len(rows(run_dir)) > 2)
    notes = [event["text"] for event in events(run_dir, "note")]
    assert any("the KV cache is released while it trains" in note for note in notes)
    assert any("weights: into the generator of each rank" in note for note in notes)
    os.kill(run.named("ray::HybridActor")[-1].pid, sent)
    last = run.fail()
    assert re.search(message, last)
    assert re.search("(trainer-|generator-|rank )[01]", last)
    if sent == signal.SIGSTOP:
        # A process that waited for it may be named as well, but after it.
        process = r"the process of generator-(\d) and trainer-\1 does not answer; "
        assert re.match(rf"streamrl: {process}(?!the process)", last), last

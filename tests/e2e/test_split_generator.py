"""A tensor-parallel generator restarts after one of its two processes is killed."""

from pathlib import Path

import pytest

from tests.e2e.launched import events, rows, train
from tests.toy import write_toy

pytestmark = pytest.mark.slow

STEPS = 120


def test_a_split_generator_restarts_after_a_process_is_killed(tmp_path: Path):
    toy = write_toy(tmp_path)
    run, run_dir = train(toy, "split", f"run.steps={STEPS}", "generator.tensor_parallel=2")
    run.until(lambda: len(rows(run_dir)) > 1)
    ranks = run.named("VLLM::Worker")
    assert len(ranks) == 2
    ranks[1].kill()
    run.finish()
    (death,) = events(run_dir, "died")
    assert death["actor"] == "generator-0"
    assert "a process of the split engine has died" in death["reason"]
    last = rows(run_dir)[-1]
    assert last["step"] == STEPS
    assert last["ledger/trained"] == last["ledger/admitted"]

"""Runs that end before their last step: a rank is killed, the reward fails, or while they start."""

import os
import signal
from pathlib import Path

import pytest

from tests.e2e.launched import events, rows, train

pytestmark = pytest.mark.slow
LONG = ["run.steps=100000"]


def test_a_killed_trainer_among_all_roles_is_named(toy: Path):
    overrides = ["algorithm.name=dapo", "algorithm.kl_coef=0.01", "generator.replicas=2"]
    overrides += ["trainer.world_size=2", "trainer.zero_stage=3", "queue.shards=3"]
    overrides += ["pipeline.max_staleness=0", "evaluation.at_start=false"]
    run, run_dir = train(toy, "wide", *LONG, *overrides)
    run.until(lambda: len(rows(run_dir)) >= 2)
    os.kill(run.actor("TrainerActor").pid, signal.SIGKILL)
    last = run.fail()
    assert "trainer-" in last and "died" in last
    metrics = rows(run_dir)
    assert {row["staleness/max"] for row in metrics} == {0}
    assert metrics[0]["policy/kl_ref"] == pytest.approx(0.0, abs=1e-4), "the base is its reference"
    assert metrics[1]["policy/kl_ref"] > 0
    assert "idle/reference" in metrics[0]
    assert "worker processes have been started" not in run.output
    assert metrics[1]["weights/skew_max"] <= 1


SPOILED = """
import os

def score(prompt, completion):
    if os.path.exists(__file__ + ".spoiled"):
        raise ValueError("no verdict")
    return 1.0
"""


def test_a_reward_that_fails_for_every_group_ends_the_run_with_a_checkpoint(toy: Path):
    path = toy / "spoiled.py"
    path.write_text(SPOILED)
    reward = f"rewards=[{{kind: function, path: {path}, function: score, attempts: 1}}]"
    run, run_dir = train(toy, "spoiled", *LONG, reward)
    run.until(lambda: len(rows(run_dir)) >= 2)
    Path(f"{path}.spoiled").touch()
    last = run.fail()
    steps, drops = rows(run_dir)[-1]["step"], len(events(run_dir, "drop"))
    assert last.startswith(f"streamrl: step {steps} has dropped ") and "spoiled.py:6" in last
    assert "more than 40" in last and "as reward_error" in last
    assert drops > 40, "every drop is an event"
    closing = events(run_dir, "close")[-1]["ledger"]
    assert f"dropped {drops} +" in closing and closing in " ".join(run.output.split())
    assert (run_dir / "checkpoints" / f"step_{steps:06d}" / "state.json").is_file()


def test_ctrl_c_during_start_up_ends_cleanly(toy: Path):
    run, run_dir = train(toy, "early", *LONG)
    run.until(lambda: "starting" in run.output)
    run.stop()
    assert not run_dir.exists(), "there is nothing to resume"


def test_sigterm_during_start_up_restores_the_run_that_overwrite_would_replace(toy: Path):
    earlier = toy / "runs" / "earlier"
    earlier.mkdir(parents=True)
    (earlier / "config.yaml").write_text("old")
    run, _ = train(toy, "earlier", *LONG, "run.overwrite=true")
    run.until(lambda: "starting" in run.output)
    run.process.terminate()
    assert run.wait(timeout_s=30.0) == 130, run.output
    assert run.orphans() == []
    assert run.output.splitlines()[-1] == "streamrl: interrupted"
    assert (earlier / "config.yaml").read_text() == "old"
    assert not list(earlier.parent.glob(".*")), "nothing is left beside it"

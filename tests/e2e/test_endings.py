"""Runs that end before their last step: a rank is killed, the reward fails, or while they start."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.e2e.launched import Launched, events, rows
from tests.toy import write_toy

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy(tmp_path_factory.mktemp("toy"))


def launch(toy: Path, name: str, *overrides: str) -> tuple[Launched, Path]:
    words = ["train", str(toy / "recipe.yaml"), f"run.dir={toy}/runs", f"run.name={name}"]
    run = Launched([*words, "run.steps=100000", *overrides], toy)
    return run, toy / "runs" / name


def test_a_killed_trainer_among_all_roles_is_named(toy: Path) -> None:
    run, run_dir = launch(
        toy,
        "wide",
        "algorithm.name=dapo",
        "algorithm.kl_coef=0.01",
        "generator.replicas=2",
        "trainer.world_size=2",
        "trainer.zero_stage=3",
        "queue.shards=3",
        "pipeline.max_staleness=0",
        "weights.bucket_mb=1",
        "evaluation.at_start=false",
    )
    run.until(lambda: len(rows(run_dir)) >= 2)
    os.kill(run.actor("TrainerActor").pid, signal.SIGKILL)
    check_named(run, run.wait(timeout_s=240.0), "trainer-")
    found = rows(run_dir)
    assert {row["staleness/max"] for row in found} == {0}
    assert found[0]["policy/kl_ref"] == pytest.approx(0.0, abs=1e-4), "the base is its reference"
    assert found[1]["policy/kl_ref"] > 0
    assert "idle/reference" in found[0]
    assert "worker processes have been started" not in run.output
    assert found[1]["weights/skew_max"] <= 1


SPOILED = """
import os

def score(prompt, completion):
    if os.path.exists(__file__ + ".spoiled"):
        raise ValueError("no verdict")
    return 1.0
"""


def test_a_reward_that_fails_for_every_group_ends_the_run_which_is_saved(toy: Path) -> None:
    path = toy / "spoiled.py"
    path.write_text(SPOILED)
    reward = f"rewards=[{{kind: function, path: {path}, function: score, attempts: 1}}]"
    run, run_dir = launch(toy, "spoiled", reward, "queue.max_drop_rounds=2")
    run.until(lambda: len(rows(run_dir)) >= 2)
    Path(f"{path}.spoiled").touch()
    assert run.wait(timeout_s=240.0) == 1, run.output
    steps, drops = rows(run_dir)[-1]["step"], len(events(run_dir, "drop"))
    last = run.output.strip().splitlines()[-1]
    assert last.startswith(f"streamrl: step {steps} has dropped ") and "spoiled.py:6" in last
    assert "more than 8 (queue.max_drop_rounds)" in last and "as reward_error" in last
    assert drops > 8, "the driver was told of every one"
    assert (run_dir / "checkpoints" / f"step_{steps:06d}" / "state.json").is_file()


def check_named(run: Launched, exit_code: int, name: str) -> None:
    assert exit_code == 1, run.output
    last = run.output.strip().splitlines()[-1]
    assert last.startswith("streamrl: ") and name in last and "died" in last
    assert "Traceback" not in run.output
    assert run.orphans() == []


def test_ctrl_c_during_start_up_ends_cleanly(toy: Path) -> None:
    run, run_dir = launch(toy, "early")
    run.until(lambda: "starting" in run.output)
    started = time.monotonic()
    run.interrupt()
    assert run.wait() == 130, run.output
    assert time.monotonic() - started < 30
    assert run.orphans() == []
    assert "Traceback" not in run.output
    assert not run_dir.exists(), "there is nothing to resume"


def test_sigterm_during_start_up_gives_back_the_run_that_was_to_be_replaced(toy: Path) -> None:
    earlier = toy / "runs" / "earlier"
    earlier.mkdir(parents=True)
    (earlier / "config.yaml").write_text("old")
    run, _ = launch(toy, "earlier", "run.overwrite=true")
    run.until(lambda: "starting" in run.output)
    run.process.terminate()
    assert run.wait(timeout_s=30.0) == 130, run.output
    assert run.orphans() == []
    assert run.output.splitlines()[-1] == "streamrl: interrupted"
    assert (earlier / "config.yaml").read_text() == "old"
    assert not list(earlier.parent.glob(".*")), "nothing is left beside it"

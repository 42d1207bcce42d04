"""A run that is not left alone: its reward fails, it is interrupted, resumed, and killed."""

import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.launched import Launched, events, rows
from tests.toy import write_toy

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy(tmp_path_factory.mktemp("toy"))


SHAKY = """
def score(prompt, completion):
    if prompt.extra_info["index"] % 3 == 0:
        raise ValueError("no verdict")
    return 1.0
"""


def launch(toy: Path, name: str, *overrides: str) -> tuple[Launched, Path]:
    words = ["train", str(toy / "recipe.yaml"), f"run.dir={toy}/runs", f"run.name={name}"]
    run = Launched([*words, "run.steps=100000", *overrides], toy)
    return run, toy / "runs" / name


@dataclass(frozen=True)
class Stopped:
    """A run with a reward that fails for every third prompt, after Ctrl-C."""

    run: Launched
    run_dir: Path
    exit_code: int
    seconds: float
    rows: list[dict[str, Any]]
    state: dict[str, Any]


@pytest.fixture(scope="module")
def stopped(toy: Path) -> Stopped:
    (toy / "shaky.py").write_text(SHAKY)
    reward = f"rewards=[{{kind: function, path: {toy}/shaky.py, function: score}}]"
    run, run_dir = launch(toy, "stopped", reward)
    run.until(lambda: bool(found := rows(run_dir)) and found[-1]["ledger/dropped"] > 1)
    started = time.monotonic()
    run.interrupt()
    exit_code = run.wait()
    seconds = time.monotonic() - started
    (saved,) = (run_dir / "checkpoints").glob("step_*")
    state = json.loads((saved / "state.json").read_text())
    return Stopped(run, run_dir, exit_code, seconds, rows(run_dir), state)


def test_ctrl_c_saves_and_ends_within_half_a_minute(stopped: Stopped) -> None:
    assert stopped.exit_code == 130, stopped.run.output
    # The run itself has 12 s for it; then its processes end.
    assert stopped.seconds < 30
    assert stopped.run.orphans() == []
    assert "Traceback" not in stopped.run.output
    assert "interrupted" in stopped.run.output
    assert stopped.state["version"] == stopped.rows[-1]["step"]


def test_a_reward_that_cannot_be_computed_is_counted_and_never_a_zero(stopped: Stopped) -> None:
    assert all(row["reward/mean"] == 1.0 for row in stopped.rows)
    last = stopped.rows[-1]
    assert last["drops/reward_error"] == last["ledger/dropped"] > 1
    assert last["ledger/trained"] == 4 * last["step"]
    ended = last["ledger/trained"] + last["ledger/dropped"]
    assert last["ledger/admitted"] == ended + last["ledger/in_flight"]
    drop = events(stopped.run_dir, "drop")[0]
    assert drop["cause"] == "reward_error"
    assert "no verdict" in drop["reason"] and "shaky.py" in drop["reason"]


@pytest.fixture(scope="module")
def killed(stopped: Stopped) -> tuple[Launched, int]:
    """The run goes on for two steps; then its generator is killed, and not started again."""
    words = ["train", "--resume", str(stopped.run_dir), "run.max_restarts=0"]
    run = Launched(words, stopped.run_dir.parent)
    run.until(lambda: len(rows(stopped.run_dir)) >= len(stopped.rows) + 2)
    os.kill(run.actor("GeneratorActor").pid, signal.SIGKILL)
    return run, run.wait(timeout_s=240.0)


def test_an_interrupted_run_goes_on_without_gap_or_repeat(
    stopped: Stopped, killed: tuple[Launched, int]
) -> None:
    found = rows(stopped.run_dir)
    assert [row["step"] for row in found] == list(range(1, len(found) + 1))
    assert found[: len(stopped.rows)] == stopped.rows
    (drawn,) = stopped.state["prompts"]["drawn"]
    assert drawn == stopped.state["ledger"]["admitted"]
    before, after = stopped.rows[-1], found[len(stopped.rows)]
    assert after["ledger/trained"] == before["ledger/trained"] + 4
    assert after["ledger/dropped"] >= before["ledger/dropped"]
    assert after["policy/lr"] == before["policy/lr"] > 0


def test_a_killed_generator_that_may_not_come_back_ends_the_run_and_is_named(
    stopped: Stopped, killed: tuple[Launched, int]
) -> None:
    run, exit_code = killed
    check_named(run, exit_code, "generator-0")
    (failed,) = events(stopped.run_dir, "failed")
    assert "generator-0" in failed["error"]


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

"""How a run ends when it is not left alone: Ctrl-C, a killed actor, a reward that fails."""

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


def test_ctrl_c_saves_and_ends_within_fifteen_seconds_and_the_run_goes_on(toy: Path) -> None:
    run, run_dir = launch(toy, "stopped")
    run.until(lambda: len(rows(run_dir)) >= 3)
    started = time.monotonic()
    run.interrupt()
    assert run.wait() == 130, run.output
    assert time.monotonic() - started < 15
    assert run.orphans() == []
    assert "Traceback" not in run.output
    assert "interrupted" in run.output
    found = rows(run_dir)
    (saved,) = (run_dir / "checkpoints").glob("step_*")
    assert saved.name == f"step_{found[-1]['step']:06d}"

    steps = found[-1]["step"] + 2
    again = Launched(["train", "--resume", str(run_dir), f"run.steps={steps}"], toy)
    assert again.wait() == 0, again.output
    last = rows(run_dir)[-1]
    assert last["step"] == steps
    assert last["ledger/admitted"] == last["ledger/trained"] == 4 * steps


def test_ctrl_c_during_start_up_ends_cleanly(toy: Path) -> None:
    run, _ = launch(toy, "early")
    run.until(lambda: "starting" in run.output)
    started = time.monotonic()
    run.interrupt()
    assert run.wait() == 130, run.output
    assert time.monotonic() - started < 15
    assert run.orphans() == []
    assert "Traceback" not in run.output


@pytest.mark.parametrize("kind", ["GeneratorActor", "TrainerActor"])
def test_a_killed_actor_ends_the_run_and_is_named(toy: Path, kind: str) -> None:
    run, run_dir = launch(toy, f"killed-{kind}")
    run.until(lambda: len(rows(run_dir)) >= 1)
    os.kill(run.actor(kind).pid, signal.SIGKILL)
    assert run.wait(timeout_s=90.0) == 1, run.output
    role = kind.removesuffix("Actor").lower()
    last = run.output.strip().splitlines()[-1]
    assert last.startswith("streamrl: ") and f"{role}-0" in last and "died" in last
    assert "Traceback" not in run.output
    assert run.orphans() == []
    (failed,) = events(run_dir, "failed")
    assert f"{role}-0" in failed["error"]


def test_a_reward_that_cannot_be_computed_is_counted_and_never_a_zero(toy: Path) -> None:
    (toy / "shaky.py").write_text(
        "def score(prompt, completion):\n"
        "    if prompt.extra_info['index'] % 3 == 0:\n"
        "        raise ValueError('no verdict')\n"
        "    return 1.0\n"
    )
    run, run_dir = launch(
        toy,
        "shaky",
        f"rewards=[{{kind: function, path: {toy}/shaky.py, function: score}}]",
        "run.steps=4",
        "evaluation.at_start=false",
        "evaluation.at_end=false",
    )
    assert run.wait() == 0, run.output
    found = rows(run_dir)
    assert all(row["reward/mean"] == 1.0 for row in found)
    last = found[-1]
    assert last["drops/reward_error"] == last["ledger/dropped"] > 0
    assert last["ledger/trained"] == 16
    drop = events(run_dir, "drop")[0]
    assert drop["cause"] == "reward_error"
    assert "no verdict" in drop["reason"] and "shaky.py" in drop["reason"]
    assert last["ledger/admitted"] == 16 + last["ledger/dropped"] + last["ledger/in_flight"]

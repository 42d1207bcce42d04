"""A colocated run that is not left alone: asked for more, interrupted, resumed, killed, moved."""

import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from streamrl.buffer.account import take_account
from streamrl.buffer.books import history
from streamrl.checkpoint import BOOKS, journal_dir
from streamrl.engines.forward import load_skeleton
from tests.e2e.launched import Launched, events, rows
from tests.toy import write_toy

pytestmark = pytest.mark.slow

SHAKY = """
def score(prompt, completion):
    if prompt.extra_info["index"] % 3 == 0:
        raise ValueError("no verdict")
    return len(completion) // 8
"""
STEPS = 100000
APART = ["placement.mode=disaggregated", "placement.cpus=8"]


@dataclass(frozen=True)
class Ended:
    """A run, or a part of one, that has ended."""

    run: Launched
    code: int
    seconds: float
    rows: list[dict[str, Any]]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy(tmp_path_factory.mktemp("toy")) / "runs" / "shared"


@pytest.fixture(scope="module")
def asked(run_dir: Path) -> list[Launched]:
    """Requests to the run while it was under way, answered."""
    return []


@pytest.fixture(scope="module")
def stopped(run_dir: Path, asked: list[Launched]) -> Ended:
    """One CPU slot, groups that are filtered and a reward that fails for some, and rollouts that
    are paused while others have the pool; then Ctrl-C."""
    toy = run_dir.parents[1]
    (toy / "shaky.py").write_text(SHAKY)
    words = ["train", str(toy / "recipe.yaml"), f"run.dir={toy}/runs", f"run.name={run_dir.name}"]
    reward = f"rewards=[{{kind: function, path: {toy}/shaky.py, function: score}}]"
    around = ["evaluation.every=3", "filter.kind=equal_rewards", reward]
    # Rollouts that end at very different times, and others that want the pool meanwhile.
    tail = ["generator.max_new_tokens=120", "pipeline.micro_batch_tokens=512"]
    tail += ["placement.slice_s=0.05", "pipeline.max_staleness=1"]
    run = Launched([*words, f"run.steps={STEPS}", "placement.cpus=1", *around, *tail], toy)

    def has_lost_groups() -> bool:
        last = (rows(run_dir) or [{}])[-1]
        return last.get("ledger/filtered", 0) > 1 < last["ledger/dropped"]

    def has_paused() -> bool:
        return sum(row["weights/interrupted"] or 0 for row in rows(run_dir)) > 0

    # A rollout that a version came in the middle of was paused for the update, and went on.
    run.until(lambda: len(rows(run_dir)) > 4 and has_lost_groups() and has_paused())
    request = Launched(["scale", str(run_dir), "--generators", "2"], toy)
    request.wait(timeout_s=120.0)
    asked.append(request)
    started = time.monotonic()
    run.interrupt()
    code = run.wait()
    return Ended(run, code, time.monotonic() - started, rows(run_dir))


@pytest.fixture(scope="module")
def killed(stopped: Ended, run_dir: Path) -> Ended:
    """The run goes on on one slot, for two steps; then the process of trainer and generator is
    killed."""
    run = _resume(run_dir, "placement.mode=auto", "placement.cpus=1")
    run.until(lambda: len(rows(run_dir)) >= len(stopped.rows) + 2)
    os.kill(run.actor("HybridActor").pid, signal.SIGKILL)
    return Ended(run, run.wait(timeout_s=240.0), 0.0, rows(run_dir))


@pytest.fixture(scope="module")
def finished(killed: Ended, run_dir: Path) -> Ended:
    """What is left after that is trained with devices for every stage: two steps more."""
    steps = len(killed.rows) + 2
    run = _resume(run_dir, *APART, f"run.steps={steps}")
    return Ended(run, run.wait(), 0.0, rows(run_dir))


def _resume(run_dir: Path, *overrides: str) -> Launched:
    return Launched(["train", "--resume", str(run_dir), *overrides], run_dir.parent)


def test_where_there_is_one_slot_auto_shares_it_and_says_so_in_one_line(stopped: Ended) -> None:
    text = " ".join(stopped.run.output.split())
    assert "placement: colocated, as for disaggregated the run needs 3 CPU slots =" in text
    assert "the cluster has 1" in text


def test_ctrl_c_saves_and_ends_within_half_a_minute(stopped: Ended, run_dir: Path) -> None:
    assert stopped.code == 130, stopped.run.output
    # As wherever it runs: see test_endings.py.
    assert stopped.seconds < 30
    assert stopped.run.orphans() == []
    assert "Traceback" not in stopped.run.output
    assert (run_dir / "checkpoints" / f"step_{len(stopped.rows):06d}" / "state.json").is_file()


def test_a_reward_that_cannot_be_computed_is_counted_and_never_a_zero(stopped: Ended) -> None:
    last = stopped.rows[-1]
    assert last["drops/reward_error"] == last["ledger/dropped"] > 1
    ended = last["ledger/trained"] + last["ledger/filtered"] + last["ledger/dropped"]
    assert last["ledger/admitted"] == ended + last["ledger/in_flight"]


def test_it_evaluates_in_turn_with_everything_else(stopped: Ended) -> None:
    assert 0 <= stopped.rows[2]["eval/pass_at_1"] <= 1
    assert "eval/pass_at_1" not in stopped.rows[1]


def test_its_generators_cannot_be_scaled(stopped: Ended, asked: list[Launched]) -> None:
    (request,) = asked
    assert request.process.returncode == 2
    assert request.output == (
        "streamrl: placement.mode=colocated: each of trainer.world_size=1 ranks has a generator in"
        " its process; generators cannot be scaled\n"
    )


def test_a_killed_process_of_trainer_and_generator_ends_the_run_and_is_named(
    killed: Ended, run_dir: Path
) -> None:
    assert killed.code == 1, killed.run.output
    last = killed.run.output.strip().splitlines()[-1]
    assert last.startswith("streamrl: ") and "trainer-0" in last and "died" in last
    assert "Traceback" not in killed.run.output
    assert killed.run.orphans() == []
    assert len(events(run_dir, "failed")) == 1


def test_it_goes_on_where_every_stage_has_devices_of_its_own(
    killed: Ended, finished: Ended
) -> None:
    here, there = killed.rows, finished.rows[len(killed.rows) :]
    assert not any(row["weights/bytes"] for row in here)
    assert any(row["weights/bytes"] for row in there)
    # A row has none if no version was taken up since the one before.
    copied = {row["weights/copied_bytes"] for row in here}
    assert copied <= {0, None} and 0 in copied
    assert {row["weights/copied_bytes"] for row in there} == {None}, "nobody counts them"


def test_wherever_it_went_on_no_step_is_missing_and_every_prompt_is_trained_once(
    finished: Ended, run_dir: Path
) -> None:
    assert finished.code == 0, finished.run.output
    assert [row["step"] for row in finished.rows] == list(range(1, len(finished.rows) + 1))
    assert max(row["staleness/max"] for row in finished.rows) <= 1
    account = take_account(history(journal_dir(run_dir, BOOKS)))
    assert not account.problems
    assert len(account.trained) == len(set(account.trained)) == 4 * len(finished.rows)
    saved = run_dir / "checkpoints" / f"step_{len(finished.rows):06d}" / "state.json"
    state = json.loads(saved.read_text())
    assert state["version"] == len(finished.rows)


def test_a_generator_of_another_type_has_all_of_each_version_copied(tmp_path: Path) -> None:
    toy = write_toy(tmp_path)
    words = ["train", str(toy / "recipe.yaml"), f"run.dir={toy}/runs", "run.name=cast"]
    around = ["placement.mode=colocated", "generator.dtype=bfloat16", "pipeline.max_staleness=0"]
    run = Launched([*words, *around, "run.steps=2"], toy)
    assert run.wait() == 0, run.output
    copied = [row["weights/copied_bytes"] or 0 for row in rows(toy / "runs" / "cast")]
    parameters = load_skeleton(str(toy / "model")).parameters()
    model_bytes = sum(2 * parameter.numel() for parameter in parameters)
    assert sum(copied) and {num_bytes % model_bytes for num_bytes in copied} == {0}
    assert [row["weights/bytes"] for row in rows(toy / "runs" / "cast")] == [0, 0]

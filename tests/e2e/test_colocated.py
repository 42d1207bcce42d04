"""A colocated run that is interrupted, resumed, killed, moved to other placements, and healed."""

import json
import os
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.launched import Launched, audit, events, rows, train
from tests.toy import write_toy

SHAKY = """
def score(prompt, completion):
    if prompt.extra_info["index"] % 3 == 0:
        raise ValueError("no verdict")
    return 1 + len(completion) // 8
"""
# The last two characters, which are often a program; its weight is 0.
PROGRAM = r"{kind: code, weight: 0, extract: '(..)\Z'}"
NO_INPUT_OR_OUTPUT = json.dumps({"inputs": [""], "outputs": [""]})
STEPS = 100000
APART = ["placement.mode=disaggregated", "placement.cpus=8"]


@dataclass(frozen=True)
class Ended:
    """A command of the run that has ended.

    `state` is that of the newest checkpoint, `scale` a `streamrl scale` while it ran.
    """

    run: Launched
    code: int
    rows: list[dict[str, Any]]
    failures: list[dict[str, Any]]
    state: dict[str, Any]
    seconds: float
    scale: Launched | None = None

    @classmethod
    def wait_for(cls, run: Launched, run_dir: Path) -> "Ended":
        started = time.monotonic()
        code = run.wait()
        seconds = time.monotonic() - started
        newest = max((run_dir / "checkpoints").glob("step_*"))
        state = json.loads((newest / "state.json").read_text())
        return cls(run, code, rows(run_dir), events(run_dir, "failed"), state, seconds)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run's directory, beside a toy whose ground truths are tests of a program."""
    toy = write_toy(tmp_path_factory.mktemp("toy"))
    toy_rows = list(map(json.loads, (toy / "rows.jsonl").read_text().splitlines()))
    for row in toy_rows:
        row["reward_model"]["ground_truth"] = NO_INPUT_OR_OUTPUT
    (toy / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in toy_rows))
    return toy / "runs" / "shared"


@pytest.fixture(scope="module")
def stopped(run_dir: Path) -> Ended:
    """One CPU slot, filtered groups, a reward that fails for some, programs in the sandbox, and
    rollouts that are paused while other stages have the pool; then Ctrl-C."""
    toy = run_dir.parents[1]
    (toy / "shaky.py").write_text(SHAKY)
    reward = f"rewards=[{{kind: function, path: {toy}/shaky.py, function: score}}, {PROGRAM}]"
    around = ["evaluation.every=3", "filter.kind=equal_rewards", reward]
    # Rollouts of very different lengths, while other stages wait for the pool.
    tail = ["generator.max_new_tokens=120", "pipeline.micro_batch_tokens=512"]
    tail += ["placement.slice_s=0.05", "pipeline.max_staleness=1"]
    words = [f"run.steps={STEPS}", "placement.cpus=1", *around, *tail]
    run, _ = train(toy, run_dir.name, *words)

    def has_lost_groups() -> bool:
        last = (rows(run_dir) or [{}])[-1]
        return last.get("ledger/filtered", 0) > 1 < last["ledger/dropped"]

    def has_paused() -> bool:
        return sum(row["weights/interrupted"] or 0 for row in rows(run_dir)) > 0

    # A rollout during which a version was published was paused for the update, and resumed.
    run.until(lambda: len(rows(run_dir)) > 4 and has_lost_groups() and has_paused())
    request = Launched(["scale", str(run_dir), "--generators", "2"], toy)
    request.wait(timeout_s=120.0)
    run.interrupt()
    return replace(Ended.wait_for(run, run_dir), scale=request)


@pytest.fixture(scope="module")
def killed(stopped: Ended, run_dir: Path) -> Ended:
    """A resume on one slot; after two steps the process of trainer and generator is killed."""
    run = _resume(run_dir, "placement.mode=auto", "placement.cpus=1")
    run.until(lambda: len(rows(run_dir)) >= len(stopped.rows) + 2)
    os.kill(run.actor("HybridActor").pid, signal.SIGKILL)
    return Ended.wait_for(run, run_dir)


@pytest.fixture(scope="module")
def finished(killed: Ended, run_dir: Path) -> Ended:
    """A disaggregated resume, trained to its end; its generator is killed once."""
    steps = len(killed.rows) + 12
    run = _resume(run_dir, *APART, f"run.steps={steps}")
    run.until(lambda: len(rows(run_dir)) > len(killed.rows))
    # Forked from a process that has imported vLLM, not started by the raylet.
    forked_from = run.actor("GeneratorActor").parent()
    assert forked_from is not None and "raylet" not in forked_from.name()
    os.kill(run.actor("GeneratorActor").pid, signal.SIGSEGV)
    return Ended.wait_for(run, run_dir)


@pytest.fixture(scope="module")
def given_up(finished: Ended, run_dir: Path) -> Ended:
    """One more resume, whose generator is killed and may not restart."""
    run = _resume(run_dir, *APART, f"run.steps={STEPS}", "run.max_restarts=0")
    run.until(lambda: len(rows(run_dir)) >= len(finished.rows) + 2)
    os.kill(run.actor("GeneratorActor").pid, signal.SIGABRT)
    return Ended.wait_for(run, run_dir)


def _resume(run_dir: Path, *overrides: str) -> Launched:
    return Launched(["train", "--resume", str(run_dir), *overrides], run_dir.parent)


def check_named(ended: Ended, actor: str) -> None:
    """Assert that the command failed in one line that names the actor that died."""
    assert ended.code == 1, ended.run.output
    last = ended.run.output.strip().splitlines()[-1]
    assert last.startswith("streamrl: ") and actor in last and "died" in last
    assert "Traceback" not in ended.run.output
    assert ended.run.orphans() == []
    assert actor in ended.failures[-1]["error"]


def test_the_step_after_an_evaluation_reports_the_wait(stopped: Ended):
    waited = [row for row in stopped.rows if row["time/evaluate_s"] is not None]
    assert [row["step"] for row in waited] == list(range(4, stopped.rows[-1]["step"] + 1, 3))
    assert 0 < waited[0]["time/evaluate_s"] <= waited[0]["time/step_s"]


def test_mode_auto_is_colocated_on_one_slot(stopped: Ended):
    text = " ".join(stopped.run.output.split())
    assert "placement: colocated (disaggregated is impossible: the run needs 3 CPU slots =" in text
    assert "the cluster has 1" in text


def test_ctrl_c_saves_and_ends_within_half_a_minute(stopped: Ended):
    assert stopped.code == 130, stopped.run.output
    # The run has 12 s to save; then its processes end.
    assert stopped.seconds < 30
    assert stopped.run.orphans() == []
    assert "Traceback" not in stopped.run.output
    assert "interrupted" in stopped.run.output
    assert stopped.state["version"] == stopped.rows[-1]["step"] == len(stopped.rows)


def test_a_failed_reward_drops_the_group_and_is_never_0(stopped: Ended, run_dir: Path):
    assert all(row["reward/mean"] >= 1.0 for row in stopped.rows)
    last = stopped.rows[-1]
    assert last["drops/reward_error"] == last["ledger/dropped"] > 1
    assert last["ledger/trained"] == 4 * last["step"]
    ended = last["ledger/trained"] + last["ledger/filtered"] + last["ledger/dropped"]
    assert last["ledger/admitted"] == ended + last["ledger/in_flight"]
    drop = events(run_dir, "drop")[0]
    assert drop["cause"] == "reward_error"
    assert "no verdict" in drop["reason"] and "shaky.py" in drop["reason"]


def test_programs_in_completions_are_run_in_the_sandbox_and_judged(stopped: Ended):
    passed = [row["reward/code"] for row in stopped.rows]
    assert all(0 <= share <= 1 for share in passed)
    assert 0.2 < sum(passed) / len(passed) < 0.95, "some completions are programs"


def test_a_colocated_run_evaluates_on_one_slot(stopped: Ended):
    assert 0 <= stopped.rows[2]["eval/pass_at_1"] <= 1
    assert "eval/pass_at_1" not in stopped.rows[1]


def test_colocated_generators_cannot_be_scaled(stopped: Ended):
    assert stopped.scale is not None and stopped.scale.process.returncode == 2
    assert stopped.scale.output == (
        "streamrl: placement.mode=colocated: each of trainer.world_size=1 ranks has a generator in"
        " its process; generators cannot be scaled\n"
    )


def test_a_killed_process_of_trainer_and_generator_ends_the_run_and_is_named(killed: Ended):
    check_named(killed, "trainer-0")
    assert len(killed.failures) == 1


def test_an_interrupted_run_resumes_without_gap_or_repeat(stopped: Ended, killed: Ended):
    metrics = killed.rows
    assert [row["step"] for row in metrics] == list(range(1, len(metrics) + 1))
    assert metrics[: len(stopped.rows)] == stopped.rows
    (drawn,) = stopped.state["prompts"]["drawn"]
    assert drawn == stopped.state["ledger"]["admitted"]
    before, after = stopped.rows[-1], metrics[len(stopped.rows)]
    assert after["ledger/trained"] == before["ledger/trained"] + 4
    assert after["ledger/dropped"] >= before["ledger/dropped"]
    assert after["policy/lr"] == before["policy/lr"] > 0


@pytest.mark.slow
def test_a_killed_generator_is_restarted(finished: Ended, run_dir: Path):
    assert finished.code == 0, finished.run.output
    assert "generator-0" in [event["actor"] for event in events(run_dir, "died")]
    assert [event["actor"] for event in events(run_dir, "restarted")] == ["generator-0"]
    assert finished.run.orphans() == []
    (crash,) = events(run_dir, "crashed")
    assert (crash["actor"], crash["reason"]) == ("generator-0", "Segmentation fault")
    # Other threads go on, and one that changes its stack may cut the list short.
    assert "most recent call first" in Path(crash["stacks"]).read_text()
    assert list((run_dir / "stacks").iterdir()) == [Path(crash["stacks"])]


@pytest.mark.slow
def test_a_colocated_run_resumes_as_disaggregated(killed: Ended, finished: Ended):
    colocated, disaggregated = killed.rows, finished.rows[len(killed.rows) :]
    assert not any(row["weights/bytes"] for row in colocated)
    assert any(row["weights/bytes"] for row in disaggregated)
    # None if no version was loaded since the row before.
    copied = {row["weights/copied_bytes"] for row in colocated}
    assert copied <= {0, None} and 0 in copied
    assert {row["weights/copied_bytes"] for row in disaggregated} == {None}, "not counted"


@pytest.mark.slow
def test_resumes_miss_no_step_and_train_every_prompt_once(finished: Ended, run_dir: Path):
    assert finished.code == 0, finished.run.output
    assert [row["step"] for row in finished.rows] == list(range(1, len(finished.rows) + 1))
    assert max(row["staleness/max"] for row in finished.rows) <= 1
    assert len(audit(run_dir).trained) == 4 * len(finished.rows)
    assert finished.state["version"] == len(finished.rows)


@pytest.mark.slow
def test_a_killed_generator_that_may_not_restart_ends_the_run(given_up: Ended):
    check_named(given_up, "generator-0")
    last = given_up.run.output.strip().splitlines()[-1]
    assert "generator-0 crashed: Aborted, stacks in " in last

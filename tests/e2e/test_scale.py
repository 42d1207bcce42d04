"""A run of real engines is scaled up and down; then a generator is stopped and a shard killed."""

import os
import signal
from pathlib import Path

import pytest

from tests.e2e.launched import Launched, audit, events, rows, train
from tests.toy import write_toy

pytestmark = pytest.mark.slow


def test_scaling_and_restarts_train_every_prompt_once(tmp_path: Path):
    toy = write_toy(tmp_path)
    words = ["run.steps=100000", "generator.replicas=2", "evaluation.at_start=false"]
    run, run_dir = train(toy, "elastic", *words, "run.silent_s=10")

    def wait_for_5_steps() -> None:
        steps = len(rows(run_dir))
        run.until(lambda: len(rows(run_dir)) >= steps + 5)

    def scale(generators: int) -> str:
        command = Launched(["scale", str(run_dir), "--generators", str(generators)], toy)
        assert command.wait() == 0, f"{command.output}\n{run.output}"
        # A busy machine also shows what the command waits for.
        return command.output.splitlines()[-1]

    wait_for_5_steps()
    output = scale(3)
    assert output.startswith("generators: 2 -> 3 (generator-2 joined, serving version ")
    wait_for_5_steps()
    assert scale(2) == "generators: 3 -> 2 (generator-2 left)"
    wait_for_5_steps()
    assert not events(run_dir, "died") and not events(run_dir, "restarted")
    os.kill(run.actor("GeneratorActor").pid, signal.SIGSTOP)
    run.until(lambda: len(events(run_dir, "restarted")) == 1)
    wait_for_5_steps()
    os.kill(run.actor("ShardActor").pid, signal.SIGKILL)
    run.until(lambda: len(events(run_dir, "restarted")) == 2)
    wait_for_5_steps()
    run.stop()
    saved = run_dir / "checkpoints" / f"step_{len(rows(run_dir)):06d}" / "state.json"
    assert saved.is_file()

    (joined,), (left,) = events(run_dir, "joined"), events(run_dir, "left")
    assert joined["actor"] == left["actor"] == "generator-2"
    assert joined["version"] == int(output.rstrip(")\n").rpartition(" ")[2]) >= 5
    (silent,) = events(run_dir, "silent")
    stopped = silent["actor"]
    assert stopped in ("generator-0", "generator-1")
    reason = f"{stopped} has not answered for 10 s (run.silent_s); it is killed and restarted"
    assert silent["reason"] == reason
    for name in ("died", "restarted"):
        first, second = (event["actor"] for event in events(run_dir, name))
        assert first == stopped and second in ("shard-0", "shard-1")
    text = " ".join(run.output.split())
    for name in ("silent", "died", "restarted"):
        assert f"{name} actor={stopped}" in text
    metrics = rows(run_dir)
    assert max(row["staleness/max"] for row in metrics) <= 1
    assert all(0 <= row["idle/generate"] <= 1 for row in metrics)
    for row in metrics:
        ended = row["ledger/trained"] + row["ledger/filtered"] + row["ledger/dropped"]
        assert row["ledger/admitted"] == ended + row["ledger/in_flight"]
    assert metrics[-1]["ledger/dropped"] == 0
    assert len(audit(run_dir).trained) == 4 * len(metrics)

"""A run that is given another generator and loses one again; one is stopped, and a shard killed.

On the real engines.
"""

import os
import signal
import time
from pathlib import Path

import pytest

from streamrl.buffer.books.ledger_audit import audit_run_log
from streamrl.buffer.books.run_log import read_history
from streamrl.run_dir.checkpoint import RUN_LOG_FOLDER, get_journal_dir
from tests.e2e.launched import Launched, events, rows
from tests.toy import write_toy

pytestmark = pytest.mark.slow


def test_a_generator_joins_and_one_leaves_and_every_prompt_is_trained_once(tmp_path: Path) -> None:
    toy = write_toy(tmp_path)
    run_dir = toy / "runs" / "elastic"
    facts = ["run.steps=100000", "generator.replicas=2", "evaluation.at_start=false"]
    facts += ["run.silent_s=10"]
    recipe = [str(toy / "recipe.yaml"), f"run.dir={toy}/runs", "run.name=elastic"]
    run = Launched(["train", *recipe, *facts], toy)

    def go_on(steps: int) -> None:
        seen = len(rows(run_dir))
        run.until(lambda: len(rows(run_dir)) >= seen + steps)

    def scale(generators: int) -> str:
        command = Launched(["scale", str(run_dir), "--generators", str(generators)], toy)
        code = command.wait()
        assert code == 0, f"{command.output}\n{run.output}"
        return command.output

    go_on(5)
    joined = scale(3)
    assert joined.startswith("generators: 2 -> 3 (generator-2 joined, serving version ")
    go_on(5)
    assert scale(2) == "generators: 3 -> 2 (generator-2 left)\n"
    go_on(5)
    assert not events(run_dir, "died") and not events(run_dir, "restarted")
    os.kill(run.actor("GeneratorActor").pid, signal.SIGSTOP)
    run.until(lambda: len(events(run_dir, "restarted")) == 1)
    go_on(5)
    os.kill(run.actor("ShardActor").pid, signal.SIGKILL)
    run.until(lambda: len(events(run_dir, "restarted")) == 2)
    go_on(5)
    started = time.monotonic()
    run.interrupt()
    assert run.wait() == 130, run.output
    # As in test_colocated.py.
    assert time.monotonic() - started < 30
    assert run.orphans() == []
    saved = run_dir / "checkpoints" / f"step_{len(rows(run_dir)):06d}" / "state.json"
    assert saved.is_file()

    (come,), (gone,) = events(run_dir, "joined"), events(run_dir, "left")
    assert come["actor"] == gone["actor"] == "generator-2"
    assert come["version"] == int(joined.rstrip(")\n").rpartition(" ")[2]) >= 5
    (silent,) = events(run_dir, "silent")
    stopped = silent["actor"]
    assert stopped in ("generator-0", "generator-1")
    assert (
        silent["reason"]
        == f"{stopped} has not answered for 10 s (run.silent_s); it is killed and restarted"
    )
    for name in ("died", "restarted"):
        first, second = (event["actor"] for event in events(run_dir, name))
        assert first == stopped and second in ("shard-0", "shard-1")
    said = " ".join(run.output.split())
    for name in ("silent", "died", "restarted"):
        assert f"{name} actor={stopped}" in said
    found = rows(run_dir)
    assert max(row["staleness/max"] for row in found) <= 1
    assert all(0 <= row["idle/generate"] <= 1 for row in found)
    for row in found:
        ended = row["ledger/trained"] + row["ledger/filtered"] + row["ledger/dropped"]
        assert row["ledger/admitted"] == ended + row["ledger/in_flight"]
    assert found[-1]["ledger/dropped"] == 0
    account = audit_run_log(read_history(get_journal_dir(run_dir, RUN_LOG_FOLDER)))
    assert not account.problems
    assert len(account.trained) == len(set(account.trained)) == 4 * len(found)

"""Run directories: a second owner, forks, resumes with other settings, damage, a full disk."""

import errno
import hashlib
import os
import resource
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from streamrl.buffer.journal import get_segment_path, list_segments, read_segment
from streamrl.cli.main import main
from streamrl.run_dir.checkpoint import (
    get_journal_dir,
    list_checkpoints,
)
from streamrl.run_dir.discarded import DISCARDED
from streamrl.run_dir.run_lock import LOCK_FILE
from tests.e2e.launched import Launched, audit, events, rows
from tests.sealed import seal

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("run_directory")]
APART = ["placement.mode=disaggregated", "placement.cpus=8"]


@dataclass(frozen=True)
class Killed:
    """A killed run: replies to other commands while it was alive, and its metrics then."""

    run_dir: Path
    refusals: dict[str, tuple[int, str]]
    rows: list[dict[str, Any]]


def tree(folder: Path) -> dict[str, str]:
    """Hash every file except the lock, which names the owner."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != LOCK_FILE
    }


def newest(run_dir: Path) -> Path:
    return list_checkpoints(run_dir / "checkpoints")[-1]


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step_"))


def words(toy: Path, name: str, *more: str) -> list[str]:
    config = ["train", str(toy / "recipe.yaml"), f"run.dir={toy}/runs", f"run.name={name}"]
    return [*config, "run.steps=100000", "checkpoint.every=10", "evaluation.limit=4", *APART, *more]


@pytest.fixture(scope="module")
def killed(toy: Path) -> Killed:
    """A run whose directory other commands try to take, killed some steps after a checkpoint."""
    run_dir = toy / "runs" / "owned"
    run = Launched(words(toy, "owned", "checkpoint.keep=1000"), toy)
    run.until(lambda: len(rows(run_dir)) >= 22)
    attempts = {
        "resume": ["train", "--resume", str(run_dir), "run.steps=9"],
        "checkpoint": ["train", "--resume", str(newest(run_dir))],
        "again": words(toy, "owned"),
        "overwrite": words(toy, "owned", "run.overwrite=true"),
        "fork": ["train", "--resume", str(newest(run_dir)), "run.name=early"],
    }
    commands = {name: Launched(attempt, toy) for name, attempt in attempts.items()}
    refusals = {name: (command.wait(120.0), command.output) for name, command in commands.items()}
    steps = len(rows(run_dir))
    run.until(lambda: len(rows(run_dir)) >= steps + 2, 120.0)

    def is_between() -> bool:
        last = rows(run_dir)[-1]["step"]
        return last >= step_of(newest(run_dir)) + 1 and last % 10 in (3, 4, 5)

    run.until(is_between, 120.0)
    run.kill()
    return Killed(run_dir, refusals, rows(run_dir))


def copied(killed: Killed, name: str) -> Path:
    target = killed.run_dir.with_name(name)
    shutil.copytree(killed.run_dir, target)
    return target


def test_a_live_run_directory_refuses_other_owners_and_the_run_continues(killed: Killed):
    for code, output in killed.refusals.values():
        # A busy machine also shows what the command is doing.
        *progress, line = output.strip().splitlines()
        assert code == 2 and all(text.startswith("streamrl: ") for text in progress), output
        assert f"{killed.run_dir} is in use: its run is alive, since 20" in line
        assert "pid " in line and "kill -INT" in line
    steps = [row["step"] for row in killed.rows]
    assert steps == list(range(1, len(steps) + 1))
    assert not killed.run_dir.with_name("early").exists()


def test_a_fork_with_other_settings_leaves_the_original_unchanged(toy: Path, killed: Killed):
    run_dir = copied(killed, "original")
    older = list_checkpoints(run_dir / "checkpoints")[0]
    before = tree(run_dir)
    last = step_of(older) + 3
    again = ["train", "--resume", str(older), "run.name=fork", f"run.steps={last}"]
    changes = ["trainer.backend=torch", "queue.shards=3", "trainer.lr_schedule=cosine"]
    run = Launched([*again, *changes], toy)
    run.finish()
    assert tree(run_dir) == before
    fork = run_dir.with_name("fork")
    assert [row["step"] for row in rows(fork)] == list(range(step_of(older) + 1, last + 1))
    assert events(fork, "forked")[0]["from"] == str(run_dir)
    assert step_of(newest(fork)) == last
    rates = [row["policy/lr"] for row in rows(fork)]
    assert rates == sorted(rates, reverse=True) and rates[0] > rates[-1] > 0
    assert main(again) == 2, "the fork exists"
    assert main([*again, "run.dir=" + str(run_dir)]) == 2, "not into the original"


def test_a_resume_on_other_ranks_stage_and_shards_repeats_its_steps(toy: Path, killed: Killed):
    run_dir = copied(killed, "changed")
    # The run log may be ahead of the metrics: the coordinator outlived the command by a moment.
    saved = step_of(newest(run_dir))
    made = audit(run_dir).num_steps
    assert made > saved
    changes = ["trainer.world_size=2", "trainer.zero_stage=3", "queue.shards=3"]
    run = Launched(["train", "--resume", str(run_dir), f"run.steps={made + 2}", *changes], toy)
    run.finish()
    metrics = {row["step"]: row for row in rows(run_dir)}
    assert list(metrics) == list(range(1, made + 3))
    # The repeats agree with the recorded rows to rounding, or the run would have ended.
    assert rows(run_dir)[: len(killed.rows)] == killed.rows
    assert len(audit(run_dir).trained) == 4 * (made + 2)
    assert len(list_segments(get_journal_dir(run_dir, "shard-2.1"))) == 1
    assert not list_segments(get_journal_dir(run_dir, "shard-0")), "the old journals are gone"
    words = ["train", "--resume", str(run_dir), f"run.steps={made + 3}", "queue.shards=1"]
    run = Launched(words, toy)
    run.finish()


def test_a_repeated_step_that_differs_ends_the_run_and_nothing_is_cut(toy: Path, killed: Killed):
    run_dir = copied(killed, "differs")
    path = newest(run_dir) / "trainer/state_00000_000.safetensors"
    # A low bit of the exponent of a trained value: it is 4 times as large, or a quarter.
    _flip(path, path.stat().st_size - 1)
    seal(newest(run_dir))
    rollouts = tree(run_dir / "rollouts")
    run = Launched(["train", "--resume", str(run_dir)], toy)
    line = run.fail()
    step = step_of(newest(run_dir)) + 1
    assert f"step {step}, repeated from the checkpoint, has " in line and "was cut" in line
    assert rows(run_dir) == killed.rows and tree(run_dir / "rollouts") == rollouts


def test_a_failed_return_to_an_older_checkpoint_discards_nothing(toy: Path, killed: Killed):
    run_dir = copied(killed, "back")
    older, last = list_checkpoints(run_dir / "checkpoints")[0], newest(run_dir)
    run = Launched(["train", "--resume", str(older)], toy)
    run.until(lambda: (run_dir / DISCARDED).exists())
    run.kill()
    run = Launched(["train", "--resume", str(run_dir), f"run.steps={len(killed.rows) + 2}"], toy)
    run.finish()
    assert rows(run_dir)[: len(killed.rows)] == killed.rows and last.exists()


def test_a_damaged_record_of_a_journal_is_made_again_and_the_weights_are_equal(toy: Path):
    """At staleness 0, with the weights of an undisturbed run."""
    settings = ["pipeline.max_staleness=0", "run.steps=14", "checkpoint.every=6", 'data.eval=""']
    undisturbed, stopped = (toy / "runs" / name for name in ("undisturbed", "stopped"))
    assert Launched(words(toy, "undisturbed", *settings), toy).wait() == 0
    run = Launched(words(toy, "stopped", *settings), toy)
    run.until(lambda: len(rows(stopped)) >= 8)
    run.kill()
    for name in ("shard-0", "shard-1"):
        folder = get_journal_dir(stopped, name)
        path = get_segment_path(folder, list_segments(folder)[-1])
        *_, (position, _) = [item for item in read_segment(path) if isinstance(item, tuple)]
        _flip(path, position.offset + position.size // 2)
    run = Launched(["train", "--resume", str(stopped)], toy)
    run.finish()
    assert len(events(stopped, "corrupt")) == 2
    model = "checkpoints/step_000014/model"
    assert tree(stopped / model) == tree(undisturbed / model)


def _flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def limit(process: psutil.Process, num_bytes: int = resource.RLIM_INFINITY) -> None:
    """Limit the size of a process's files, to simulate a full disk."""
    process.rlimit(psutil.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))


def test_on_a_full_disk_the_run_goes_on_or_ends_in_one_line_and_resumes(toy: Path):
    run_dir = toy / "runs" / "full"
    run = Launched(words(toy, "full"), toy)
    run.until(lambda: len(rows(run_dir)) >= 12)
    trainer, full = run.actor("TrainerActor"), os.strerror(errno.EFBIG)
    limit(trainer, 2000)
    run.until(lambda: bool(events(run_dir, "no_space")), 120.0)
    (event, *_) = events(run_dir, "no_space")
    kept = newest(run_dir)
    path = run_dir / "checkpoints" / f"step_{event['version']:06d}"
    assert event["text"].startswith(f"{path}/trainer cannot be written: {full}; kept: {kept.name};")
    assert "the run goes on" in event["text"]
    assert not list((run_dir / "checkpoints").glob(".*")), "the partial checkpoint is removed"
    limit(trainer)
    run.until(lambda: step_of(newest(run_dir)) > event["version"], 120.0)
    limit(run.actor("Coordinator"), 2000)
    check_ended(run, run_dir, full)

    run = Launched(["train", "--resume", str(run_dir)], toy)
    steps = len(rows(run_dir))
    run.until(lambda: len(rows(run_dir)) >= steps + 2)
    limit(psutil.Process(run.process.pid), (run_dir / "metrics.jsonl").stat().st_size + 10)
    check_ended(run, run_dir, full)

    # A step takes a tenth of a second, so that the limit may come many steps later.
    last = rows(run_dir)[-1]["step"] // 10 * 10 + 79
    run = Launched(["train", "--resume", str(run_dir), f"run.steps={last}"], toy)
    run.until(lambda: bool(rows(run_dir)) and rows(run_dir)[-1]["step"] >= last - 65)
    limit(run.actor("TrainerActor"), 2000)
    assert run.wait(240.0) == 1, run.output
    line = run.output.strip().splitlines()[-1]
    assert f"{full}; kept: step_" in line and f"then --resume {run_dir}" in line
    run = Launched(["train", "--resume", str(run_dir), f"run.steps={last + 1}"], toy)
    run.finish()
    assert [row["step"] for row in rows(run_dir)] == list(range(1, last + 2))


def check_ended(run: Launched, run_dir: Path, full: str) -> None:
    """Assert that the run ended with one line on what is kept, and left no process."""
    line = run.fail(120.0)
    assert full in line, run.output
    assert f"kept: {newest(run_dir).name} and the journals" in line
    assert f"make room, then --resume {run_dir}" in line

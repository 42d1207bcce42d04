"""`streamrl report --ledger`: runs that finished, died, resumed, or have a damaged run log."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from streamrl.buffer import Ledger, RunLog
from streamrl.buffer.journal import Journal, JournalConfig, get_segment_path, list_segments
from streamrl.buffer.micro_batch_schedule import StepSchedule
from streamrl.buffer.run_log import TrainedGroup, TrainedStep
from streamrl.cli.main import main
from streamrl.messages import GroupInfo, GroupOutcome
from streamrl.run_dir.checkpoint import RUN_LOG_FOLDER, get_journal_dir

INFO = GroupInfo(lengths=(5, 5), num_loss_tokens=6, version_tokens=((0, 6),))


def uid(index: int, attempt: int = 0, epoch: int = 0) -> str:
    return f"{epoch}:{index}:{attempt}"


def step(version: int, *uids: str) -> TrainedStep:
    groups = tuple(TrainedGroup(uid, INFO, version) for uid in uids)
    program = StepSchedule(((((*((uid, 0) for uid in uids),),),),))
    return TrainedStep(version, groups, {"policy": program})


def write_run_log(run_dir: Path, work: Callable[[RunLog], Awaitable[None]]) -> None:
    """Write the run log of `work` into a run directory, like a coordinator."""

    async def write() -> None:
        journal = Journal(get_journal_dir(run_dir, RUN_LOG_FOLDER), JournalConfig())
        await work(RunLog(Ledger(), journal))
        await journal.close()

    (run_dir / "config.yaml").touch()
    asyncio.run(write())


async def four_groups(run_log: RunLog) -> None:
    """Train two groups in one step, drop and retry one, filter one."""
    await run_log.record_start(0)
    await run_log.record_admissions([uid(i) for i in range(4)], 0)
    await run_log.record_finished({uid(2): GroupOutcome("reward_error", "the verifier is down")})
    await run_log.record_admissions([uid(2, 1)], 0)
    await run_log.record_finished(
        {uid(3): GroupOutcome("filtered", "all 2 rewards are 1", filtered=True)}
    )
    await run_log.record_step(step(0, uid(1), uid(0)))


@pytest.fixture
def report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Run `streamrl report` on the run in tmp_path; return exit code and output."""

    def run(*words: str) -> tuple[int, str]:
        code = main(["report", "--ledger", str(tmp_path), *words])
        printed = capsys.readouterr()
        return code, printed.out or printed.err

    return run


Report = Callable[..., tuple[int, str]]


def test_the_ledger_with_drops_and_epochs_is_printed(report: Report, tmp_path: Path):
    write_run_log(tmp_path, four_groups)
    code, text = report()
    assert code == 0
    assert "1 step, 1 start" in text
    assert "admitted 5 = trained 2 + filtered 1 + dropped 1 + in flight 1\n" in text
    assert "drops       reward_error 1\n" in text
    assert "epoch 0     2 prompts trained, 1 in flight\n" in text
    assert "in flight   0:2:1\n" in text
    assert "trained     2 uids, each exactly once\n" in text


def test_a_torn_log_end_is_ignored_and_left_unchanged(report: Report, tmp_path: Path):
    write_run_log(tmp_path, four_groups)
    folder = get_journal_dir(tmp_path, RUN_LOG_FOLDER)
    path = get_segment_path(folder, list_segments(folder)[-1])
    content = path.read_bytes()
    path.write_bytes(content[:-3])
    code, text = report()
    assert code == 0
    assert "trained 0" in text and "in flight 3" in text, "the log does not contain the step"
    assert path.read_bytes() == content[:-3]
    assert [p.name for p in folder.iterdir()] == [path.name]


def test_a_uid_trained_twice_is_reported(report: Report, tmp_path: Path):
    async def work(run_log: RunLog) -> None:
        await run_log.record_admissions([uid(0), uid(1)], 0)
        await run_log.record_log.append([step(3, uid(0), uid(1)).to_record()])
        await run_log.record_log.append([step(4, uid(0), uid(7)).to_record()])

    write_run_log(tmp_path, work)
    code, text = report()
    assert code == 1
    assert "which does not balance" in text and "not each uid exactly once" in text
    assert "problem     0:0:0: admitted 1 times, trained at version 3, trained at version 4" in text
    assert "problem     0:7:0: admitted 0 times, trained at version 4" in text
    assert "0:1:0:" not in text


def test_the_history_of_a_uid_merges_log_events_and_attempts(report: Report, tmp_path: Path):
    async def work(run_log: RunLog) -> None:
        await four_groups(run_log)
        await run_log.record_start(0)
        await run_log.record_step(step(1, uid(2, 1)))

    write_run_log(tmp_path, work)
    events: list[dict[str, Any]] = [
        {"time": 5.0, "event": "stall", "uids": "0:1:0 0:2:0", "holder": "generator-0"},
        {"time": 9e9, "event": "drop", "uid": "0:2:0", "cause": "reward_error"},
        {"time": 9e9, "event": "drop", "uid": "0:22:0", "cause": "reward_error"},
    ]
    torn = '{"time": 9e9, "event": "dr'
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events) + torn)
    code, text = report("--uid", "0:2:0")
    descriptions = [line.split("  ", 1)[1] for line in text.splitlines()]
    assert code == 0
    assert descriptions == [
        "0:2:0  event=stall, holder=generator-0",
        "0:2:0  kind=admit, version=0",
        "0:2:0  kind=end, version=0, cause=reward_error, reason=the verifier is down,"
        " filtered=False, pass_rate=None",
        "0:2:1  kind=admit, version=0",
        "0:2:1  kind=step, version=1",
        "0:2:0  event=drop, cause=reward_error",
    ]
    history = json.loads(report("--uid", "0:3:0", "--json")[1])
    assert [(e["source"], e["kind"]) for e in history["history"]] == [
        (RUN_LOG_FOLDER, "admit"),
        (RUN_LOG_FOLDER, "end"),
    ]
    assert history["history"][1]["reason"] == "all 2 rewards are 1"
    assert history["ledger"]["trained"] == 3


@pytest.mark.parametrize("unknown", ["0:2:7", "0:1", "x"])
def test_an_unknown_uid_is_refused_in_one_line(tmp_path: Path, refuse, unknown: str):
    write_run_log(tmp_path, four_groups)
    error = refuse("report", "--ledger", tmp_path, "--uid", unknown)
    assert f"--uid {unknown}: not in the run log. Give epoch:index:attempt of one of its 5" in error


def test_a_directory_without_run_log_is_refused_in_one_line(tmp_path: Path, refuse):
    (tmp_path / "config.yaml").touch()
    assert "queue.journal.enabled=false" in refuse("report", "--ledger", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"], "no file is created"


def test_a_damaged_entry_in_the_run_log_is_reported(report: Report, tmp_path: Path):
    write_run_log(tmp_path, four_groups)
    path = get_segment_path(get_journal_dir(tmp_path, RUN_LOG_FOLDER), 1)
    damaged = bytearray(path.read_bytes())
    damaged[40] ^= 1
    path.write_bytes(damaged)
    code, text = report()
    assert code == 1
    assert f"{path}, byte 0" in text and text.count("\n") == 1

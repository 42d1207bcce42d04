"""Journal: group commit, disk failures, fsync intervals; accepted records survive failures."""

import asyncio
import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from streamrl.buffer.journal import (
    CorruptRecord,
    get_segment_path,
    read_record,
    replay_segments,
)
from streamrl.errors import JournalError, NoSpaceError
from tests.buffer.journals import (
    eventually,
    intact,
    note,
    open_journal,
    read_numbers,
    write_journal,
)

ROOT = Path(__file__).resolve().parents[2]


# Commits


async def test_group_commit_shares_fsyncs(tmp_path: Path, fsyncs: list[str]):
    journal = open_journal(tmp_path)
    positions = await asyncio.gather(*(journal.append([note(i)]) for i in range(200)))
    assert fsyncs.count("00000001.journal") <= 3
    expected = list(range(200))
    assert [read_record(tmp_path, position).meta["i"] for [position] in positions] == expected
    assert journal.drain_fsync_s() > 0
    assert journal.drain_fsync_s() == 0
    await journal.close()


class SlowDisk:
    """Fake fsync that blocks until released, and may then fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began, self.go, self.error = threading.Event(), threading.Event(), ""
        self.calls, self._fsync = 0, os.fsync
        monkeypatch.setattr(os, "fsync", self.fsync)

    def fsync(self, descriptor: int) -> None:
        self.calls += 1
        self.began.set()
        assert self.go.wait(10)
        if self.error:
            raise OSError(errno.EIO, self.error)
        self._fsync(descriptor)


async def test_appends_during_an_fsync_join_the_next_commit_without_blocking_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    journal = open_journal(tmp_path)
    disk = SlowDisk(monkeypatch)
    waiting = [asyncio.ensure_future(journal.append([note(0)]))]
    await eventually(disk.began.is_set)
    for i in range(1, 20):
        waiting.append(asyncio.ensure_future(journal.append([note(i)])))
        await asyncio.sleep(0.001)
    assert not any(call.done() for call in waiting)
    disk.go.set()
    await asyncio.gather(*waiting)
    assert disk.calls == 2
    await journal.close()
    assert read_numbers(tmp_path) == list(range(20))


async def test_pending_appends_fail_after_a_failed_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    unhandled: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
    journal = open_journal(tmp_path)
    disk = SlowDisk(monkeypatch)
    disk.error = "worn out"
    waiting = [asyncio.ensure_future(journal.append([note(0)]))]
    await eventually(disk.began.is_set)
    waiting += [asyncio.ensure_future(journal.append([note(i)])) for i in range(1, 4)]
    await asyncio.sleep(0.01)
    disk.go.set()
    errors = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(error, JournalError) and "worn" in str(error) for error in errors)
    await asyncio.sleep(0.01)
    assert (disk.calls, unhandled, read_numbers(tmp_path)) == (1, [], [])


async def test_append_returns_after_fsync_of_file_and_folder(tmp_path: Path, fsyncs: list[str]):
    journal = open_journal(tmp_path / "new" / "folder")
    await journal.append([note(0)])
    assert {tmp_path.name, "new", "folder", "00000001.journal"} <= set(fsyncs)
    before = len(fsyncs)
    await journal.append([note(1)])
    assert fsyncs[before:] == ["00000001.journal"]
    await journal.close()


async def test_appends_and_waiters_keep_their_order(tmp_path: Path):
    journal, woken = open_journal(tmp_path), []

    async def owner(start: int) -> None:
        for i in range(start, start + 40, 4):
            journal.append_nowait([note(i), note(i + 1)])
            await journal.append([note(i + 2)])
            woken.append(i + 2)
            journal.append_nowait([note(i + 3)])

    await asyncio.gather(*(owner(start) for start in range(0, 400, 40)))
    await journal.close()
    numbers_read = [record.meta["i"] for _, record in intact(replay_segments(tmp_path))]
    assert sorted(numbers_read) == list(range(400))
    for start in range(0, 400, 40):
        expected = list(range(start, start + 40))
        assert [i for i in numbers_read if start <= i < start + 40] == expected
    assert woken == [i for i in numbers_read if i % 4 == 2]


# Disk failures


def fill_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    writev = os.writev

    def refuse(descriptor: int, buffers: list[memoryview]) -> int:
        writev(descriptor, [buffers[0][:10]])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "writev", refuse)


@pytest.mark.parametrize("fsync", [True, False])
async def test_full_disk_fails_all_waiters_with_a_clear_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fsync: bool
):
    journal = open_journal(tmp_path, fsync=fsync)
    await journal.append([note(0), note(1)])
    size = get_segment_path(tmp_path, 1).stat().st_size
    with monkeypatch.context() as patch:
        fill_disk(patch)
        calls = (journal.append([note(i)]) for i in range(2, 5))
        errors = await asyncio.gather(*calls, return_exceptions=True)
    text = (
        f"journal {tmp_path}/00000001.journal: No space left on device;"
        " earlier accepted records are safe"
    )
    assert [(type(error), str(error)) for error in errors] == [(JournalError, text)] * 3
    for call in (journal.append([note(9)]), journal.rotate(), journal.close()):
        with pytest.raises(JournalError, match="No space left"):
            await call
    with pytest.raises(JournalError, match="No space left"):
        journal.append_nowait([note(9)])
    assert get_segment_path(tmp_path, 1).stat().st_size == size, (
        "truncated to the last complete record"
    )
    assert journal.num_bytes == size
    assert read_numbers(tmp_path) == [0, 1]


@pytest.mark.parametrize("refused", ["open", "fsync"])
async def test_rotate_on_a_full_disk_can_be_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
):
    journal = open_journal(tmp_path)
    await journal.append([note(0)])
    original = getattr(os, refused)

    def refuse(target: Any, *args: int) -> object:
        is_new = target == get_segment_path(tmp_path, 2)
        if is_new or (refused == "fsync" and os.path.samestat(os.fstat(target), tmp_path.stat())):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(target, *args)

    with monkeypatch.context() as patch:
        patch.setattr(os, refused, refuse)
        with pytest.raises(NoSpaceError, match=r"2\.journal cannot be created: No space left"):
            await journal.rotate()
        assert os.listdir(tmp_path) == ["00000001.journal"]
        await journal.append([note(1)])
    assert await journal.rotate() == 2
    await journal.append([note(2)])
    await journal.close()
    assert read_numbers(tmp_path) == [0, 1, 2]


ENDLESS = """
import asyncio, itertools, os, random, sys
from pathlib import Path
from streamrl.buffer.journal import Journal, JournalConfig, JournalRecord

async def worker(journal, name):
    for i in itertools.count():
        meta = {"kind": "note", "worker": name, "i": i}
        await journal.append([JournalRecord(meta, random.randbytes(random.randrange(60_000)))])
        os.write(1, f"{name} {i}\\n".encode())

async def main():
    JournalConfig.segment_mb = 1
    config = JournalConfig(fsync=bool(sys.argv[2]))
    journal = Journal(Path(sys.argv[1]), config)
    await asyncio.gather(*(worker(journal, f"{journal.segment}-{n}") for n in range(4)))

asyncio.run(main())
"""


def run_until_killed(folder: Path, fsync: str, lines: int) -> Iterator[tuple[str, int]]:
    """Kill an endless writer after `lines` acknowledged records; yield all acknowledged records."""
    command = [sys.executable, "-c", ENDLESS, str(folder), fsync]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        text = [process.stdout.readline() for _ in range(lines)]
        process.send_signal(signal.SIGKILL)
        text += process.stdout.readlines()
    for line in text:
        name, i = line.split()
        yield name, int(i)


@pytest.mark.parametrize("fsync", ["yes", ""])
def test_acknowledged_records_survive_kill_9(tmp_path: Path, fsync: str):
    acknowledged = [
        *run_until_killed(tmp_path, fsync, 150),
        *run_until_killed(tmp_path, fsync, 77),
    ]
    replayed: dict[str, list[int]] = {}
    for item in replay_segments(tmp_path):
        assert not isinstance(item, CorruptRecord), item
        meta = item[1].meta
        replayed.setdefault(meta["worker"], []).append(meta["i"])
    assert len(acknowledged) >= 227
    assert all(i in replayed[name] for name, i in acknowledged)
    assert all(order == list(range(len(order))) for order in replayed.values())


# Time of the fsyncs


async def test_without_fsync_nothing_is_synced(tmp_path: Path, fsyncs: list[str]):
    await write_journal(tmp_path / "new", range(3), range(3, 6), fsync=False)
    await write_journal(tmp_path / "new", range(6, 9), fsync=False)
    assert fsyncs == []
    assert read_numbers(tmp_path / "new") == list(range(9))


# Settings

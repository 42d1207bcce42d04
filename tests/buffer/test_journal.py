"""Journal: group commit, segment files, damage; accepted records survive disk failures."""

import asyncio
import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.buffer import journal as journal_module
from streamrl.buffer.encoding import Blob, join_pieces
from streamrl.buffer.journal import (
    CorruptRecord,
    Journal,
    JournalConfig,
    JournalRecord,
    RecordPosition,
    get_segment_path,
    list_segments,
    read_record,
    read_segment,
    replay_segments,
    write_segment,
)
from streamrl.errors import JournalError, NoSpaceError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def fsyncs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the names of fsynced files and folders, in order."""
    fsync, names = os.fsync, []

    def watched(descriptor: int) -> None:
        fsync(descriptor)
        names.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)

    monkeypatch.setattr(os, "fsync", watched)
    return names


def note(i: int, payload: Blob = b"payload") -> JournalRecord:
    return JournalRecord({"kind": "note", "i": i}, payload)


def read_numbers(folder: Path, **bounds: Any) -> list[int | None]:
    """Return the numbers of the replayed notes; None for a corrupt record."""
    return [
        None if isinstance(item, CorruptRecord) else item[1].meta["i"]
        for item in replay_segments(folder, **bounds)
    ]


def intact(
    items: Iterable[tuple[RecordPosition, JournalRecord] | CorruptRecord],
) -> list[tuple[RecordPosition, JournalRecord]]:
    """Return the replayed records; fail at a corrupt record."""
    records = []
    for item in items:
        assert not isinstance(item, CorruptRecord), item
        records.append(item)
    return records


def open_journal(folder: Path, **config: Any) -> Journal:
    return Journal(folder, JournalConfig(**config))


async def write_journal(folder: Path, *rounds: range, **config: Any) -> list[RecordPosition]:
    """Write a journal with one segment per round; return the positions."""
    journal, positions = open_journal(folder, **config), []
    for n, notes in enumerate(rounds):
        if n:
            await journal.rotate()
        positions += await journal.append([note(i) for i in notes])
    await journal.close()
    return positions


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


# Commits


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
    assert journal.drain_fsync_s() > 0 == journal.drain_fsync_s()
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


# Disk failures


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


async def test_without_fsync_nothing_is_synced(tmp_path: Path, fsyncs: list[str]):
    await write_journal(tmp_path / "new", range(3), range(3, 6), fsync=False)
    await write_journal(tmp_path / "new", range(6, 9), fsync=False)
    assert fsyncs == []
    assert read_numbers(tmp_path / "new") == list(range(9))


# Records


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        memoryview(b"0123456789")[2:5],
        np.arange(1000, dtype=np.int64).data,
        (b"a head", np.arange(1000, dtype=np.int32).data, b"", bytearray(b"a tail")),
    ],
    ids=["empty", "slice", "wide", "pieces"],
)
async def test_record_round_trips(tmp_path: Path, payload: Blob):
    journal = open_journal(tmp_path)
    meta = {"kind": "put", "text": "h\u00e9 \ud800", "x": [1, 2.5, None, {"y": True}]}
    positions = await journal.append([note(0), JournalRecord(meta, payload), note(2)])
    await journal.close()
    items = intact(replay_segments(tmp_path))
    assert [position for position, _ in items] == positions
    assert items[1][1].meta == meta
    assert items[1][1].payload == join_pieces(payload)
    assert read_record(tmp_path, positions[1]).payload == join_pieces(payload)
    assert positions[2].offset == positions[1].offset + positions[1].size


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(st.lists(st.tuples(st.dictionaries(st.text(), JSON), st.binary(max_size=300)), max_size=8))
def test_write_segment_writes_all_records(
    tmp_path_factory: pytest.TempPathFactory, content: list[tuple[dict[str, Any], bytes]]
):
    path = tmp_path_factory.getbasetemp() / "snapshot.journal"
    records = [JournalRecord({**meta, "kind": "any"}, payload) for meta, payload in content]
    write_segment(path, records)
    assert [record for _, record in intact(read_segment(path))] == records


async def test_writev_limits_and_short_writes_are_handled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    writev = os.writev

    def stingy(descriptor: int, buffers: list[memoryview]) -> int:
        assert len(buffers) <= os.sysconf("SC_IOV_MAX")
        return writev(descriptor, [b"".join(buffers)[:1009]])

    monkeypatch.setattr(os, "writev", stingy)
    await write_journal(tmp_path, range(3000))
    assert read_numbers(tmp_path) == list(range(3000))


# Damage


def flip(content: bytes, *offsets: int) -> bytes:
    damaged = bytearray(content)
    for offset in offsets:
        damaged[offset] ^= 0x41
    return bytes(damaged)


async def test_replay_skips_a_last_record_truncated_at_any_byte(tmp_path: Path):
    last_position = (await write_journal(tmp_path, range(4)))[-1]
    path = get_segment_path(tmp_path, 1)
    content = path.read_bytes()
    for size in range(last_position.offset, len(content)):
        path.write_bytes(content[:size])
        assert read_numbers(tmp_path) == [0, 1, 2], size


async def test_replay_skips_a_last_record_with_unwritten_sectors(tmp_path: Path):
    # A file system may persist the file's length before its data.
    journal = open_journal(tmp_path)
    await journal.append([note(0), note(1, os.urandom(5000))])
    await journal.close()
    path = get_segment_path(tmp_path, 1)
    content = path.read_bytes()
    for size in range(512, len(content), 512):
        path.write_bytes(content[:size] + bytes(len(content) - size))
        assert read_numbers(tmp_path) == [0], size


@pytest.mark.parametrize("bad", [0, 2, 3])
async def test_flipped_byte_corrupts_only_its_record_which_is_not_torn(tmp_path: Path, bad: int):
    positions = await write_journal(tmp_path, range(4))
    path = get_segment_path(tmp_path, 1)
    content = path.read_bytes()
    for offset in range(positions[bad].offset, positions[bad].offset + positions[bad].size):
        path.write_bytes(flip(content, offset))
        items = list(replay_segments(tmp_path))
        [corrupt] = [item for item in items if isinstance(item, CorruptRecord)]
        assert (corrupt.position, corrupt.file) == (positions[bad], path)
        assert "checksum" in corrupt.reason
        assert read_numbers(tmp_path) == [None if i == bad else i for i in range(4)]
        message = rf"{path}, byte {positions[bad].offset}: .*checksum"
        with pytest.raises(JournalError, match=message):
            read_record(tmp_path, positions[bad])


async def test_replay_finds_the_next_record_at_any_distance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    journal = open_journal(tmp_path)
    positions = await journal.append([note(0, journal_module.MAGIC * 50), note(1)])
    await journal.close()
    path = get_segment_path(tmp_path, 1)
    path.write_bytes(flip(path.read_bytes(), 0))
    for chunk in range(len(journal_module.MAGIC), 40):
        monkeypatch.setattr(journal_module, "_SEARCH_BYTES", chunk)
        bad, *later = replay_segments(tmp_path)
        ((position, record),) = intact(later)
        assert isinstance(bad, CorruptRecord)
        assert bad.position == positions[0]
        assert (position, record.meta["i"]) == (positions[1], 1)


async def test_records_inside_a_payload_are_not_replayed(tmp_path: Path):
    inner = tmp_path / "inner"
    await write_journal(inner, range(3))
    journal = open_journal(tmp_path)
    await journal.append([note(10, get_segment_path(inner, 1).read_bytes()), note(11)])
    await journal.close()
    path = get_segment_path(tmp_path, 1)
    path.write_bytes(b"?" + path.read_bytes()[1:])
    assert read_numbers(tmp_path) == [None, 11]


async def test_unknown_format_version_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(journal_module, "FORMAT_VERSION", 2)
    await write_journal(tmp_path, range(1))
    monkeypatch.setattr(journal_module, "FORMAT_VERSION", 1)
    with pytest.raises(JournalError, match=r"00000001\.journal: format 2, this streamrl reads 1"):
        read_numbers(tmp_path)


# Segments


async def test_rotate_separates_earlier_from_later_records(tmp_path: Path):
    journal = open_journal(tmp_path)
    for i in range(0, 40, 2):
        journal.append_nowait([note(i)])
        cut, _ = await asyncio.gather(journal.rotate(), journal.append([note(i + 1)]))
        assert journal.segment == cut
        assert read_numbers(tmp_path, before=cut) == list(range(i + 1))
        assert read_numbers(tmp_path, first=cut) == [i + 1]
    await journal.close()


async def test_full_segment_is_followed_by_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(JournalConfig, "segment_mb", 1)
    journal = open_journal(tmp_path)
    for i in range(6):
        await journal.append([note(i, bytes(400_000))])
    assert journal.segment == 2
    assert journal.num_bytes == sum(path.stat().st_size for path in tmp_path.iterdir())
    await journal.close()
    assert read_numbers(tmp_path, first=2) == [3, 4, 5]
    assert read_numbers(tmp_path) == list(range(6))


async def test_full_segment_is_fsynced_before_the_next_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fsyncs: list[str]
):
    monkeypatch.setattr(JournalConfig, "segment_mb", 1)
    journal = open_journal(tmp_path)
    await journal.append([note(0, bytes(1 << 20))], sync=False)
    assert "00000001.journal" not in fsyncs
    await journal.append([note(1)], sync=False)
    assert fsyncs[-2:] == ["00000001.journal", tmp_path.name]
    await journal.close()


async def test_discard_before_removes_lower_segments_and_their_bytes(tmp_path: Path):
    await write_journal(tmp_path, range(3), range(3, 6))
    journal = open_journal(tmp_path)
    await journal.append([note(6)])
    assert (list_segments(tmp_path), journal.segment) == ([1, 2, 3], 3)
    assert journal.num_bytes == sum(path.stat().st_size for path in tmp_path.iterdir())
    journal.discard_before(3)
    assert list_segments(tmp_path) == [3]
    assert journal.num_bytes == get_segment_path(tmp_path, 3).stat().st_size
    await journal.close()
    assert read_numbers(tmp_path) == [6]


async def test_segment_numbers_are_not_reused_after_discard(tmp_path: Path):
    journal = open_journal(tmp_path)
    await journal.append([note(0)])
    journal.discard_before(await journal.rotate())
    await journal.close()
    journal = open_journal(tmp_path)
    assert journal.segment == 3
    await journal.close()
    journal = Journal(tmp_path / "empty", JournalConfig(), first=9)
    assert journal.segment == 9
    await journal.close()


async def test_missing_segment_raises_with_its_number(tmp_path: Path):
    await write_journal(tmp_path, *(range(i, i + 1) for i in range(5)))
    for number in (2, 4):
        get_segment_path(tmp_path, number).unlink()
    with pytest.raises(JournalError, match="segment 2 is missing"):
        read_numbers(tmp_path)
    with pytest.raises(JournalError, match="segment 4 is missing"):
        read_numbers(tmp_path, first=4)
    assert read_numbers(tmp_path, first=5) == [4]


async def test_successor_starts_a_new_segment_after_a_torn_end(tmp_path: Path, fsyncs: list[str]):
    await write_journal(tmp_path, range(3), fsync=False)
    path = get_segment_path(tmp_path, 1)
    torn = path.read_bytes()[:-1]
    path.write_bytes(torn)
    assert fsyncs == []
    journal = open_journal(tmp_path)
    assert "00000001.journal" in fsyncs, "replayed records are durable"
    await journal.append([note(3), note(4)])
    await journal.close()
    assert path.read_bytes() == torn
    assert read_numbers(tmp_path) == [0, 1, 3, 4]

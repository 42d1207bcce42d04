"""The journal: what was accepted is there again, whatever happened to its writer."""

import asyncio
import errno
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.buffer import segment
from streamrl.buffer.journal import Journal, JournalConfig
from streamrl.buffer.segment import (
    Corrupt,
    Position,
    Record,
    read_record,
    read_segment,
    replay,
    segment_path,
    segments,
    write_segment,
)
from streamrl.errors import ConfigError, JournalError

ROOT = Path(__file__).resolve().parents[2]


def note(i: int, payload: segment.Buffer = b"payload") -> Record:
    return Record({"kind": "note", "i": i}, payload)


def numbers(folder: Path, **bounds: Any) -> list[int | None]:
    """The notes as they are replayed; None for a corrupt one."""
    return [
        None if isinstance(item, Corrupt) else item[1].meta["i"]
        for item in replay(folder, **bounds)
    ]


def opened(folder: Path, **config: Any) -> Journal:
    return Journal(folder, JournalConfig(**config))


async def written(folder: Path, *rounds: range, **config: Any) -> list[Position]:
    """A journal with one segment per round."""
    journal, places = opened(folder, **config), []
    for n, notes in enumerate(rounds):
        if n:
            await journal.rotate()
        places += await journal.append([note(i) for i in notes])
    await journal.close()
    return places


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.fixture
def fsyncs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of what was fsynced, in order."""
    fsync, names = os.fsync, []

    def watched(descriptor: int) -> None:
        fsync(descriptor)
        names.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)

    monkeypatch.setattr(os, "fsync", watched)
    return names


# Records.


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"some bytes",
        bytearray(b"more bytes"),
        memoryview(b"0123456789")[2:5],
        np.arange(1000, dtype=np.uint8).data,
        np.arange(1000, dtype=np.int64).data,
        os.urandom(5_000_000),
    ],
    ids=["empty", "bytes", "bytearray", "slice", "array", "wide", "large"],
)
async def test_a_record_is_read_back_as_it_was(tmp_path: Path, payload: segment.Buffer) -> None:
    journal = opened(tmp_path)
    meta = {
        "kind": "put",
        "uid": "0:1:0",
        "text": "h\u00e9 \ud800",
        "x": [1, 2.5, None, {"y": True}],
    }
    places = await journal.append([note(0), Record(meta, payload), note(2)])
    await journal.close()
    items = list(replay(tmp_path))
    assert [place for place, _ in items] == places
    assert items[1][1].meta == meta
    assert items[1][1].payload == bytes(payload)
    assert read_record(tmp_path, places[1]).payload == bytes(payload)
    assert places[2].offset == places[1].offset + places[1].size


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.dictionaries(st.text(), JSON), st.binary(max_size=300))))
def test_a_written_file_holds_its_records(
    tmp_path_factory: pytest.TempPathFactory, content: list[tuple[dict[str, Any], bytes]]
) -> None:
    path = tmp_path_factory.getbasetemp() / "snapshot.journal"
    records = [Record({**meta, "kind": "any"}, payload) for meta, payload in content]
    write_segment(path, records)
    assert [record for _, record in read_segment(path)] == records


async def test_what_cannot_be_json_is_refused_with_all_of_its_call(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    with pytest.raises(TypeError):
        await journal.append([note(0), Record({"kind": "bad", "x": object()})])
    await journal.append([note(1)])
    await journal.close()
    assert numbers(tmp_path) == [1]


async def test_more_buffers_than_one_system_call_takes_and_calls_that_take_less_than_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writev = os.writev

    def stingy(descriptor: int, buffers: list[memoryview]) -> int:
        assert len(buffers) <= os.sysconf("SC_IOV_MAX")
        return writev(descriptor, [b"".join(buffers)[:1009]])

    monkeypatch.setattr(os, "writev", stingy)
    await written(tmp_path, range(3000))
    assert numbers(tmp_path) == list(range(3000))


# Commits.


async def test_appends_that_come_together_share_fsyncs(tmp_path: Path, fsyncs: list[str]) -> None:
    journal = opened(tmp_path)
    places = await asyncio.gather(*(journal.append([note(i)]) for i in range(200)))
    assert fsyncs.count("00000001.journal") <= 3
    assert [read_record(tmp_path, place).meta["i"] for [place] in places] == list(range(200))
    assert journal.drain_fsync_s() > 0
    assert journal.drain_fsync_s() == 0
    await journal.close()


class SlowDisk:
    """An fsync that lasts until it is let go, and then may fail."""

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


async def test_what_comes_during_an_fsync_goes_out_with_the_next_and_the_loop_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = opened(tmp_path)
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
    assert numbers(tmp_path) == list(range(20))


async def test_those_behind_a_failed_commit_are_refused_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mishaps: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: mishaps.append(context))
    journal = opened(tmp_path)
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
    assert (disk.calls, mishaps, numbers(tmp_path)) == (1, [], [])


async def test_an_append_returns_after_the_fsync_of_file_and_folder(
    tmp_path: Path, fsyncs: list[str]
) -> None:
    journal = opened(tmp_path / "new" / "folder")
    await journal.append([note(0)])
    assert {tmp_path.name, "new", "folder", "00000001.journal"} <= set(fsyncs)
    before = len(fsyncs)
    await journal.append([note(1)])
    assert fsyncs[before:] == ["00000001.journal"]
    await journal.close()


async def test_calls_keep_their_order_and_so_do_the_waiters(tmp_path: Path) -> None:
    journal, woken = opened(tmp_path), []

    async def owner(start: int) -> None:
        for i in range(start, start + 40, 4):
            journal.post([note(i), note(i + 1)])
            await journal.append([note(i + 2)])
            woken.append(i + 2)
            journal.post([note(i + 3)])

    await asyncio.gather(*(owner(start) for start in range(0, 400, 40)))
    await journal.close()
    found = numbers(tmp_path)
    assert sorted(found) == list(range(400))
    for start in range(0, 400, 40):
        assert [i for i in found if start <= i < start + 40] == list(range(start, start + 40))
    assert woken == [i for i in found if i % 4 == 2]


async def test_a_cancelled_append_harms_nobody(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    cancelled = asyncio.ensure_future(journal.append([note(0)]))
    await asyncio.sleep(0)
    cancelled.cancel()
    [place] = await journal.append([note(1)])
    await journal.close()
    assert read_record(tmp_path, place).meta["i"] == 1


async def test_a_closed_journal_is_not_used_again(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    journal.post([note(0)])
    await journal.close()
    with pytest.raises(AssertionError, match="closed"):
        await journal.append([note(1)])
    assert numbers(tmp_path) == [0]


# Damage.


async def test_a_file_cut_at_any_byte_of_its_last_record_has_the_earlier_ones(
    tmp_path: Path,
) -> None:
    last = (await written(tmp_path, range(4)))[-1]
    path = segment_path(tmp_path, 1)
    content = path.read_bytes()
    for size in range(last.offset, len(content)):
        path.write_bytes(content[:size])
        assert numbers(tmp_path) == [0, 1, 2], size
        path.write_bytes(content[:size] + bytes(100))
        assert numbers(tmp_path) == [0, 1, 2], "as a file system leaves it that lost the data"


@pytest.mark.parametrize("bad", [0, 1, 2])
async def test_a_flipped_byte_costs_its_record_and_no_other(tmp_path: Path, bad: int) -> None:
    places = await written(tmp_path, range(4))
    path = segment_path(tmp_path, 1)
    content = path.read_bytes()
    for offset in range(places[bad].offset, places[bad].offset + places[bad].size):
        damaged = bytearray(content)
        damaged[offset] ^= 0x41
        path.write_bytes(damaged)
        items = list(replay(tmp_path))
        [corrupt] = [item for item in items if isinstance(item, Corrupt)]
        assert (corrupt.position, corrupt.file) == (places[bad], path)
        assert "checksum" in corrupt.reason
        assert numbers(tmp_path) == [None if i == bad else i for i in range(4)]
        with pytest.raises(JournalError, match=rf"{path}, byte {places[bad].offset}: .*checksum"):
            read_record(tmp_path, places[bad])


async def test_every_bad_record_of_a_row_is_named(tmp_path: Path) -> None:
    places = await written(tmp_path, range(5))
    path = segment_path(tmp_path, 1)
    damaged = bytearray(path.read_bytes())
    for i in (1, 2):
        damaged[places[i].offset + places[i].size - 1] ^= 1
    path.write_bytes(damaged)
    assert numbers(tmp_path) == [0, None, None, 3, 4]


async def test_the_next_record_is_found_however_far_away_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = opened(tmp_path)
    places = await journal.append([note(0, segment.MAGIC * 50), note(1)])
    await journal.close()
    path = segment_path(tmp_path, 1)
    damaged = bytearray(path.read_bytes())
    damaged[0] ^= 1
    path.write_bytes(damaged)
    for chunk in range(len(segment.MAGIC), 40):
        monkeypatch.setattr(segment, "_SEARCH_BYTES", chunk)
        bad, (place, record) = replay(tmp_path)
        assert isinstance(bad, Corrupt)
        assert bad.position == places[0]
        assert (place, record.meta["i"]) == (places[1], 1)


async def test_a_journal_inside_a_payload_is_not_taken_for_records(tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    await written(inner, range(3))
    journal = opened(tmp_path)
    await journal.append([note(10, segment_path(inner, 1).read_bytes()), note(11)])
    await journal.close()
    path = segment_path(tmp_path, 1)
    path.write_bytes(b"?" + path.read_bytes()[1:])
    assert numbers(tmp_path) == [None, 11]


async def test_a_format_of_the_future_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment, "FORMAT", 2)
    await written(tmp_path, range(1))
    monkeypatch.setattr(segment, "FORMAT", 1)
    with pytest.raises(JournalError, match=r"00000001\.journal: format 2, this streamrl reads 1"):
        numbers(tmp_path)


def test_a_record_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match=r"00000007\.journal: No such file"):
        read_record(tmp_path, Position(7, 0, 10))
    write_segment(segment_path(tmp_path, 7), [note(0)])
    with pytest.raises(JournalError, match=r"00000007\.journal, byte 5000: "):
        read_record(tmp_path, Position(7, 5000, 10))


# Segments.


async def test_a_cut_parts_what_came_before_from_what_came_after(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    for i in range(0, 40, 2):
        journal.post([note(i)])
        cut, _ = await asyncio.gather(journal.rotate(), journal.append([note(i + 1)]))
        assert journal.segment == cut
        assert numbers(tmp_path, before=cut) == list(range(i + 1))
        assert numbers(tmp_path, first=cut) == [i + 1]
    await journal.close()


async def test_a_cut_behind_nothing_is_the_segment_already_begun(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    assert [await journal.rotate(), await journal.rotate()] == [1, 1]
    await journal.append([note(0)])
    assert [await journal.rotate(), await journal.rotate()] == [2, 2]
    await journal.close()
    assert segments(tmp_path) == [1, 2]


async def test_full_segments_are_followed_by_new_ones(tmp_path: Path) -> None:
    journal = opened(tmp_path, segment_mb=1)
    for i in range(6):
        await journal.append([note(i, bytes(400_000))])
    assert journal.segment == 2
    assert journal.num_bytes == sum(path.stat().st_size for path in tmp_path.iterdir())
    await journal.close()
    assert numbers(tmp_path, first=2) == [3, 4, 5]
    assert numbers(tmp_path) == list(range(6))


async def test_a_full_segment_is_fsynced_before_it_is_left(
    tmp_path: Path, fsyncs: list[str]
) -> None:
    journal = opened(tmp_path, segment_mb=1, fsync_s=1000.0)
    await journal.append([note(0, bytes(1 << 20))])
    assert "00000001.journal" not in fsyncs
    await journal.append([note(1)])
    assert fsyncs[-2:] == ["00000001.journal", tmp_path.name]
    await journal.close()


async def test_lower_segments_are_removed_and_the_bytes_counted(tmp_path: Path) -> None:
    await written(tmp_path, range(3), range(3, 6))
    journal = opened(tmp_path)
    await journal.append([note(6)])
    assert (segments(tmp_path), journal.segment) == ([1, 2, 3], 3)
    assert journal.num_bytes == sum(path.stat().st_size for path in tmp_path.iterdir())
    journal.discard_before(3)
    assert segments(tmp_path) == [3]
    assert journal.num_bytes == segment_path(tmp_path, 3).stat().st_size
    await journal.close()
    assert numbers(tmp_path) == [6]


async def test_numbers_are_not_used_again_when_all_files_were_discarded(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    await journal.append([note(0)])
    journal.discard_before(await journal.rotate())
    await journal.close()
    journal = opened(tmp_path)
    assert journal.segment == 3
    await journal.close()
    journal = Journal(tmp_path / "empty", JournalConfig(), first=9)
    assert journal.segment == 9
    await journal.close()


async def test_a_replay_has_the_segments_asked_for(tmp_path: Path) -> None:
    await written(tmp_path, range(2), range(2, 4), range(4, 6))
    assert numbers(tmp_path, first=2) == [2, 3, 4, 5]
    assert numbers(tmp_path, before=3) == [0, 1, 2, 3]
    assert numbers(tmp_path, first=2, before=3) == [2, 3]
    assert numbers(tmp_path, first=2, before=2) == []
    assert numbers(tmp_path, before=9) == list(range(6))
    assert numbers(tmp_path, first=9) == []
    assert numbers(tmp_path / "missing") == []


async def test_a_missing_segment_is_named(tmp_path: Path) -> None:
    await written(tmp_path, *(range(i, i + 1) for i in range(5)))
    for number in (2, 4):
        segment_path(tmp_path, number).unlink()
    with pytest.raises(JournalError, match=r"segments \[2, 4\] are missing"):
        numbers(tmp_path)
    with pytest.raises(JournalError, match=r"segments \[4\] are missing"):
        numbers(tmp_path, first=4)
    assert numbers(tmp_path, first=5) == [4]


async def test_a_successor_begins_a_segment_and_leaves_the_torn_end(
    tmp_path: Path, fsyncs: list[str]
) -> None:
    await written(tmp_path, range(3), fsync_s=None)
    path = segment_path(tmp_path, 1)
    torn = path.read_bytes()[:-1]
    path.write_bytes(torn)
    assert fsyncs == []
    journal = opened(tmp_path)
    assert "00000001.journal" in fsyncs, "what is replayed is not lost any more"
    await journal.append([note(3), note(4)])
    await journal.close()
    assert path.read_bytes() == torn
    assert numbers(tmp_path) == [0, 1, 3, 4]


async def test_a_writer_that_was_given_up_for_dead_does_not_go_on(tmp_path: Path) -> None:
    first, second = opened(tmp_path), opened(tmp_path)
    with pytest.raises(JournalError, match=r"00000001\.journal: another process has taken this"):
        await first.append([note(0)])
    await second.append([note(1)])
    await second.close()
    assert numbers(tmp_path) == [1]


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(JournalError, match=f"journal {tmp_path}/file/folder: "):
        opened(tmp_path / "file" / "folder")


# When the disk fails.


def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    writev = os.writev

    def refuse(descriptor: int, buffers: list[memoryview]) -> int:
        writev(descriptor, [buffers[0][:10]])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "writev", refuse)


@pytest.mark.parametrize("fsync_s", [0.0, 5.0, None])
async def test_a_full_disk_is_said_clearly_and_to_everybody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fsync_s: float | None
) -> None:
    journal = opened(tmp_path, fsync_s=fsync_s)
    await journal.append([note(0), note(1)])
    size = segment_path(tmp_path, 1).stat().st_size
    with monkeypatch.context() as patch:
        full_disk(patch)
        calls = (journal.append([note(i)]) for i in range(2, 5))
        errors = await asyncio.gather(*calls, return_exceptions=True)
    text = (
        f"journal {tmp_path}/00000001.journal: No space left on device;"
        " what was accepted before is safe"
    )
    assert [(type(error), str(error)) for error in errors] == [(JournalError, text)] * 3
    for again in (journal.append([note(9)]), journal.rotate(), journal.close()):
        with pytest.raises(JournalError, match="No space left"):
            await again
    with pytest.raises(JournalError, match="No space left"):
        journal.post([note(9)])
    assert segment_path(tmp_path, 1).stat().st_size == size, "cut back to the last good end"
    assert journal.num_bytes == size
    assert numbers(tmp_path) == [0, 1]


async def test_a_failed_post_is_raised_by_what_comes_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = opened(tmp_path)
    full_disk(monkeypatch)
    journal.post([note(0)])
    with pytest.raises(JournalError, match="No space left"):
        await journal.close()


@pytest.mark.parametrize(("fsync_s", "safe"), [(0.0, "accepted"), (1000.0, "fsynced")])
async def test_a_failed_fsync_is_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fsync_s: float, safe: str
) -> None:
    journal = opened(tmp_path, fsync_s=fsync_s)
    await journal.append([note(0)])
    tried = []

    def fail(descriptor: int) -> None:
        tried.append(descriptor)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail)
    journal.post([note(1)])
    for _ in range(2):
        with pytest.raises(JournalError, match=f"Input/output error; what was {safe} before is"):
            await journal.rotate()
    with pytest.raises(JournalError, match="Input/output error"):
        await journal.close()
    assert len(tried) == 1
    assert numbers(tmp_path) == [0]


async def test_a_bug_in_the_writer_leaves_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = opened(tmp_path)
    monkeypatch.setattr(os, "writev", lambda descriptor, buffers: None)
    with pytest.raises(JournalError, match="TypeError"):
        await journal.append([note(0)])


SMALL_DISK = """
import asyncio, resource, sys
from pathlib import Path
from streamrl.buffer.journal import Journal, JournalConfig, Record
from streamrl.errors import JournalError

async def main():
    journal = Journal(Path(sys.argv[1]), JournalConfig())
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    errors, accepted = [], 0
    while len(errors) < 2:
        try:
            await journal.append([Record({"kind": "note", "i": accepted}, bytes(7000))])
            accepted += 1
        except JournalError as error:
            errors.append(str(error))
    print(accepted, *errors, sep="\\n")

asyncio.run(main())
"""


def test_a_disk_that_takes_half_a_record_keeps_the_whole_ones(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", SMALL_DISK, tmp_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    accepted, *errors = run.stdout.splitlines()
    text = "00000001.journal: File too large; what was accepted before is safe"
    assert errors == [f"journal {tmp_path}/{text}"] * 2
    assert int(accepted) == 14
    assert numbers(tmp_path) == list(range(14))
    assert segment_path(tmp_path, 1).stat().st_size < 100_000


ENDLESS = """
import asyncio, itertools, os, random, sys
from pathlib import Path
from streamrl.buffer.journal import Journal, JournalConfig, Record

async def worker(journal, name):
    for i in itertools.count():
        meta = {"kind": "note", "worker": name, "i": i}
        await journal.append([Record(meta, random.randbytes(random.randrange(60_000)))])
        os.write(1, f"{name} {i}\\n".encode())

async def main():
    config = JournalConfig(segment_mb=1, fsync_s=float(sys.argv[2]) if sys.argv[2] else None)
    journal = Journal(Path(sys.argv[1]), config)
    await asyncio.gather(*(worker(journal, f"{journal.segment}-{n}") for n in range(4)))

asyncio.run(main())
"""


def killed(folder: Path, fsync_s: str, lines: int) -> Iterator[tuple[str, int]]:
    """Run the endless writer until it acknowledged some records; all it acknowledged."""
    command = [sys.executable, "-c", ENDLESS, str(folder), fsync_s]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        text = [process.stdout.readline() for _ in range(lines)]
        process.send_signal(signal.SIGKILL)
        text += process.stdout.readlines()
    for line in text:
        name, i = line.split()
        yield name, int(i)


@pytest.mark.slow
@pytest.mark.parametrize("fsync_s", ["0", "0.05", ""])
def test_what_was_acknowledged_survives_kill_9(tmp_path: Path, fsync_s: str) -> None:
    acknowledged = [*killed(tmp_path, fsync_s, 150), *killed(tmp_path, fsync_s, 77)]
    replayed: dict[str, list[int]] = {}
    for item in replay(tmp_path):
        assert not isinstance(item, Corrupt), item
        meta = item[1].meta
        replayed.setdefault(meta["worker"], []).append(meta["i"])
    assert len(acknowledged) >= 227
    assert all(i in replayed[name] for name, i in acknowledged)
    assert all(order == list(range(len(order))) for order in replayed.values())


# When to fsync.


class Clock:
    """Time that passes only when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


async def test_null_leaves_it_to_the_system(tmp_path: Path, fsyncs: list[str]) -> None:
    await written(tmp_path / "new", range(3), range(3, 6), fsync_s=None)
    await written(tmp_path / "new", range(6, 9), fsync_s=None)
    assert fsyncs == []
    assert numbers(tmp_path / "new") == list(range(9))


async def test_the_time_between_two_fsyncs_is_kept(tmp_path: Path, fsyncs: list[str]) -> None:
    clock = Clock()
    journal = Journal(tmp_path, JournalConfig(fsync_s=5.0), clock=clock)
    at = []
    for _ in range(100):
        fsyncs.clear()
        clock.now += 0.25
        await journal.append([note(0)])
        at += [clock.now] * len(fsyncs)
    assert at == [105.0, 110.0, 115.0, 120.0, 125.0]
    await journal.close()


async def test_what_waits_is_fsynced_in_time_though_nothing_follows(
    tmp_path: Path, fsyncs: list[str]
) -> None:
    journal = opened(tmp_path, fsync_s=0.1)
    fsyncs.clear()
    for count in (1, 2):
        await journal.append([note(0)])
        await eventually(lambda count=count: len(fsyncs) >= count)
    await asyncio.sleep(0.25)
    assert fsyncs == ["00000001.journal"] * 2, "once for each: nothing new, nothing to sync"
    await journal.close()


@pytest.mark.parametrize("end", [Journal.rotate, Journal.close])
async def test_a_cut_and_the_end_do_not_wait_for_the_time(
    tmp_path: Path, fsyncs: list[str], end: Callable[[Journal], Any]
) -> None:
    journal = opened(tmp_path, fsync_s=1000.0)
    await journal.append([note(0)])
    assert "00000001.journal" not in fsyncs
    await end(journal)
    assert fsyncs.count("00000001.journal") == 1
    if end is not Journal.close:
        await journal.close()


def test_a_written_file_is_fsynced_with_its_name(tmp_path: Path, fsyncs: list[str]) -> None:
    write_segment(tmp_path / "00000000.journal", [note(0)])
    assert fsyncs == ["00000000.journal", tmp_path.name]
    assert numbers(tmp_path) == [0]


# Settings.


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("fsync_s", -1, "must be 0 s or more, or null"),
        ("fsync_s", float("nan"), "must be 0 s or more, or null"),
        ("segment_mb", 0, "must be at least 1 MB"),
        ("max_mb", 0, "must be at least 1 MB"),
    ],
)
def test_bad_numbers_are_named(key: str, value: float, rule: str) -> None:
    with pytest.raises(ConfigError, match=rf"^queue\.journal\.{key}={value}: {rule}$"):
        JournalConfig(**{key: value})


async def test_the_file_can_be_read_without_this_code(tmp_path: Path) -> None:
    await written(tmp_path, range(1))
    content = segment_path(tmp_path, 1).read_bytes()
    meta_bytes = int.from_bytes(content[8:12], "little")
    assert json.loads(content[32 : 32 + meta_bytes]) == {"kind": "note", "i": 0}
    assert content[32 + meta_bytes :] == b"payload"

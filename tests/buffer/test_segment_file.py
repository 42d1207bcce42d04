"""Segment files: records, damage, numbering."""

import asyncio
import json
import os
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
    get_segment_path,
    list_segments,
    read_record,
    read_segment,
    replay_segments,
    write_segment,
)
from streamrl.errors import JournalError
from tests.buffer.journals import intact, note, open_journal, read_numbers, write_journal

# Records


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
        (b"a head", np.arange(1000, dtype=np.int32).data, b"", bytearray(b"a tail")),
    ],
    ids=["empty", "bytes", "bytearray", "slice", "array", "wide", "large", "pieces"],
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


@pytest.mark.parametrize("num_bytes", [0, 1])
async def test_garbage_at_the_end_is_corrupt_and_not_torn(tmp_path: Path, num_bytes: int):
    positions = await write_journal(tmp_path, range(2))
    path = get_segment_path(tmp_path, 1)
    content = path.read_bytes()
    start = positions[num_bytes].offset
    path.write_bytes(content[:start] + b"\x01" + os.urandom(len(content) - start - 1))
    (corrupt,) = [item for item in replay_segments(tmp_path) if isinstance(item, CorruptRecord)]
    assert (corrupt.position.offset, corrupt.position.size) == (start, len(content) - start)


@pytest.mark.parametrize("bad", [0, 1, 2])
async def test_flipped_byte_corrupts_only_its_own_record(tmp_path: Path, bad: int):
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


async def test_flipped_byte_in_the_last_record_is_corrupt_and_not_torn(tmp_path: Path):
    position = (await write_journal(tmp_path, range(4)))[-1]
    path = get_segment_path(tmp_path, 1)
    content = path.read_bytes()
    for offset in range(position.offset, position.offset + position.size):
        path.write_bytes(flip(content, offset))
        assert read_numbers(tmp_path) == [0, 1, 2, None], offset - position.offset


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


async def test_replay_reads_the_requested_segments(tmp_path: Path):
    await write_journal(tmp_path, range(2), range(2, 4), range(4, 6))
    assert read_numbers(tmp_path, first=2) == [2, 3, 4, 5]
    assert read_numbers(tmp_path, before=3) == [0, 1, 2, 3]
    assert read_numbers(tmp_path, first=2, before=3) == [2, 3]
    assert read_numbers(tmp_path, first=2, before=2) == []
    assert read_numbers(tmp_path, before=9) == list(range(6))
    assert read_numbers(tmp_path, first=9) == []
    assert read_numbers(tmp_path / "missing") == []


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


async def test_segment_format_is_readable_without_streamrl(tmp_path: Path):
    await write_journal(tmp_path, range(1))
    content = get_segment_path(tmp_path, 1).read_bytes()
    meta_bytes = int.from_bytes(content[8:12], "little")
    assert json.loads(content[32 : 32 + meta_bytes]) == {"kind": "note", "i": 0}
    assert content[32 + meta_bytes :] == b"payload"

"""Segment files: append-only sequences of checksummed records.

Layout of a record: header of 32 bytes, meta as JSON, payload.

    magic 6 | format 2 | meta bytes 4 | payload bytes 8 | xxh3_64 of fields, meta, payload 8 |
    xxh32 of the header so far 4

Checksums are seeded with the record's offset, so that records inside a payload (a journal stored as
data) are never mistaken for records of the file.
"""

import json
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import xxhash

from streamrl.buffer.encoding import (
    Blob,
    Buffer,
    count_blob_bytes,
    join_pieces,
    split_pieces,
)
from streamrl.errors import JournalError
from streamrl.files.atomic_write import fsync_path, open_new_file, wrap_os_errors
from streamrl.files.bounded_read import open_regular_file, parse_json

MAGIC = b"\x93srlj\n"
FORMAT_VERSION = 1
_HEADER_STRUCT = struct.Struct("<6sHIQ")
_CHECKED_HEADER_BYTES, _HEADER_BYTES = _HEADER_STRUCT.size + 8, _HEADER_STRUCT.size + 12
_SEARCH_BYTES = 1 << 20
_SECTOR_BYTES = 512
_TRUNCATED = "the record is truncated"
_to_json = json.JSONEncoder(separators=(",", ":"), default=msgspec.structs.asdict).encode
EncodedRecord = tuple[bytes, tuple[memoryview, ...]]


@dataclass(frozen=True)
class RecordPosition:
    """Position of a record in a journal: segment number, byte offset in the file, size in bytes."""

    segment: int
    offset: int
    size: int


class JournalRecord(msgspec.Struct, frozen=True):
    """Record of a journal: JSON-serializable fields (`meta`, with a "kind") and a payload of bytes.

    A record that was read back has lists for tuples, dicts for structs, and its payload in one
    piece.
    """

    meta: Mapping[str, Any]
    payload: Blob = b""


@dataclass(frozen=True)
class CorruptRecord:
    """A journal record that is damaged, not merely incomplete at the end of its file.

    If the record's header is unreadable, `position.size` reaches to the next intact record, or to
    the end of the file.
    """

    position: RecordPosition
    file: Path
    reason: str


def encode_record(record: JournalRecord) -> EncodedRecord:
    """Encode a journal record as (meta bytes, pieces of the payload).

    Raises TypeError for values that JSON cannot represent.
    """
    assert "kind" in record.meta, record.meta
    meta = _to_json(dict(record.meta)).encode()
    return meta, tuple(memoryview(piece).cast("B") for piece in split_pieces(record.payload))


def encode_header(frame: EncodedRecord, offset: int) -> bytes:
    """Return the header of an encoded record that is written at byte `offset` of a segment file."""
    meta, pieces = frame
    fields = _HEADER_STRUCT.pack(MAGIC, FORMAT_VERSION, len(meta), count_blob_bytes(pieces))
    head = fields + _compute_body_checksum(fields, meta, pieces, offset)
    return head + _compute_header_checksum(head, offset)


def _compute_header_checksum(head: Buffer, offset: int) -> bytes:
    return xxhash.xxh32_digest(head, seed=offset & 0xFFFFFFFF)


def _compute_body_checksum(
    fields: Buffer, meta: Buffer, pieces: tuple[Buffer, ...], offset: int
) -> bytes:
    """Return the checksum of header fields, meta and payload, seeded with the record's offset."""
    state = xxhash.xxh3_64(fields, seed=offset)
    for piece in (meta, *pieces):
        state.update(piece)
    return state.digest()


def get_segment_path(folder: Path, number: int) -> Path:
    return folder / f"{number:08d}.journal"


def list_segments(folder: Path) -> list[int]:
    """Return the segment numbers of a journal folder, ascending; [] for a missing folder."""
    paths = folder.glob("*.journal")
    return sorted(int(path.stem) for path in paths if path.stem.isdecimal())


def delete_segments_from(journal: Path, first: int) -> None:
    """Delete journal segments from number `first` on: a resumed run rewrites history from there."""
    # Descending, so that a crash leaves no gap.
    for number in reversed(list_segments(journal)):
        if number >= first:
            get_segment_path(journal, number).unlink()


def check_first_segment(folder: Path, first: int) -> None:
    """Raise JournalError if the first segments of a journal, from number `first` on, are missing.

    They are missing if the folder has segments and the lowest number is above `first`.
    """
    present = list_segments(folder)
    if present and present[0] > max(first, 1):
        raise JournalError(f"{folder}: segments {max(first, 1)} to {present[0] - 1} are missing")


def replay_segments(
    folder: Path, *, first: int = 0, before: int | None = None
) -> Iterator[tuple[RecordPosition, JournalRecord] | CorruptRecord]:
    """Yield all records of a journal in order, from segments with first <= number < before.

    Yields (position, record), or a CorruptRecord for a damaged record; skips an incomplete record
    at the end of a file, as `read_segment` does. Raises JournalError if a segment in between is
    missing or a file is unreadable.
    """
    present = list_segments(folder)
    if not present:
        return
    last = present[-1] if before is None else min(present[-1], before - 1)
    wanted = [number for number in present if first <= number <= last]
    for number, following in pairwise((max(first, present[0]) - 1, *wanted)):
        if following != number + 1:
            raise JournalError(f"journal {folder}: segment {number + 1} is missing")
    for number in wanted:
        yield from read_segment(get_segment_path(folder, number))


def read_segment(path: Path) -> Iterator[tuple[RecordPosition, JournalRecord] | CorruptRecord]:
    """Yield all records of one segment file in order, as (position, record).

    Skips a torn end: an incomplete last record, with nothing intact after it, as a killed writer or
    a power cut leaves. Yields a CorruptRecord for any other damage. Does not change the file.
    Raises JournalError if the file is unreadable.
    """
    number = int(path.stem) if path.stem.isdecimal() else 0
    with wrap_journal_errors(path), open_regular_file(path) as file:
        end, offset = os.fstat(file.fileno()).st_size, 0
        while offset < end:
            size, record = _read_record_at(file, offset, end)
            if isinstance(record, str):
                following = _find_next_record(file, offset + (size or 1), end)
                is_torn = record == _TRUNCATED or (
                    _is_unwritten(file, offset + size) if size else _is_partial_header(file, offset)
                )
                if following is None and is_torn:
                    return
                size = size or (following or end) - offset
                yield CorruptRecord(RecordPosition(number, offset, size), path, record)
            else:
                yield RecordPosition(number, offset, size), record
            offset += size


def read_record(folder: Path, position: RecordPosition) -> JournalRecord:
    path = get_segment_path(folder, position.segment)
    with wrap_journal_errors(path), open_regular_file(path) as file:
        _, record = _read_record_at(file, position.offset, os.fstat(file.fileno()).st_size)
    if isinstance(record, str):
        raise JournalError(f"journal {path}, byte {position.offset}: {record}")
    return record


def _read_record_at(file: BinaryIO, offset: int, end: int) -> tuple[int, JournalRecord | str]:
    """Read the record at byte `offset` of a segment file of `end` bytes; return (size, record).

    For a damaged record return (size, reason), with size 0 if the header does not tell it.
    """
    file.seek(offset)
    header = file.read(_HEADER_BYTES)
    head, check = header[:_CHECKED_HEADER_BYTES], header[_CHECKED_HEADER_BYTES:]
    if not head.startswith(MAGIC) or check != _compute_header_checksum(head, offset):
        return 0, "the header does not match its checksum"
    _, version, meta_bytes, payload_bytes = _HEADER_STRUCT.unpack_from(head)
    if version != FORMAT_VERSION:
        raise JournalError(
            f"journal {file.name}: format {version}, this streamrl reads {FORMAT_VERSION}"
        )
    size = _HEADER_BYTES + meta_bytes + payload_bytes
    if offset + size > end:
        return 0, _TRUNCATED
    meta, payload = file.read(meta_bytes), file.read(payload_bytes)
    fields, check = head[: _HEADER_STRUCT.size], head[_HEADER_STRUCT.size :]
    if check != _compute_body_checksum(fields, meta, (payload,), offset):
        return size, "the record does not match its checksum"
    try:
        fields_json = parse_json(meta)
    except ValueError as error:
        return size, f"the record cannot be read: {error}"
    if not isinstance(fields_json, dict) or not isinstance(fields_json.get("kind"), str):
        return size, "the record has no kind"
    return size, JournalRecord(fields_json, payload)


def _is_unwritten(file: BinaryIO, end: int) -> bool:
    """Return True if the last disk sector before `end` is all zero: allocated but never written."""
    start = (end - 1) // _SECTOR_BYTES * _SECTOR_BYTES
    file.seek(start)
    return not any(file.read(end - start))


def _is_partial_header(file: BinaryIO, offset: int) -> bool:
    """Return True if the bytes at `offset` are the beginning of an interrupted header.

    Such bytes are a prefix of the magic, possibly followed by further bytes of the header, and by
    zeros that were allocated but not written. Behind a whole header, which may be damaged, come the
    fields of its record.
    """
    file.seek(offset)
    head, fields = file.read(_HEADER_BYTES), file.read(1).rstrip(b"\0")
    return MAGIC.startswith(head[: len(MAGIC)].rstrip(b"\0")) and not fields


def _find_next_record(file: BinaryIO, offset: int, end: int) -> int | None:
    """Return the offset of the first intact record at or after `offset`, or None."""
    while offset < end:
        file.seek(offset)
        chunk = file.read(_SEARCH_BYTES)
        at = chunk.find(MAGIC)
        while at >= 0:
            if isinstance(_read_record_at(file, offset + at, end)[1], JournalRecord):
                return offset + at
            at = chunk.find(MAGIC, at + 1)
        # Chunks overlap, because the magic may cross their border.
        offset += max(1, len(chunk) - len(MAGIC) + 1)
    return None


def wrap_journal_errors(path: Path) -> AbstractContextManager[None]:
    return wrap_os_errors(f"journal {path}", JournalError)


class SegmentWriter:
    """Context that writes records into one segment file and fsyncs the file on leaving.

    Replaces an existing file. Raises OSError.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def __enter__(self) -> "SegmentWriter":
        self._file = open(open_new_file(self._path), "wb")
        return self

    def write(self, record: JournalRecord) -> None:
        frame = encode_record(record)
        meta, pieces = frame
        self._offset += self._file.write(
            join_pieces((encode_header(frame, self._offset), meta, *pieces))
        )

    def __exit__(self, kind: object, *_: object) -> None:
        with self._file:
            if kind is None:
                self._file.flush()
                os.fsync(self._file.fileno())
        if kind is None:
            fsync_path(self._path.parent)


def write_segment(path: Path, records: Iterable[JournalRecord]) -> None:
    with SegmentWriter(path) as file:
        for record in records:
            file.write(record)

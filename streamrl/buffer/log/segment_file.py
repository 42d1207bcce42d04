"""Segment files: records one after the other, each with its checksums, that are only appended to.

A record is a header of 32 bytes (magic, format, bytes of meta and of payload, checksum of these
with meta and payload, checksum of the header), the meta as JSON, the payload. Checksums are seeded
with the record's offset, so that a journal inside a payload is never taken for records.
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

from streamrl.buffer.codec import Blob, Buffer, count_blob_bytes, join_pieces, split_pieces
from streamrl.errors import JournalError
from streamrl.files.atomic_write import open_new_file, wrap_os_errors
from streamrl.files.bounded_read import open_regular_file, parse_json

MAGIC = b"\x93srlj\n"
FORMAT_VERSION = 1
_HEADER_STRUCT = struct.Struct("<6sHIQ")
_CHECKED_HEADER_BYTES, _HEADER_BYTES = _HEADER_STRUCT.size + 8, _HEADER_STRUCT.size + 12
_SEARCH_BYTES = 1 << 20
_SECTOR_BYTES = 512
_to_json = json.JSONEncoder(separators=(",", ":"), default=msgspec.structs.asdict).encode
EncodedRecord = tuple[bytes, tuple[memoryview, ...]]


@dataclass(frozen=True)
class RecordPosition:
    """Where a record is: segment, offset in its file and size of the whole record, bytes."""

    segment: int
    offset: int
    size: int


class JournalRecord(msgspec.Struct, frozen=True):
    """What is kept: JSON-able facts with a "kind", and bytes.

    Read back, tuples are lists, structs are dicts, and the bytes are in one piece.
    """

    meta: Mapping[str, Any]
    payload: Blob = b""


@dataclass(frozen=True)
class CorruptRecord:
    """A record that fails its checksum though intact ones follow; its size as far as known."""

    position: RecordPosition
    file: Path
    reason: str


def encode_record(record: JournalRecord) -> EncodedRecord:
    """Meta and the pieces of the payload as bytes. Raises TypeError if they cannot be."""
    assert "kind" in record.meta, record.meta
    meta = _to_json(dict(record.meta)).encode()
    return meta, tuple(memoryview(piece).cast("B") for piece in split_pieces(record.payload))


def encode_header(frame: EncodedRecord, offset: int) -> bytes:
    """The header of a record that begins at this byte of its file."""
    meta, pieces = frame
    fields = _HEADER_STRUCT.pack(MAGIC, FORMAT_VERSION, len(meta), count_blob_bytes(pieces))
    head = fields + _compute_body_checksum(fields, meta, pieces, offset)
    return head + _compute_header_checksum(head, offset)


def _compute_header_checksum(head: Buffer, offset: int) -> bytes:
    return xxhash.xxh32_digest(head, seed=offset & 0xFFFFFFFF)


def _compute_body_checksum(
    fields: Buffer, meta: Buffer, pieces: tuple[Buffer, ...], offset: int
) -> bytes:
    state = xxhash.xxh3_64(fields, seed=offset)
    for piece in (meta, *pieces):
        state.update(piece)
    return state.digest()


def segment_path(folder: Path, number: int) -> Path:
    """The file of a segment."""
    return folder / f"{number:08d}.journal"


def list_segments(folder: Path) -> list[int]:
    """Numbers of the segments in a folder, in order; none if there is no such folder."""
    paths = folder.glob("*.journal")
    return sorted(int(path.stem) for path in paths if path.stem.isdecimal())


def check_first_segment(folder: Path, first: int) -> None:
    """Raise JournalError if segments from `first` on have been there and are not any more."""
    present = list_segments(folder)
    if present and present[0] > max(first, 1):
        raise JournalError(f"{folder}: segments {max(first, 1)} to {present[0] - 1} are missing")


def replay_segments(
    folder: Path, *, first: int = 0, before: int | None = None
) -> Iterator[tuple[RecordPosition, JournalRecord] | CorruptRecord]:
    """Every record of the segments with first <= number < before, in order; see `read_segment`.

    Raises JournalError if a segment between two others is missing, or a file cannot be read.
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
        yield from read_segment(segment_path(folder, number))


def read_segment(path: Path) -> Iterator[tuple[RecordPosition, JournalRecord] | CorruptRecord]:
    """Every record of one file, in order. Raises JournalError if it cannot be read.

    A record that was not written to its end, with nothing intact behind it, is the torn end that a
    killed writer or a power cut leaves: it is left out. The file stays as it is.
    """
    number = int(path.stem) if path.stem.isdecimal() else 0
    with wrap_journal_errors(path), open_regular_file(path) as file:
        end, offset = os.fstat(file.fileno()).st_size, 0
        while offset < end:
            size, found = _read_record_at(file, offset, end)
            if isinstance(found, str):
                following = _find_next_record(file, offset + (size or 1), end)
                is_torn = (
                    _is_unwritten(file, offset + size) if size else _is_partial_header(file, offset)
                )
                if following is None and is_torn:
                    return
                size = size or (following or end) - offset
                yield CorruptRecord(RecordPosition(number, offset, size), path, found)
            else:
                yield RecordPosition(number, offset, size), found
            offset += size


def read_record(folder: Path, position: RecordPosition) -> JournalRecord:
    """One record. Raises JournalError naming file and offset if it is not there and intact."""
    path = segment_path(folder, position.segment)
    with wrap_journal_errors(path), open_regular_file(path) as file:
        _, found = _read_record_at(file, position.offset, os.fstat(file.fileno()).st_size)
    if isinstance(found, str):
        raise JournalError(f"journal {path}, byte {position.offset}: {found}")
    return found


def _read_record_at(file: BinaryIO, offset: int, end: int) -> tuple[int, JournalRecord | str]:
    """The record at `offset` of a file of `end` bytes, or why there is none; its size or 0."""
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
        return 0, "the record is cut off"
    meta, payload = file.read(meta_bytes), file.read(payload_bytes)
    fields, check = head[: _HEADER_STRUCT.size], head[_HEADER_STRUCT.size :]
    if check != _compute_body_checksum(fields, meta, (payload,), offset):
        return size, "the record does not match its checksum"
    try:
        read = parse_json(meta)
    except ValueError as error:
        return size, f"the record cannot be read: {error}"
    if not isinstance(read, dict) or not isinstance(read.get("kind"), str):
        return size, "the record says nothing of its kind"
    return size, JournalRecord(read, payload)


def _is_unwritten(file: BinaryIO, end: int) -> bool:
    """Whether the last sector before `end` is zero: a file system had room for it but no data."""
    start = (end - 1) // _SECTOR_BYTES * _SECTOR_BYTES
    file.seek(start)
    return not any(file.read(end - start))


def _is_partial_header(file: BinaryIO, offset: int) -> bool:
    """Whether a record begins here as one does, as far as it was written; a disk may give zeros."""
    file.seek(offset)
    head = file.read(len(MAGIC)).rstrip(b"\0")
    return MAGIC.startswith(head)


def _find_next_record(file: BinaryIO, offset: int, end: int) -> int | None:
    """Where the first intact record at or behind `offset` begins."""
    while offset < end:
        file.seek(offset)
        chunk = file.read(_SEARCH_BYTES)
        at = chunk.find(MAGIC)
        while at >= 0:
            if isinstance(_read_record_at(file, offset + at, end)[1], JournalRecord):
                return offset + at
            at = chunk.find(MAGIC, at + 1)
        # The chunks overlap: a magic may lie across their border.
        offset += max(1, len(chunk) - len(MAGIC) + 1)
    return None


def wrap_journal_errors(path: Path) -> AbstractContextManager[None]:
    """The system's errors as JournalError naming the file."""
    return wrap_os_errors(f"journal {path}", JournalError)


class SegmentWriter:
    """One segment file that is written at once, over what is there. A context: it is fsynced.

    Raises the system's errors.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def __enter__(self) -> "SegmentWriter":
        self._file = open(open_new_file(self._path), "wb")
        return self

    def write(self, record: JournalRecord) -> None:
        """Append a record."""
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
    """Write one file, replacing what is there, and fsync it. Raises the system's errors."""
    with SegmentWriter(path) as file:
        for record in records:
            file.write(record)


def fsync_path(path: Path) -> None:
    """Have the disk hold what a file, or a directory, has now."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

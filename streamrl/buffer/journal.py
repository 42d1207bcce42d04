"""Journal: durable log of records with a single owner, in numbered segment files.

Group commit: all records that arrive during a write and its fsync form the next write. Writing
happens in a thread, so that a slow disk never blocks the owner's event loop.

A segment file is a sequence of checksummed records. Layout of a record: header of 32 bytes, meta as
JSON, payload.

    magic 6 | format 2 | meta bytes 4 | payload bytes 8 | xxh3_64 of fields, meta, payload 8 |
    xxh32 of the header so far 4

Checksums are seeded with the record's offset, so that records inside a payload (a journal stored as
data) are never mistaken for records of the file.
"""

import asyncio
import contextlib
import errno
import json
import os
import struct
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Annotated, Any, BinaryIO, ClassVar

import msgspec
import xxhash

from streamrl.buffer.encoding import Blob, Buffer, count_blob_bytes, join_pieces, split_pieces
from streamrl.errors import JournalError, NoSpaceError
from streamrl.files.atomic_write import NO_SPACE, fsync_path, open_new_file, wrap_os_errors
from streamrl.files.bounded_read import open_regular_file, parse_json
from streamrl.files.typed_settings import FIXED_ON_RESUME

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


def write_segment(path: Path, records: Iterable[JournalRecord]) -> None:
    """Write records into one segment file, in place of an existing one, and fsync it.

    Raises OSError.
    """
    offset = 0
    with open(open_new_file(path), "wb") as file:
        for record in records:
            frame = encode_record(record)
            meta, pieces = frame
            offset += file.write(join_pieces((encode_header(frame, offset), meta, *pieces)))
        file.flush()
        os.fsync(file.fileno())
    fsync_path(path.parent)


MAX_POST_DELAY_S = 0.05
"""Longest delay of `append_nowait` records, which share the next write, s."""
_MAX_BUFFERS = os.sysconf("SC_IOV_MAX")


@dataclass
class JournalConfig:
    """The journals of the experience queue.

    enabled: whether accepted groups survive the death of their shard.
    fsync: whether every group commit is synced; if not, data survives a killed process, but not a
        power cut.
    """

    enabled: Annotated[bool, FIXED_ON_RESUME] = True
    fsync: bool = True
    max_mb: ClassVar[int] = 4096
    """Growth of the journals since the last checkpoint that triggers an early checkpoint, MB."""
    segment_mb: ClassVar[int] = 64
    """Size after which a journal starts a new segment, MB."""


def _write_all(descriptor: int, buffers: list[memoryview]) -> None:
    """Write all buffers to a file; a single call of writev may write only some of them."""
    first = 0
    while first < len(buffers):
        written = os.writev(descriptor, buffers[first : first + _MAX_BUFFERS])
        while first < len(buffers) and written >= len(buffers[first]):
            written -= len(buffers[first])
            first += 1
        if written:
            buffers[first] = buffers[first][written:]


class RecordLog:
    """Log to which a shard or the run log appends its state changes.

    The base class discards all records, for a queue without durability; `Journal` writes them.
    """

    @property
    def num_bytes(self) -> int:
        return 0

    def drain_fsync_s(self) -> float:
        """Return the time spent in fsync since the last call, s."""
        return 0.0

    async def append(self, records: Sequence[JournalRecord], *, sync: bool = True) -> object:
        """Append records to the log; return once they are as durable as the log's settings require.

        Without `sync`, return once the operating system has the records: they survive the death of
        this process, but not a power cut.
        """

    def append_nowait(self, records: Sequence[JournalRecord]) -> None:
        """Append records to the log without waiting for the disk.

        For records that may get lost in a crash: work is then repeated, but no group is lost.
        """


class _JournalWriter:
    """Writes records into the segment files of a journal. Blocks on the disk; not thread-safe."""

    def __init__(self, folder: Path, config: JournalConfig, first: int) -> None:
        self._folder = folder
        self._max_segment_bytes = config.segment_mb << 20
        self.descriptor, self._end_offset = -1, 0
        self._can_sync = config.fsync
        self.is_dirty, self.fsync_total_s = False, 0.0
        missing_dirs = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        for path in missing_dirs if self._can_sync else ():
            fsync_path(path.parent)
        present = list_segments(folder)
        if present and self._can_sync:
            # The last writer may have died before its fsync, but replay builds on its records.
            fsync_path(get_segment_path(folder, present[-1]))
        self.segment = max([first - 1, *present])
        self._begin_segment()

    def commit_records(
        self, frames: Sequence[EncodedRecord], *, sync: bool, cut: bool
    ) -> list[RecordPosition]:
        """Append encoded records to the current segment file; return their positions.

        The last position in the list is extra: where the next record will begin. A full segment is
        closed first.
        sync: fsync the records.
        cut: fsync the records and start a new segment after them; if the disk has no space for the
            new segment, the extra position stays in the old segment.

        Raises JournalError; after that the writer must not be used again.
        """
        try:
            if get_segment_path(self._folder, self.segment + 1).exists():
                # Fences a process that was presumed dead: its successor owns the journal now.
                raise FileExistsError(errno.EEXIST, "another process has taken this journal over")
            if self._end_offset >= self._max_segment_bytes:
                self._sync_segment()
                self._begin_segment()
            positions = self._write_records(frames)
            if sync or cut:
                self._sync_segment()
            self._end_offset = positions[-1].offset
            if cut and self._end_offset and self._try_begin_segment():
                positions[-1] = RecordPosition(self.segment, 0, 0)
        except OSError as error:
            raise JournalError(self._truncate_tail(error)) from error
        return positions

    def _write_records(self, frames: Sequence[EncodedRecord]) -> list[RecordPosition]:
        """Write encoded records at the end of the segment file.

        Returns the records' positions and, last, that of the next record.
        """
        positions, buffers, offset = [], [], self._end_offset
        for frame in frames:
            meta, pieces = frame
            head = encode_header(frame, offset) + meta
            positions.append(
                RecordPosition(self.segment, offset, len(head) + count_blob_bytes(pieces))
            )
            buffers += [memoryview(head), *pieces]
            offset += positions[-1].size
        self.is_dirty |= bool(frames)
        _write_all(self.descriptor, buffers)
        return [*positions, RecordPosition(self.segment, offset, 0)]

    def _sync_segment(self) -> None:
        """Fsync the current segment file if it has unsynced records and syncing is enabled."""
        if not (self._can_sync and self.is_dirty):
            return
        started = time.monotonic()
        # After a failed fsync Linux may drop the dirty pages, and a second fsync would succeed
        # without them. So no fsync is tried again once one has failed.
        self._can_sync = False
        os.fsync(self.descriptor)
        self._can_sync, self.is_dirty = True, False
        self.fsync_total_s += time.monotonic() - started

    def _try_begin_segment(self) -> bool:
        """Start a new segment file; if the disk is full, keep the current file and return False."""
        try:
            self._begin_segment()
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            return False
        return True

    def _begin_segment(self) -> None:
        """Create the next segment file and write to it from now on."""
        path = get_segment_path(self._folder, self.segment + 1)
        # O_EXCL fences two writers of the same folder: the later writer fails here.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            if self._can_sync:
                fsync_path(self._folder)
        except OSError:
            os.close(descriptor)
            path.unlink()
            raise
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.segment, self.path = self.segment + 1, path
        self.descriptor, self._end_offset, self.is_dirty = descriptor, 0, False

    def _truncate_tail(self, error: OSError) -> str:
        """Cut the records of a failed write off the segment file; return an error message."""
        with contextlib.suppress(OSError):
            os.ftruncate(self.descriptor, self._end_offset)
            self._sync_segment()
        return f"journal {self.path}: {error.strerror or error}; earlier accepted records are safe"


_PositionsFuture = asyncio.Future[list[RecordPosition]]


@dataclass(frozen=True, eq=False)
class _PendingAppend:
    """Records of one append call that wait for the next write of a journal.

    sync: whether the records ask for an fsync of their write.
    should_rotate: the journal starts a new segment after these records.
    """

    frames: list[EncodedRecord]
    future: _PositionsFuture
    sync: bool
    should_rotate: bool


class Journal(RecordLog):
    """Durable log of records in one folder, for a single owner on an event loop.

    A thread waits for the disk. Group commit: records that arrive during a write go out together in
    the next write. A new journal starts a segment numbered above all existing segments and at least
    `first`, so that an incomplete record of a killed predecessor stays at the end of its own
    segment. The caller must not change payloads until they are written. Once a write or fsync has
    failed, every method raises JournalError, because later records would break the order.
    """

    def __init__(
        self,
        folder: Path,
        config: JournalConfig,
        *,
        first: int = 1,
    ) -> None:
        self._folder = folder
        with wrap_journal_errors(folder):
            self._writer = _JournalWriter(folder, config, first)
            self._segment_sizes = {
                n: get_segment_path(folder, n).stat().st_size for n in list_segments(folder)
            }
        self._thread = ThreadPoolExecutor(1, "journal")
        self._pending_appends: list[_PendingAppend] = []
        self._is_busy = self._is_closed = False
        self._failure = ""
        self._drained_s = 0.0

    @property
    def segment(self) -> int:
        return self._writer.segment

    @property
    def num_bytes(self) -> int:
        return sum(self._segment_sizes.values())

    def drain_fsync_s(self) -> float:
        before, self._drained_s = self._drained_s, self._writer.fsync_total_s
        return self._drained_s - before

    async def append(
        self, records: Sequence[JournalRecord], *, sync: bool = True
    ) -> list[RecordPosition]:
        """Append records; return their positions once they are as durable as `fsync` requires.

        Without `sync`, return once the operating system has the records: they survive the death of
        this process, but not a power cut. Records are written, and callers resumed, in the order of
        the calls. The records of a cancelled call may still be written.
        """
        return await self._submit_records(records, sync=sync)

    def append_nowait(self, records: Sequence[JournalRecord]) -> None:
        """Append records without waiting; they are written within MAX_POST_DELAY_S.

        If the write fails, the next call of any method raises JournalError.
        """
        # _finish_commit skips cancelled futures.
        self._submit_records(records, sync=False, delay_s=MAX_POST_DELAY_S).cancel()

    async def rotate(self) -> int:
        """Start a new segment file and return its number; all earlier records have lower numbers.

        Raises NoSpaceError if the disk is full; the journal then continues in the current segment.
        """
        position = (await self._submit_records([], sync=True, cut=True))[-1]
        if position.offset:
            path = get_segment_path(self._folder, position.segment + 1)
            raise NoSpaceError(f"journal {path} cannot be created: {os.strerror(errno.ENOSPC)}")
        return position.segment

    def discard_before(self, segment: int) -> None:
        """Delete the segment files with numbers below `segment`.

        Raises JournalError if a file cannot be deleted.
        """
        assert segment <= self.segment, (segment, self.segment)
        # Ascending, so that a crash leaves no gap.
        for number in sorted(n for n in self._segment_sizes if n < segment):
            path = get_segment_path(self._folder, number)
            with wrap_journal_errors(path):
                path.unlink(missing_ok=True)
            del self._segment_sizes[number]

    async def close(self) -> None:
        last = self._submit_records([], sync=True)
        self._is_closed = True
        await last

    def _submit_records(
        self,
        records: Sequence[JournalRecord],
        *,
        sync: bool,
        cut: bool = False,
        delay_s: float = 0.0,
    ) -> _PositionsFuture:
        """Queue records for the next write; return a future of their positions.

        sync: as in `_PendingAppend`. cut: start a new segment after the records. delay_s: delay of
        the write, unless a different call starts the write earlier.
        """
        frames = [encode_record(record) for record in records]
        if self._failure:
            raise JournalError(self._failure)
        assert not self._is_closed, "the journal is closed"
        loop = asyncio.get_running_loop()
        job = _PendingAppend(frames, loop.create_future(), sync, cut)
        self._pending_appends.append(job)
        # Deferred, so that records appended in this iteration of the event loop share the write.
        loop.call_later(delay_s, self._start_commit)
        return job.future

    def _start_commit(self) -> None:
        """Write pending appends in the thread, up to the first append that starts a new segment."""
        if self._is_busy or not self._pending_appends:
            return
        cuts = (index for index, job in enumerate(self._pending_appends, 1) if job.should_rotate)
        count = next(cuts, len(self._pending_appends))
        jobs, self._pending_appends = self._pending_appends[:count], self._pending_appends[count:]
        commit = partial(
            self._writer.commit_records,
            [frame for job in jobs for frame in job.frames],
            sync=any(job.sync for job in jobs),
            cut=jobs[-1].should_rotate,
        )
        self._is_busy = True
        done = asyncio.get_running_loop().run_in_executor(self._thread, commit)
        done.add_done_callback(partial(self._finish_commit, jobs))

    def _finish_commit(self, jobs: list[_PendingAppend], done: _PositionsFuture) -> None:
        """Resume the callers that wait for a finished write; start the next write."""
        self._is_busy = False
        error = done.exception()
        if error is not None:
            self._fail_pending(error, jobs)
            return
        self._segment_sizes.update(
            (position.segment, position.offset + position.size) for position in done.result()
        )
        positions = iter(done.result())
        for job in jobs:
            job_positions = list(islice(positions, len(job.frames) + job.should_rotate))
            if not job.future.done():
                job.future.set_result(job_positions)
        loop = asyncio.get_running_loop()
        if self._is_closed and not self._pending_appends:
            self._close_segment()
        # After the waiters have run: records they append next share the write.
        loop.call_soon(self._start_commit)

    def _fail_pending(self, error: BaseException, jobs: list[_PendingAppend]) -> None:
        """Raise a JournalError in all waiting appends and close the journal for good."""
        # Any exception but a JournalError is a bug, but waiters must not hang.
        self._failure = str(error) if isinstance(error, JournalError) else repr(error)
        for job in (*jobs, *self._pending_appends):
            if not job.future.done():
                failure = JournalError(self._failure)
                failure.__cause__ = error
                job.future.set_exception(failure)
        self._pending_appends.clear()
        self._close_segment()

    def _close_segment(self) -> None:
        self._thread.shutdown(wait=False)
        os.close(self._writer.descriptor)

"""Journal: durable log of records with a single owner, in numbered segment files.

Group commit: all records that arrive during a write and its fsync form the next write. Writing
happens in a thread, so that a slow disk never blocks the owner's event loop.
"""

import asyncio
import contextlib
import errno
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import ClassVar

from streamrl.buffer.encoding import count_blob_bytes
from streamrl.buffer.segment_file import (
    EncodedRecord,
    JournalRecord,
    RecordPosition,
    encode_header,
    encode_record,
    get_segment_path,
    list_segments,
    wrap_journal_errors,
)
from streamrl.errors import JournalError, NoSpaceError
from streamrl.files.atomic_write import NO_SPACE, fsync_path

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

    enabled: bool = True
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

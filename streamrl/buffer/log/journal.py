"""The durable log of one owner: records in numbered segment files, accepted in group commits.

What is written and synced in one go is all that came while the last such commit was under way; it
happens in a thread, so that a slow disk never stops the owner.
"""

import asyncio
import contextlib
import errno
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Protocol

from streamrl.buffer.codec import count_blob_bytes
from streamrl.buffer.log.segment_file import (
    EncodedRecord,
    JournalRecord,
    RecordPosition,
    encode_header,
    encode_record,
    fsync_path,
    list_segments,
    segment_path,
    wrap_journal_errors,
)
from streamrl.errors import ConfigError, JournalError, NoSpaceError
from streamrl.files.atomic_write import NO_SPACE

_ClockFunction = Callable[[], float]
MAX_POST_DELAY_S = 0.05
"""Longest that records nobody waits for are kept back to go out with others, s."""
_MAX_BUFFERS = os.sysconf("SC_IOV_MAX")
SEGMENT_MB = 64
"""Size after which a journal begins a new file, MB; less if it may not grow as large."""


@dataclass
class JournalConfig:
    """The journals of the experience queue.

    enabled: whether accepted groups survive the death of their shard.
    fsync_s: longest time between two fsyncs, s; 0 syncs every group commit, null leaves it to the
        system (survives a killed process, not a power cut).
    max_mb: a checkpoint is taken early once the journals have grown by this since the last, MB.
    """

    enabled: bool = True
    fsync_s: float | None = 0.0
    max_mb: int = 4096

    def __post_init__(self) -> None:
        if self.fsync_s is not None and not self.fsync_s >= 0:
            raise ConfigError(f"queue.journal.fsync_s={self.fsync_s}: must be 0 s or more, or null")
        if self.max_mb < 1:
            raise ConfigError(f"queue.journal.max_mb={self.max_mb}: must be at least 1 MB")

    @property
    def segment_bytes(self) -> int:
        """Size after which a new file is begun."""
        return min(SEGMENT_MB, self.max_mb) << 20


def _write_all(descriptor: int, buffers: list[memoryview]) -> None:
    """Write the buffers one after the other; a system call may take fewer bytes than given."""
    first = 0
    while first < len(buffers):
        written = os.writev(descriptor, buffers[first : first + _MAX_BUFFERS])
        while first < len(buffers) and written >= len(buffers[first]):
            written -= len(buffers[first])
            first += 1
        if written:
            buffers[first] = buffers[first][written:]


class RecordLog(Protocol):
    """Where transitions are kept: a journal, or nothing."""

    @property
    def num_bytes(self) -> int: ...

    def drain_fsync_s(self) -> float: ...

    async def append(self, records: Sequence[JournalRecord], *, sync: bool = True) -> object:
        """Returns once they are safe; without `sync` from the death of the process only."""
        ...

    def append_nowait(self, records: Sequence[JournalRecord]) -> None:
        """They will be safe soon: to lose one costs work, not a group."""
        ...


class NullRecordLog:
    """For a queue that need not survive its shards."""

    num_bytes = 0

    def drain_fsync_s(self) -> float:
        """Nothing is synced."""
        return 0.0

    async def append(self, records: Sequence[JournalRecord], *, sync: bool = True) -> None:
        """Nothing to wait for."""

    def append_nowait(self, records: Sequence[JournalRecord]) -> None:
        """Nothing to do."""


class _JournalWriter:
    """The files of a journal; only one thread uses it at a time."""

    def __init__(
        self, folder: Path, config: JournalConfig, clock: _ClockFunction, first: int
    ) -> None:
        self._folder, self._clock = folder, clock
        self._fsync_s, self._max_segment_bytes = config.fsync_s, config.segment_bytes
        self.descriptor, self._end_offset = -1, 0
        self._can_sync = self._fsync_s is not None
        self.is_dirty, self.synced_at, self.fsync_total_s = False, clock(), 0.0
        made = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        for path in made if self._can_sync else ():
            fsync_path(path.parent)
        present = list_segments(folder)
        if present and self._can_sync:
            # Its writer may have died before its fsync, yet what it wrote is replayed and built on.
            fsync_path(segment_path(folder, present[-1]))
        self.segment = max([first - 1, *present])
        self._begin_segment()

    def commit_records(
        self, frames: Sequence[EncodedRecord], *, sync: bool, cut: bool
    ) -> list[RecordPosition]:
        """Write, fsync, begin a new segment: the places of the records, then that of the next.

        Where there is no room for a new one, the last place lies behind the records. Raises
        JournalError; the writer must not be used any more then.
        """
        try:
            if segment_path(self._folder, self.segment + 1).exists():
                # A process that was given up for dead and lives on must not go on writing.
                raise FileExistsError(errno.EEXIST, "another process has taken this journal over")
            if self._end_offset >= self._max_segment_bytes:
                self._sync_segment()
                self._begin_segment()
            places = self._write_records(frames)
            if sync or cut:
                self._sync_segment()
            self._end_offset = places[-1].offset
            if cut and self._end_offset and self._try_begin_segment():
                places[-1] = RecordPosition(self.segment, 0, 0)
        except OSError as error:
            raise JournalError(self._truncate_tail(error)) from error
        return places

    def _write_records(self, frames: Sequence[EncodedRecord]) -> list[RecordPosition]:
        places, buffers, offset = [], [], self._end_offset
        for frame in frames:
            meta, pieces = frame
            head = encode_header(frame, offset) + meta
            places.append(
                RecordPosition(self.segment, offset, len(head) + count_blob_bytes(pieces))
            )
            buffers += [memoryview(head), *pieces]
            offset += places[-1].size
        self.is_dirty |= bool(frames)
        _write_all(self.descriptor, buffers)
        return [*places, RecordPosition(self.segment, offset, 0)]

    def _sync_segment(self) -> None:
        if not (self._can_sync and self.is_dirty):
            return
        began = self._clock()
        # The system may drop what it failed to write: a second fsync would succeed all the same.
        self._can_sync = False
        os.fsync(self.descriptor)
        self._can_sync, self.is_dirty, self.synced_at = True, False, began
        self.fsync_total_s += self._clock() - began

    def _try_begin_segment(self) -> bool:
        """Begin a new segment; False where there is no room: all goes on in the one that is."""
        try:
            self._begin_segment()
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            return False
        return True

    def _begin_segment(self) -> None:
        path = segment_path(self._folder, self.segment + 1)
        # Exclusive: if somebody else writes into this folder, the later one must not go on.
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
        """Cut off what was not accepted; what there is to say."""
        with contextlib.suppress(OSError):
            os.ftruncate(self.descriptor, self._end_offset)
            self._sync_segment()
        lost = self._fsync_s and not self._can_sync
        safe = "fsynced" if lost else "accepted"
        return f"journal {self.path}: {error.strerror or error}; what was {safe} before is safe"


_PositionsFuture = asyncio.Future[list[RecordPosition]]


@dataclass(frozen=True, eq=False)
class _PendingAppend:
    """Records that came in one call; with `cut` a new segment begins behind them.

    `sync` is whether they want an fsync: True at once, None as the policy says, False not at all.
    """

    frames: list[EncodedRecord]
    future: _PositionsFuture
    sync: bool | None
    should_rotate: bool


class Journal:
    """The log as its owner writes it, on one event loop; the disk is waited for in a thread.

    Group commit: what comes while a write is under way goes out together in the next. A new
    journal begins a segment above all present and not below `first`: the torn end of a killed
    predecessor stays what it is. Payloads must not change until they are written. Every method
    raises JournalError once a write or an fsync has failed, since the order would be broken.
    """

    def __init__(
        self,
        folder: Path,
        config: JournalConfig,
        *,
        clock: _ClockFunction = time.monotonic,
        first: int = 1,
    ) -> None:
        self._folder, self._fsync_s, self._clock = folder, config.fsync_s, clock
        with wrap_journal_errors(folder):
            self._writer = _JournalWriter(folder, config, clock, first)
            self._segment_sizes = {
                n: segment_path(folder, n).stat().st_size for n in list_segments(folder)
            }
        self._thread = ThreadPoolExecutor(1, "journal")
        self._pending_appends: list[_PendingAppend] = []
        self._is_busy = self._is_closed = False
        self._failure = ""
        self._sync_timer: asyncio.TimerHandle | None = None
        self._drained_s = 0.0

    @property
    def segment(self) -> int:
        """Number of the segment now written."""
        return self._writer.segment

    @property
    def num_bytes(self) -> int:
        """Bytes of all segments present."""
        return sum(self._segment_sizes.values())

    def drain_fsync_s(self) -> float:
        """Seconds spent in fsync since the last call."""
        before, self._drained_s = self._drained_s, self._writer.fsync_total_s
        return self._drained_s - before

    async def append(
        self, records: Sequence[JournalRecord], *, sync: bool = True
    ) -> list[RecordPosition]:
        """Returns where the records are once they are as durable as `fsync_s` says.

        Without `sync` once they are written, which survives the death of the process. They stay in
        the order of the calls, and so do the waiters. A cancelled call may still have been written.
        """
        return await self._submit_records(records, sync=None if sync else False)

    def append_nowait(self, records: Sequence[JournalRecord]) -> None:
        """The same without waiting: written with the next records, or POST_S later.

        A failure is raised by the next call.
        """
        # Nobody waits: a cancelled waiter is passed over.
        self._submit_records(records, sync=False, delay_s=MAX_POST_DELAY_S).cancel()

    async def rotate(self) -> int:
        """The segment that begins with the next record; all so far are written, in lower ones.

        Raises NoSpaceError where there is no room for one: the journal goes on in the one it has.
        """
        place = (await self._submit_records([], sync=None, cut=True))[-1]
        if place.offset:
            path = segment_path(self._folder, place.segment + 1)
            raise NoSpaceError(f"journal {path} cannot be begun: {os.strerror(errno.ENOSPC)}")
        return place.segment

    def discard_before(self, segment: int) -> None:
        """Remove the files of lower segments. Raises JournalError if one stays."""
        assert segment <= self.segment, (segment, self.segment)
        # The lowest first, so that a crash leaves no gap.
        for number in sorted(n for n in self._segment_sizes if n < segment):
            path = segment_path(self._folder, number)
            with wrap_journal_errors(path):
                path.unlink(missing_ok=True)
            del self._segment_sizes[number]

    async def close(self) -> None:
        """Write and fsync what there is; the journal must not be used any more."""
        last = self._submit_records([], sync=True)
        self._is_closed = True
        await last

    def _submit_records(
        self,
        records: Sequence[JournalRecord],
        *,
        sync: bool | None,
        cut: bool = False,
        delay_s: float = 0.0,
    ) -> _PositionsFuture:
        frames = [encode_record(record) for record in records]
        if self._failure:
            raise JournalError(self._failure)
        assert not self._is_closed, "the journal is closed"
        loop = asyncio.get_running_loop()
        job = _PendingAppend(frames, loop.create_future(), sync, cut)
        self._pending_appends.append(job)
        # Not at once: what else comes in this turn of the loop goes out with it.
        loop.call_later(delay_s, self._start_commit)
        return job.future

    def _start_commit(self) -> None:
        """Give the thread what waits, up to the first cut."""
        if self._is_busy or not self._pending_appends:
            return
        cuts = (index for index, job in enumerate(self._pending_appends, 1) if job.should_rotate)
        count = next(cuts, len(self._pending_appends))
        jobs, self._pending_appends = self._pending_appends[:count], self._pending_appends[count:]
        commit = partial(
            self._writer.commit_records,
            [frame for job in jobs for frame in job.frames],
            sync=self._should_sync(jobs),
            cut=jobs[-1].should_rotate,
        )
        self._is_busy = True
        done = asyncio.get_running_loop().run_in_executor(self._thread, commit)
        done.add_done_callback(partial(self._finish_commit, jobs))

    def _finish_commit(self, jobs: list[_PendingAppend], done: _PositionsFuture) -> None:
        self._is_busy = False
        error = done.exception()
        if error is not None:
            self._fail_pending(error, jobs)
            return
        self._segment_sizes.update(
            (place.segment, place.offset + place.size) for place in done.result()
        )
        places = iter(done.result())
        for job in jobs:
            mine = list(islice(places, len(job.frames) + job.should_rotate))
            if not job.future.done():
                job.future.set_result(mine)
        loop = asyncio.get_running_loop()
        if self._is_closed and not self._pending_appends:
            self._close_segment()
        elif self._sync_timer is None and self._writer.is_dirty and self._fsync_s:
            self._sync_timer = loop.call_later(
                max(0.0, self._sync_due_in_s()), self._run_overdue_sync
            )
        # Behind the waiters: what they append next goes out with what waits already.
        loop.call_soon(self._start_commit)

    def _fail_pending(self, error: BaseException, jobs: list[_PendingAppend]) -> None:
        # Anything else than a JournalError is a bug, yet nobody must wait for ever.
        self._failure = str(error) if isinstance(error, JournalError) else repr(error)
        for job in (*jobs, *self._pending_appends):
            if not job.future.done():
                refusal = JournalError(self._failure)
                refusal.__cause__ = error
                job.future.set_exception(refusal)
        self._pending_appends.clear()
        self._close_segment()

    def _should_sync(self, jobs: list[_PendingAppend]) -> bool:
        is_due = self._sync_due_in_s() <= 0
        return any(job.sync or (job.sync is None and is_due) for job in jobs)

    def _sync_due_in_s(self) -> float:
        """Seconds until the next fsync is due."""
        if self._fsync_s is None:
            return float("inf")
        return self._writer.synced_at + self._fsync_s - self._clock()

    def _run_overdue_sync(self) -> None:
        """The time is over without a commit that would have brought the fsync."""
        self._sync_timer = None
        if not (self._is_closed or self._failure):
            self._submit_records([], sync=None).cancel()

    def _close_segment(self) -> None:
        if self._sync_timer is not None:
            self._sync_timer.cancel()
        self._thread.shutdown(wait=False)
        os.close(self._writer.descriptor)

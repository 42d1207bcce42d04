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

from streamrl.buffer.codec import size_of
from streamrl.buffer.log.segment_file import (
    Frame,
    Position,
    Record,
    frame_of,
    fsync_path,
    header_of,
    journal_errors,
    segment_path,
    segments,
)
from streamrl.errors import ConfigError, JournalError, NoSpaceError
from streamrl.files.atomic_write import NO_SPACE

_Clock = Callable[[], float]
POST_S = 0.05
"""Longest that records nobody waits for are kept back to go out with others, s."""
_MOST_BUFFERS = os.sysconf("SC_IOV_MAX")
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
        written = os.writev(descriptor, buffers[first : first + _MOST_BUFFERS])
        while first < len(buffers) and written >= len(buffers[first]):
            written -= len(buffers[first])
            first += 1
        if written:
            buffers[first] = buffers[first][written:]


class Log(Protocol):
    """Where transitions are kept: a journal, or nothing."""

    @property
    def num_bytes(self) -> int: ...

    def drain_fsync_s(self) -> float: ...

    async def append(self, records: Sequence[Record], *, sync: bool = True) -> object:
        """Returns once they are safe; without `sync` from the death of the process only."""
        ...

    def post(self, records: Sequence[Record]) -> None:
        """They will be safe soon: to lose one costs work, not a group."""
        ...


class NoLog:
    """For a queue that need not survive its shards."""

    num_bytes = 0

    def drain_fsync_s(self) -> float:
        """Nothing is synced."""
        return 0.0

    async def append(self, records: Sequence[Record], *, sync: bool = True) -> None:
        """Nothing to wait for."""

    def post(self, records: Sequence[Record]) -> None:
        """Nothing to do."""


class _Writer:
    """The files of a journal; only one thread uses it at a time."""

    def __init__(self, folder: Path, config: JournalConfig, clock: _Clock, first: int) -> None:
        self._folder, self._clock = folder, clock
        self._fsync_s, self._most_bytes = config.fsync_s, config.segment_bytes
        self.descriptor, self._end = -1, 0
        self._can_sync = self._fsync_s is not None
        self.dirty, self.synced_at, self.fsync_total_s = False, clock(), 0.0
        made = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        for path in made if self._can_sync else ():
            fsync_path(path.parent)
        present = segments(folder)
        if present and self._can_sync:
            # Its writer may have died before its fsync, yet what it wrote is replayed and built on.
            fsync_path(segment_path(folder, present[-1]))
        self.segment = max([first - 1, *present])
        self._begin()

    def commit(self, frames: Sequence[Frame], *, sync: bool, cut: bool) -> list[Position]:
        """Write, fsync, begin a new segment: the places of the records, then that of the next.

        Where there is no room for a new one, the last place lies behind the records. Raises
        JournalError; the writer must not be used any more then.
        """
        try:
            if segment_path(self._folder, self.segment + 1).exists():
                # A process that was given up for dead and lives on must not go on writing.
                raise FileExistsError(errno.EEXIST, "another process has taken this journal over")
            if self._end >= self._most_bytes:
                self._sync()
                self._begin()
            places = self._write(frames)
            if sync or cut:
                self._sync()
            self._end = places[-1].offset
            if cut and self._end and self._has_begun():
                places[-1] = Position(self.segment, 0, 0)
        except OSError as error:
            raise JournalError(self._give_up(error)) from error
        return places

    def _write(self, frames: Sequence[Frame]) -> list[Position]:
        places, buffers, offset = [], [], self._end
        for frame in frames:
            meta, pieces = frame
            head = header_of(frame, offset) + meta
            places.append(Position(self.segment, offset, len(head) + size_of(pieces)))
            buffers += [memoryview(head), *pieces]
            offset += places[-1].size
        self.dirty |= bool(frames)
        _write_all(self.descriptor, buffers)
        return [*places, Position(self.segment, offset, 0)]

    def _sync(self) -> None:
        if not (self._can_sync and self.dirty):
            return
        began = self._clock()
        # The system may drop what it failed to write: a second fsync would succeed all the same.
        self._can_sync = False
        os.fsync(self.descriptor)
        self._can_sync, self.dirty, self.synced_at = True, False, began
        self.fsync_total_s += self._clock() - began

    def _has_begun(self) -> bool:
        """Begin a new segment; False where there is no room: all goes on in the one that is."""
        try:
            self._begin()
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            return False
        return True

    def _begin(self) -> None:
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
        self.descriptor, self._end, self.dirty = descriptor, 0, False

    def _give_up(self, error: OSError) -> str:
        """Cut off what was not accepted; what there is to say."""
        with contextlib.suppress(OSError):
            os.ftruncate(self.descriptor, self._end)
            self._sync()
        lost = self._fsync_s and not self._can_sync
        safe = "fsynced" if lost else "accepted"
        return f"journal {self.path}: {error.strerror or error}; what was {safe} before is safe"


_Places = asyncio.Future[list[Position]]


@dataclass(frozen=True, eq=False)
class _Job:
    """Records that came in one call; with `cut` a new segment begins behind them.

    `sync` is whether they want an fsync: True at once, None as the policy says, False not at all.
    """

    frames: list[Frame]
    waiter: _Places
    sync: bool | None
    cut: bool


class Journal:
    """The log as its owner writes it, on one event loop; the disk is waited for in a thread.

    Group commit: what comes while a write is under way goes out together in the next. A new
    journal begins a segment above all present and not below `first`: the torn end of a killed
    predecessor stays what it is. Payloads must not change until they are written. Every method
    raises JournalError once a write or an fsync has failed, since the order would be broken.
    """

    def __init__(
        self, folder: Path, config: JournalConfig, *, clock: _Clock = time.monotonic, first: int = 1
    ) -> None:
        self._folder, self._fsync_s, self._clock = folder, config.fsync_s, clock
        with journal_errors(folder):
            self._writer = _Writer(folder, config, clock, first)
            self._sizes = {n: segment_path(folder, n).stat().st_size for n in segments(folder)}
        self._thread = ThreadPoolExecutor(1, "journal")
        self._pending: list[_Job] = []
        self._busy = self._closed = False
        self._failure = ""
        self._timer: asyncio.TimerHandle | None = None
        self._drained_s = 0.0

    @property
    def segment(self) -> int:
        """Number of the segment now written."""
        return self._writer.segment

    @property
    def num_bytes(self) -> int:
        """Bytes of all segments present."""
        return sum(self._sizes.values())

    def drain_fsync_s(self) -> float:
        """Seconds spent in fsync since the last call."""
        before, self._drained_s = self._drained_s, self._writer.fsync_total_s
        return self._drained_s - before

    async def append(self, records: Sequence[Record], *, sync: bool = True) -> list[Position]:
        """Returns where the records are once they are as durable as `fsync_s` says.

        Without `sync` once they are written, which survives the death of the process. They stay in
        the order of the calls, and so do the waiters. A cancelled call may still have been written.
        """
        return await self._submit(records, sync=None if sync else False)

    def post(self, records: Sequence[Record]) -> None:
        """The same without waiting: written with the next records, or POST_S later.

        A failure is raised by the next call.
        """
        # Nobody waits: a cancelled waiter is passed over.
        self._submit(records, sync=False, delay_s=POST_S).cancel()

    async def rotate(self) -> int:
        """The segment that begins with the next record; all so far are written, in lower ones.

        Raises NoSpaceError where there is no room for one: the journal goes on in the one it has.
        """
        place = (await self._submit([], sync=None, cut=True))[-1]
        if place.offset:
            path = segment_path(self._folder, place.segment + 1)
            raise NoSpaceError(f"journal {path} cannot be begun: {os.strerror(errno.ENOSPC)}")
        return place.segment

    def discard_before(self, segment: int) -> None:
        """Remove the files of lower segments. Raises JournalError if one stays."""
        assert segment <= self.segment, (segment, self.segment)
        # The lowest first, so that a crash leaves no gap.
        for number in sorted(n for n in self._sizes if n < segment):
            path = segment_path(self._folder, number)
            with journal_errors(path):
                path.unlink(missing_ok=True)
            del self._sizes[number]

    async def close(self) -> None:
        """Write and fsync what there is; the journal must not be used any more."""
        last = self._submit([], sync=True)
        self._closed = True
        await last

    def _submit(
        self,
        records: Sequence[Record],
        *,
        sync: bool | None,
        cut: bool = False,
        delay_s: float = 0.0,
    ) -> _Places:
        frames = [frame_of(record) for record in records]
        if self._failure:
            raise JournalError(self._failure)
        assert not self._closed, "the journal is closed"
        loop = asyncio.get_running_loop()
        job = _Job(frames, loop.create_future(), sync, cut)
        self._pending.append(job)
        # Not at once: what else comes in this turn of the loop goes out with it.
        loop.call_later(delay_s, self._start)
        return job.waiter

    def _start(self) -> None:
        """Give the thread what waits, up to the first cut."""
        if self._busy or not self._pending:
            return
        cuts = (index for index, job in enumerate(self._pending, 1) if job.cut)
        count = next(cuts, len(self._pending))
        jobs, self._pending = self._pending[:count], self._pending[count:]
        commit = partial(
            self._writer.commit,
            [frame for job in jobs for frame in job.frames],
            sync=self._wants_sync(jobs),
            cut=jobs[-1].cut,
        )
        self._busy = True
        done = asyncio.get_running_loop().run_in_executor(self._thread, commit)
        done.add_done_callback(partial(self._finish, jobs))

    def _finish(self, jobs: list[_Job], done: _Places) -> None:
        self._busy = False
        error = done.exception()
        if error is not None:
            self._fail(error, jobs)
            return
        self._sizes.update((place.segment, place.offset + place.size) for place in done.result())
        places = iter(done.result())
        for job in jobs:
            mine = list(islice(places, len(job.frames) + job.cut))
            if not job.waiter.done():
                job.waiter.set_result(mine)
        loop = asyncio.get_running_loop()
        if self._closed and not self._pending:
            self._release()
        elif self._timer is None and self._writer.dirty and self._fsync_s:
            self._timer = loop.call_later(max(0.0, self._due_s()), self._sync_late)
        # Behind the waiters: what they append next goes out with what waits already.
        loop.call_soon(self._start)

    def _fail(self, error: BaseException, jobs: list[_Job]) -> None:
        # Anything else than a JournalError is a bug, yet nobody must wait for ever.
        self._failure = str(error) if isinstance(error, JournalError) else repr(error)
        for job in (*jobs, *self._pending):
            if not job.waiter.done():
                refusal = JournalError(self._failure)
                refusal.__cause__ = error
                job.waiter.set_exception(refusal)
        self._pending.clear()
        self._release()

    def _wants_sync(self, jobs: list[_Job]) -> bool:
        is_due = self._due_s() <= 0
        return any(job.sync or (job.sync is None and is_due) for job in jobs)

    def _due_s(self) -> float:
        """Seconds until the next fsync is due."""
        if self._fsync_s is None:
            return float("inf")
        return self._writer.synced_at + self._fsync_s - self._clock()

    def _sync_late(self) -> None:
        """The time is over without a commit that would have brought the fsync."""
        self._timer = None
        if not (self._closed or self._failure):
            self._submit([], sync=None).cancel()

    def _release(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._thread.shutdown(wait=False)
        os.close(self._writer.descriptor)

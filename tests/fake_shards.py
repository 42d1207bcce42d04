"""Shards in the same process that can be killed: what they wrote survives, nothing else does."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from msgspec.structs import replace

from streamrl.buffer import Bounds, Ports, QueueConfig, Shard, ShardStats
from streamrl.buffer.codec import Blob, join, size_of
from streamrl.buffer.group import GroupBook
from streamrl.buffer.leases import Overdue, Request
from streamrl.buffer.log.segment_file import Record
from streamrl.buffer.wire_types import Commit, Farewell, Grant
from streamrl.errors import StreamError
from streamrl.messages import Filtered, Lease

CALL_S = 0.001
RETRY_S = 0.2
Result = TypeVar("Result")


class MemoryLog:
    """A journal in memory: `records` is the disk. What was only posted may not have got there."""

    def __init__(self, *, write_s: float = 0.002) -> None:
        self.records: list[Record] = []
        self._waiting: list[Record] = []
        self.write_s = write_s
        self._writing = asyncio.Lock()

    @property
    def num_bytes(self) -> int:
        return sum(size_of(record.payload) for record in self.records)

    def drain_fsync_s(self) -> float:
        return 0.0

    async def append(self, records: Sequence[Record], *, sync: bool = True) -> None:
        self._waiting += records
        async with self._writing:
            written, self._waiting = self._waiting, []
            await asyncio.sleep(self.write_s)
            # The disk has what the payload is by now, not what becomes of it.
            self.records += [replace(record, payload=join(record.payload)) for record in written]

    def post(self, records: Sequence[Record]) -> None:
        self._waiting += records

    def crash(self) -> "MemoryLog":
        """What a successor finds."""
        left = MemoryLog(write_s=self.write_s)
        left.records = self.records
        return left


class LocalShard:
    """ShardFace over a Shard in the same process, with a little delay on every call.

    `kill` ends the shard with all that is under way in it; `revive` is what Ray does. A call that
    was under way is made again, as RemoteShard does. `loses` says whether the connection is lost
    over a call, which goes on while the caller makes it again.
    """

    def __init__(
        self,
        stages: Mapping[str, Ports],
        config: QueueConfig,
        bounds: Bounds,
        *,
        log: MemoryLog,
        session: str = "",
        repeats: Callable[[], bool] = lambda: False,
        loses: Callable[[], bool] = lambda: False,
    ) -> None:
        self._make: Callable[[MemoryLog], Shard] = lambda log: Shard(
            recover(stages, log), config, bounds=bounds, session=session, log=log
        )
        self.log = log
        self.deaths = 0
        self.notes = 0
        self._repeats = repeats
        self._loses = loses
        self.shard = self._make(log)
        self._running: dict[asyncio.Task[Any], None] = {}
        self._up = asyncio.Event()
        self._up.set()

    def kill(self) -> None:
        self.deaths += 1
        self._up.clear()
        for task in self._running:
            task.cancel()

    def revive(self) -> None:
        self.log = self.log.crash()
        self.shard = self._make(self.log)
        self._up.set()

    async def _call(self, work: Callable[[Shard], Awaitable[Result]]) -> Result:
        while True:
            await self._up.wait()
            deaths = self.deaths
            task = asyncio.ensure_future(self._one(work))
            self._running[task] = None
            task.add_done_callback(lambda done: self._running.pop(done, None))
            if self._loses():
                await asyncio.sleep(RETRY_S)
                continue
            try:
                return await asyncio.shield(task)
            except asyncio.CancelledError:
                # A caller that dies does not take back what it asked for.
                if self.deaths == deaths:
                    raise

    async def _ask(self, work: Callable[[Shard], Result]) -> Result:
        async def ask(shard: Shard) -> Result:
            return work(shard)

        return await self._call(ask)

    async def _one(self, work: Callable[[Shard], Awaitable[Result]]) -> Result:
        await asyncio.sleep(CALL_S)
        result = await work(self.shard)
        await asyncio.sleep(CALL_S)
        return result

    async def admit(self, entries: Sequence[tuple[str, bytes, int]], *, wait_s: float) -> list[str]:
        return await self._call(lambda shard: shard.admit(entries, wait_s=wait_s))

    async def add(
        self, entries: Sequence[tuple[str, bytes, int]], commits: Sequence[Commit], *, wait_s: float
    ) -> list[str]:
        return await self._call(lambda shard: shard.add(entries, commits, wait_s=wait_s))

    async def take(self, request: Request, *, wait_s: float) -> list[Grant]:
        return await self._call(lambda shard: shard.take(request, wait_s=wait_s))

    async def put(self, commits: Sequence[Commit]) -> list[str]:
        refused = await self._call(lambda shard: shard.put(commits))
        if self._repeats():
            again = await self._call(lambda shard: shard.put(commits))
            # What was refused may be taken now: a shard that died has forgotten that a lease ended.
            taken = {commit.lease.uid for commit in commits} - set(refused)
            assert taken <= set(again), "a commit was taken twice"
        return refused

    async def note(self, commits: Sequence[Commit]) -> None:
        self.notes += len(commits)
        await self._ask(lambda shard: shard.note(commits))

    async def fail(self, entries: Sequence[tuple[Lease, StreamError]]) -> None:
        await self._ask(lambda shard: shard.fail(entries))

    async def filter(self, entries: Sequence[tuple[Lease, Filtered]]) -> None:
        await self._ask(lambda shard: shard.filter(entries))

    async def renew(self, leases: Sequence[Lease]) -> list[Lease]:
        return await self._ask(lambda shard: shard.renew(leases))

    async def read(self, uids: Sequence[str], columns: Sequence[str]) -> list[Sequence[Blob]]:
        return await self._ask(lambda shard: shard.read(uids, columns))

    async def uids_with(self, column: str) -> list[str]:
        return await self._ask(lambda shard: shard.uids_with(column))

    async def ended(self, *, wait_s: float) -> list[Farewell]:
        return await self._call(lambda shard: shard.ended(wait_s=wait_s))

    async def leave(self, uids: Sequence[str], version: int) -> None:
        await self._call(lambda shard: shard.leave(uids, version))

    async def end_step(self, uids: Sequence[str], version: int) -> ShardStats:
        return await self._call(lambda shard: shard.end_step(uids, version))

    async def stats(self) -> ShardStats:
        return await self._ask(lambda shard: shard.stats())

    async def release(self, holder: str, *, died: bool = True) -> int:
        return await self._ask(lambda shard: shard.release(holder, died=died))

    async def overdue(self, age_s: float) -> list[Overdue]:
        return await self._ask(lambda shard: shard.overdue(age_s))

    async def take_back(self, found: Sequence[Overdue]) -> None:
        await self._ask(lambda shard: shard.take_back(found))

    async def whereabouts(self, uids: Sequence[str]) -> dict[str, str]:
        return await self._ask(lambda shard: shard.whereabouts(uids))


def recover(stages: Mapping[str, Ports], log: MemoryLog) -> GroupBook:
    """The groups as a log in memory has them."""
    book = GroupBook(stages)
    book.keeps_retired = True
    for record in log.records:
        book.apply(record, data=join(record.payload))
    book.keeps_retired = False
    return book

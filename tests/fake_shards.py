"""Shards in the same process that can be killed: what they wrote survives, nothing else does."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from msgspec.structs import replace

from streamrl.buffer import QueueConfig, QueueShard, ShardCapacity, ShardStats, StageSchema
from streamrl.buffer.codec import Blob, count_blob_bytes, join_pieces
from streamrl.buffer.group import ShardState
from streamrl.buffer.leases import LeaseRequest, OverdueLease
from streamrl.buffer.log.segment_file import JournalRecord
from streamrl.buffer.wire_types import ColumnCommit, FinishedGroup, LeaseGrant
from streamrl.errors import StreamError
from streamrl.messages import FilteredGroup, GroupLease

CALL_S = 0.001
RETRY_S = 0.2
Result = TypeVar("Result")


class MemoryLog:
    """A journal in memory: `records` is the disk. What was only posted may not have got there."""

    def __init__(self, *, write_s: float = 0.002) -> None:
        self.records: list[JournalRecord] = []
        self._waiting: list[JournalRecord] = []
        self.write_s = write_s
        self._writing = asyncio.Lock()

    @property
    def num_bytes(self) -> int:
        return sum(count_blob_bytes(record.payload) for record in self.records)

    def drain_fsync_s(self) -> float:
        return 0.0

    async def append(self, records: Sequence[JournalRecord], *, sync: bool = True) -> None:
        self._waiting += records
        async with self._writing:
            written, self._waiting = self._waiting, []
            await asyncio.sleep(self.write_s)
            # The disk has what the payload is by now, not what becomes of it.
            self.records += [
                replace(record, payload=join_pieces(record.payload)) for record in written
            ]

    def append_nowait(self, records: Sequence[JournalRecord]) -> None:
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
        stages: Mapping[str, StageSchema],
        config: QueueConfig,
        bounds: ShardCapacity,
        *,
        log: MemoryLog,
        session: str = "",
        repeats: Callable[[], bool] = lambda: False,
        loses: Callable[[], bool] = lambda: False,
    ) -> None:
        self._make: Callable[[MemoryLog], QueueShard] = lambda log: QueueShard(
            recover(stages, log), config, capacity=bounds, session=session, log=log
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

    async def _call(self, work: Callable[[QueueShard], Awaitable[Result]]) -> Result:
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

    async def _ask(self, work: Callable[[QueueShard], Result]) -> Result:
        async def ask(shard: QueueShard) -> Result:
            return work(shard)

        return await self._call(ask)

    async def _one(self, work: Callable[[QueueShard], Awaitable[Result]]) -> Result:
        await asyncio.sleep(CALL_S)
        result = await work(self.shard)
        await asyncio.sleep(CALL_S)
        return result

    async def admit_prompts(
        self, entries: Sequence[tuple[str, bytes, int]], *, wait_s: float
    ) -> list[str]:
        return await self._call(lambda shard: shard.admit_prompts(entries, wait_s=wait_s))

    async def add_groups(
        self,
        entries: Sequence[tuple[str, bytes, int]],
        commits: Sequence[ColumnCommit],
        *,
        wait_s: float,
    ) -> list[str]:
        return await self._call(lambda shard: shard.add_groups(entries, commits, wait_s=wait_s))

    async def lease_groups(self, request: LeaseRequest, *, wait_s: float) -> list[LeaseGrant]:
        return await self._call(lambda shard: shard.lease_groups(request, wait_s=wait_s))

    async def commit_columns(self, commits: Sequence[ColumnCommit]) -> list[str]:
        refused = await self._call(lambda shard: shard.commit_columns(commits))
        if self._repeats():
            again = await self._call(lambda shard: shard.commit_columns(commits))
            # What was refused may be taken now: a shard that died has forgotten that a lease ended.
            taken = {commit.lease.uid for commit in commits} - set(refused)
            assert taken <= set(again), "a commit was taken twice"
        return refused

    async def save_partials(self, commits: Sequence[ColumnCommit]) -> None:
        self.notes += len(commits)
        await self._ask(lambda shard: shard.save_partials(commits))

    async def fail_groups(self, entries: Sequence[tuple[GroupLease, StreamError]]) -> None:
        await self._ask(lambda shard: shard.fail_groups(entries))

    async def filter_groups(self, entries: Sequence[tuple[GroupLease, FilteredGroup]]) -> None:
        await self._ask(lambda shard: shard.filter_groups(entries))

    async def renew_leases(self, leases: Sequence[GroupLease]) -> list[GroupLease]:
        return await self._ask(lambda shard: shard.renew_leases(leases))

    async def read_columns(
        self, uids: Sequence[str], columns: Sequence[str]
    ) -> list[Sequence[Blob]]:
        return await self._ask(lambda shard: shard.read_columns(uids, columns))

    async def find_uids_with(self, column: str) -> list[str]:
        return await self._ask(lambda shard: shard.find_uids_with(column))

    async def wait_for_finished(self, *, wait_s: float) -> list[FinishedGroup]:
        return await self._call(lambda shard: shard.wait_for_finished(wait_s=wait_s))

    async def remove_groups(self, uids: Sequence[str], version: int) -> None:
        await self._call(lambda shard: shard.remove_groups(uids, version))

    async def end_step(self, uids: Sequence[str], version: int) -> ShardStats:
        return await self._call(lambda shard: shard.end_step(uids, version))

    async def get_stats(self) -> ShardStats:
        return await self._ask(lambda shard: shard.get_stats())

    async def release_holder(self, holder: str, *, died: bool = True) -> int:
        return await self._ask(lambda shard: shard.release_holder(holder, died=died))

    async def find_overdue(self, age_s: float) -> list[OverdueLease]:
        return await self._ask(lambda shard: shard.find_overdue(age_s))

    async def requeue_overdue(self, found: Sequence[OverdueLease]) -> None:
        await self._ask(lambda shard: shard.requeue_overdue(found))

    async def locate_groups(self, uids: Sequence[str]) -> dict[str, str]:
        return await self._ask(lambda shard: shard.locate_groups(uids))


def recover(stages: Mapping[str, StageSchema], log: MemoryLog) -> ShardState:
    """The groups as a log in memory has them."""
    book = ShardState(stages)
    book.should_keep_retired = True
    for record in log.records:
        book.apply_record(record, data=join_pieces(record.payload))
    book.should_keep_retired = False
    return book

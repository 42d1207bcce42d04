"""Shards in the same process that can be killed: what they wrote survives, nothing else does."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from msgspec.structs import replace

from streamrl.buffer import QueueConfig, QueueShard, ShardCapacity, StageSchema
from streamrl.buffer.codec import count_blob_bytes, join_pieces
from streamrl.buffer.group import ShardState
from streamrl.buffer.log.segment_file import JournalRecord
from streamrl.buffer.wire_types import ColumnCommit

CALL_S = 0.001
RETRY_S = 0.2
P = ParamSpec("P")
T = TypeVar("T")


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
    """ShardProxy of a shard in the same process, with a little delay on every call.

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

    async def call(
        self,
        method: Callable[Concatenate[QueueShard, P], Coroutine[Any, Any, T]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        async def work(shard: QueueShard) -> T:
            return await method(shard, *args, **kwargs)

        if method.__name__ == "save_partials":
            self.notes += len(cast(Sequence[ColumnCommit], args[0]))
        result = await self._retry(work)
        if method.__name__ == "commit_columns" and self._repeats():
            again = cast(list[str], await self._retry(work))
            # What was refused may be taken now: a shard that died has forgotten that a lease ended.
            commits, refused = cast(Sequence[ColumnCommit], args[0]), cast(list[str], result)
            taken = {commit.uid for commit in commits} - set(refused)
            assert taken <= set(again), "a commit was taken twice"
        return result

    async def _retry(self, work: Callable[[QueueShard], Coroutine[Any, Any, T]]) -> T:
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

    async def _one(self, work: Callable[[QueueShard], Coroutine[Any, Any, T]]) -> T:
        await asyncio.sleep(CALL_S)
        result = await work(self.shard)
        await asyncio.sleep(CALL_S)
        return result


def recover(stages: Mapping[str, StageSchema], log: MemoryLog) -> ShardState:
    """The groups as a log in memory has them."""
    book = ShardState(stages)
    book.should_keep_retired = True
    for record in log.records:
        book.apply_record(record, data=join_pieces(record.payload))
    book.should_keep_retired = False
    return book

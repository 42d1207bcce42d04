"""Shards in the same process that can be killed: only durable records survive."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from msgspec.structs import replace

from streamrl.buffer import QueueConfig, QueueShard, ShardCapacity, StageSchema
from streamrl.buffer.encoding import ColumnCommit, count_blob_bytes, join_pieces
from streamrl.buffer.group import ShardState
from streamrl.buffer.journal import JournalRecord, RecordLog

CALL_S = 0.001
RETRY_S = 0.2
P = ParamSpec("P")
T = TypeVar("T")


class MemoryLog(RecordLog):
    """Journal in memory: `records` are durable; pending records are lost in a crash."""

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
            batch, self._waiting = self._waiting, []
            await asyncio.sleep(self.write_s)
            # Copy the payload as of now: later changes of its buffer do not reach the disk.
            self.records += [
                replace(record, payload=join_pieces(record.payload)) for record in batch
            ]

    def append_nowait(self, records: Sequence[JournalRecord]) -> None:
        self._waiting += records

    def crash(self) -> "MemoryLog":
        """Return the log as its successor opens it: only with the durable records."""
        successor = MemoryLog(write_s=self.write_s)
        successor.records = self.records
        return successor


class LocalShard:
    """ShardProxy of a shard in the same process, with a short delay on every call.

    `kill` ends the shard and its calls in flight; `revive` restarts it as Ray does. Calls in flight
    are retried, as by RemoteShard. `repeats` decides whether a commit is sent twice; `loses`
    whether a call loses its connection: it continues in the shard while the caller retries it.
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
        self.num_saved_partials = 0
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
            self.num_saved_partials += len(cast(Sequence[ColumnCommit], args[0]))
        result = await self._retry(work)
        if method.__name__ == "commit_columns" and self._repeats():
            second_result = cast(list[str], await self._retry(work))
            # The shard may now accept refused commits: after a crash it may not know that a lease
            # ended.
            commits, refused = cast(Sequence[ColumnCommit], args[0]), cast(list[str], result)
            accepted = {commit.uid for commit in commits} - set(refused)
            assert accepted <= set(second_result), "a commit was accepted twice"
        return result

    async def _retry(self, work: Callable[[QueueShard], Coroutine[Any, Any, T]]) -> T:
        while True:
            await self._up.wait()
            deaths = self.deaths
            task = asyncio.ensure_future(self._run_call(work))
            self._running[task] = None
            task.add_done_callback(lambda done: self._running.pop(done, None))
            if self._loses():
                await asyncio.sleep(RETRY_S)
                continue
            try:
                return await asyncio.shield(task)
            except asyncio.CancelledError:
                # Cancelling the caller does not cancel its request in the shard.
                if self.deaths == deaths:
                    raise

    async def _run_call(self, work: Callable[[QueueShard], Coroutine[Any, Any, T]]) -> T:
        await asyncio.sleep(CALL_S)
        result = await work(self.shard)
        await asyncio.sleep(CALL_S)
        return result


def recover(stages: Mapping[str, StageSchema], log: MemoryLog) -> ShardState:
    """Recover the shard state from a log in memory."""
    state = ShardState(stages)
    for record in log.records:
        state.apply_record(record, data=join_pieces(record.payload))
    return state

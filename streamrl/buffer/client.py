"""The queue as a stage sees it: one object that routes to the shards."""

import asyncio
import zlib
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

from streamrl.buffer.shard import ShardStats
from streamrl.errors import StreamError
from streamrl.messages import Columns, Experience, Lease, Prompt

T = TypeVar("T")
ROOM_WAIT_S = 600.0
"""Longest an admitted prompt waits for room in its shard, s."""
REQUEST_WAIT_S = 20.0
"""How long a request for groups waits at a shard before it is made anew, s."""


class ShardFace(Protocol):
    """What the client calls on a shard, wherever it lives. Columns arrive resolved to arrays."""

    async def admit(self, entries: Sequence[tuple[Prompt, int]], *, wait_s: float) -> None: ...

    async def take(
        self, stage: str, *, max_groups: int, columns: Sequence[str], wait_s: float, holder: str
    ) -> list[Experience]: ...

    async def put(self, entries: Sequence[tuple[Lease, Columns]]) -> list[str]: ...

    async def fail(self, entries: Sequence[tuple[Lease, StreamError]]) -> None: ...

    async def read(self, uids: Sequence[str], columns: Sequence[str]) -> list[Columns]: ...

    async def settle(self, leases: Sequence[Lease]) -> None: ...

    async def end_step(self, leases: Sequence[Lease], version: int) -> ShardStats: ...

    async def whereabouts(self, uids: Sequence[str]) -> dict[str, str]: ...


class ExperienceQueue:
    """Sharded queue of experiences. A group lives in the shard its uid hashes to.

    A client belongs to one user, its leases' `holder`, on one event loop; any number of clients
    share the shards.
    """

    def __init__(self, shards: Sequence[ShardFace], holder: str) -> None:
        self.shards = shards
        self._holder = holder
        self._requests: dict[tuple[str, int], asyncio.Future[list[Experience]]] = {}
        self._pending: dict[str, deque[Experience]] = {}

    def shard_of(self, uid: str) -> int:
        """Index of the shard that owns `uid`; the same in every process."""
        return zlib.crc32(uid.encode()) % len(self.shards)

    async def admit(self, prompts: Sequence[Prompt], version: int) -> None:
        """Put prompts in, admitted at `version`. Blocks while a shard is full, up to a deadline."""
        parts = self._route([(prompt.uid, (prompt, version)) for prompt in prompts])
        await asyncio.gather(
            *(self.shards[i].admit(part, wait_s=ROOM_WAIT_S) for i, part in parts.items())
        )

    async def take(
        self, stage: str, *, max_groups: int, columns: Sequence[str], wait_s: float
    ) -> list[Experience]:
        """Lease groups that are ready for `stage`: at least one, or none after `wait_s`.

        They come with the named columns; the lease says until when the work may be committed. One
        request waits at each shard and outlives the call, so that nobody asks twice for the same;
        a stage may so hold a group per shard more than it asked for, kept here for its next call.
        """
        pending = self._pending.setdefault(stage, deque())
        if not pending:
            await self._await_any(stage, max_groups, columns, wait_s)
        return [pending.popleft() for _ in range(min(max_groups, len(pending)))]

    async def _await_any(
        self, stage: str, max_groups: int, columns: Sequence[str], wait_s: float
    ) -> None:
        """Wait until a shard has answered; put what came into the stage's pending groups."""
        share = -(-max_groups // len(self.shards))
        for i, shard in enumerate(self.shards):
            if (stage, i) not in self._requests:
                self._requests[stage, i] = asyncio.ensure_future(
                    shard.take(
                        stage,
                        max_groups=share,
                        columns=columns,
                        wait_s=REQUEST_WAIT_S,
                        holder=self._holder,
                    )
                )
        mine = {i: self._requests[stage, i] for i in range(len(self.shards))}
        done, _ = await asyncio.wait(
            mine.values(), timeout=wait_s, return_when=asyncio.FIRST_COMPLETED
        )
        # In the order of the shards, not of the set: what is taken follows from the schedule.
        for i, request in mine.items():
            if request in done:
                del self._requests[stage, i]
                self._pending[stage] += request.result()

    async def put(self, entries: Sequence[tuple[Lease, Columns]]) -> list[str]:
        """Commit finished work; returns uids refused because their lease had expired."""
        parts = self._route([(lease.uid, (lease, columns)) for lease, columns in entries])
        refused = await asyncio.gather(*(self.shards[i].put(p) for i, p in parts.items()))
        return [uid for part in refused for uid in part]

    async def fail(self, entries: Sequence[tuple[Lease, StreamError]]) -> None:
        """Give groups back that could not be worked on, each with the error."""
        parts = self._route([(lease.uid, (lease, error)) for lease, error in entries])
        await asyncio.gather(*(self.shards[i].fail(p) for i, p in parts.items()))

    async def read(self, uids: Iterable[str], columns: Sequence[str]) -> dict[str, Columns]:
        """Columns of groups by uid, without a lease: for the ranks that train a leased group."""
        parts = self._route([(uid, uid) for uid in uids])
        found = await asyncio.gather(*(self.shards[i].read(p, columns) for i, p in parts.items()))
        return {
            uid: group
            for part, groups in zip(parts.values(), found, strict=True)
            for uid, group in zip(part, groups, strict=True)
        }

    async def settle(self, leases: Sequence[Lease]) -> None:
        """Filtered or dropped: these groups leave the queue."""
        parts = self._route([(lease.uid, lease) for lease in leases])
        await asyncio.gather(*(self.shards[i].settle(p) for i, p in parts.items()))

    async def end_step(self, leases: Sequence[Lease], version: int) -> ShardStats:
        """Settle the groups of the step that made `version`; the shards' figures as one."""
        routed = self._route([(lease.uid, lease) for lease in leases])
        parts = await asyncio.gather(
            *(shard.end_step(routed.get(i, []), version) for i, shard in enumerate(self.shards))
        )
        return ShardStats(
            depth={s: sum(part.depth[s] for part in parts) for s in parts[0].depth},
            num_bytes=sum(part.num_bytes for part in parts),
            oldest_age_s=max(part.oldest_age_s for part in parts),
            uids=tuple(uid for part in parts for uid in part.uids),
        )

    async def whereabouts(self, uids: Sequence[str]) -> dict[str, str]:
        """Who holds these groups and for how long, for the message of a stall."""
        parts = await asyncio.gather(*(shard.whereabouts(uids) for shard in self.shards))
        return {uid: phrase for part in parts for uid, phrase in part.items()}

    def _route(self, entries: Sequence[tuple[str, T]]) -> Mapping[int, list[T]]:
        parts: dict[int, list[T]] = {}
        for uid, entry in entries:
            parts.setdefault(self.shard_of(uid), []).append(entry)
        return parts

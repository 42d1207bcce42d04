"""The queue as a stage sees it: one object that routes to the shards."""

import asyncio
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

from streamrl.buffer.shard import ShardStats
from streamrl.messages import Columns, Experience, Lease, Prompt

T = TypeVar("T")
ROOM_WAIT_S = 600.0


class ShardFace(Protocol):
    """What the client calls on a shard, wherever it lives. Columns arrive resolved to arrays."""

    async def admit(self, entries: Sequence[tuple[Prompt, int]], *, wait_s: float) -> None: ...

    async def ready(self, stage: str, *, wait_s: float) -> int: ...

    async def take(
        self, stage: str, *, max_groups: int, columns: Sequence[str]
    ) -> list[Experience]: ...

    async def put(self, entries: Sequence[tuple[Lease, Columns]]) -> list[str]: ...

    async def fail(self, entries: Sequence[tuple[Lease, str]]) -> None: ...

    async def read(self, uids: Sequence[str], columns: Sequence[str]) -> list[Columns]: ...

    async def settle(self, leases: Sequence[Lease]) -> None: ...

    async def stats(self) -> ShardStats: ...

    async def whereabouts(self, uids: Sequence[str]) -> dict[str, str]: ...


def share_out(total: int, counts: Mapping[int, int]) -> dict[int, int]:
    """Split `total` over the keys of `counts` as evenly as they have; leaves out the zeros."""
    shares = dict.fromkeys(counts, 0)
    left = min(total, sum(counts.values()))
    while left:
        unfilled = [key for key, count in counts.items() if shares[key] < count]
        for key in unfilled:
            grant = min(max(1, left // len(unfilled)), counts[key] - shares[key], left)
            shares[key] += grant
            left -= grant
    return {key: share for key, share in shares.items() if share}


class ExperienceQueue:
    """Sharded queue of experiences. A group lives in the shard its uid hashes to."""

    def __init__(self, shards: Sequence[ShardFace]) -> None:
        self._shards = shards
        self._polls: dict[tuple[str, int], asyncio.Task[int]] = {}

    def shard_of(self, uid: str) -> int:
        """Index of the shard that owns `uid`; the same in every process."""
        return zlib.crc32(uid.encode()) % len(self._shards)

    async def admit(self, prompts: Sequence[Prompt], version: int) -> None:
        """Put prompts in, admitted at `version`. Blocks while a shard is full, up to a deadline."""
        parts = self._route([(prompt.uid, (prompt, version)) for prompt in prompts])
        await asyncio.gather(
            *(self._shards[i].admit(part, wait_s=ROOM_WAIT_S) for i, part in parts.items())
        )

    async def take(
        self, stage: str, *, max_groups: int, columns: Sequence[str], wait_s: float
    ) -> list[Experience]:
        """Lease groups that are ready for `stage`: at least one, or none after `wait_s`.

        They come with the named columns; the lease says until when the work may be committed.
        """
        counts = await self._ready_counts(stage, wait_s)
        shares = share_out(max_groups, counts)
        parts = await asyncio.gather(
            *(
                self._shards[shard].take(stage, max_groups=share, columns=columns)
                for shard, share in shares.items()
            )
        )
        return [experience for part in parts for experience in part]

    async def _ready_counts(self, stage: str, wait_s: float) -> dict[int, int]:
        """Ready groups per shard, waiting for the first. Polls outlive a call: none is wasted."""
        for i, shard in enumerate(self._shards):
            poll = self._polls.get((stage, i))
            if poll is None or poll.done():
                self._polls[stage, i] = asyncio.ensure_future(shard.ready(stage, wait_s=wait_s))
        polls = [self._polls[stage, i] for i in range(len(self._shards))]
        waiting = set(polls)
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            # In the order of the shards, not of the set: what is taken follows from the schedule.
            counts = {i: p.result() for i, p in enumerate(polls) if p in done and p.result()}
            if counts:
                return counts
        return {}

    async def put(self, entries: Sequence[tuple[Lease, Columns]]) -> list[str]:
        """Commit finished work; returns uids refused because their lease had expired."""
        parts = self._route([(lease.uid, (lease, columns)) for lease, columns in entries])
        refused = await asyncio.gather(*(self._shards[i].put(p) for i, p in parts.items()))
        return [uid for part in refused for uid in part]

    async def fail(self, entries: Sequence[tuple[Lease, str]]) -> None:
        """Give groups back that could not be worked on, each with the cause."""
        parts = self._route([(lease.uid, (lease, cause)) for lease, cause in entries])
        await asyncio.gather(*(self._shards[i].fail(p) for i, p in parts.items()))

    async def read(self, uids: Iterable[str], columns: Sequence[str]) -> dict[str, Columns]:
        """Columns of groups by uid, without a lease: for the ranks that train a leased group."""
        parts = self._route([(uid, uid) for uid in uids])
        found = await asyncio.gather(*(self._shards[i].read(p, columns) for i, p in parts.items()))
        return {
            uid: group
            for part, groups in zip(parts.values(), found, strict=True)
            for uid, group in zip(part, groups, strict=True)
        }

    async def settle(self, leases: Sequence[Lease]) -> None:
        """Trained, filtered or dropped: these groups leave the queue."""
        parts = self._route([(lease.uid, lease) for lease in leases])
        await asyncio.gather(*(self._shards[i].settle(p) for i, p in parts.items()))

    async def stats(self) -> ShardStats:
        """The shards' figures as one: depths and bytes added, the oldest age."""
        parts = await asyncio.gather(*(shard.stats() for shard in self._shards))
        return ShardStats(
            depth={s: sum(part.depth[s] for part in parts) for s in parts[0].depth},
            num_bytes=sum(part.num_bytes for part in parts),
            oldest_age_s=max(part.oldest_age_s for part in parts),
            uids=tuple(uid for part in parts for uid in part.uids),
        )

    async def whereabouts(self, uids: Sequence[str]) -> dict[str, str]:
        """Who holds these groups and for how long, for the message of a stall."""
        parts = await asyncio.gather(*(shard.whereabouts(uids) for shard in self._shards))
        return {uid: phrase for part in parts for uid, phrase in part.items()}

    def _route(self, entries: Sequence[tuple[str, T]]) -> Mapping[int, list[T]]:
        parts: dict[int, list[T]] = {}
        for uid, entry in entries:
            parts.setdefault(self.shard_of(uid), []).append(entry)
        return parts

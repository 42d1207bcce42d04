"""A shard of the experience queue as an actor, and the face the queue's client calls."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray

from streamrl.actors.calls import CALL_TIMEOUT_S, call
from streamrl.buffer.shard import Ports, QueueConfig, Shard, ShardStats
from streamrl.errors import StreamError
from streamrl.messages import Columns, Experience, Lease, Prompt

INLINE_BYTES = 64 * 1024
"""Columns of a group up to this size travel inside messages; larger ones in the object store."""


@dataclass(frozen=True)
class Stored:
    """A column inside an object the shard owns; the object holds all columns of one commit."""

    name: str
    reference: ray.ObjectRef


def store_columns(columns: Columns) -> Mapping[str, Any]:
    """Small columns as they are; large ones as one object owned by the calling actor."""
    if sum(column.nbytes for column in columns.values()) <= INLINE_BYTES:
        return columns
    reference = ray.put(dict(columns))
    return {name: Stored(name, reference) for name in columns}


async def resolve_columns(values: Mapping[str, Any]) -> Columns:
    """Inverse of `store_columns`, on the reader's side; arrays are views of the object store."""
    references = {v.reference for v in values.values() if isinstance(v, Stored)}
    if not references:
        return values
    objects = {r: await call(r, "column of a group") for r in references}
    return {
        name: objects[value.reference][value.name] if isinstance(value, Stored) else value
        for name, value in values.items()
    }


@ray.remote(num_cpus=0)
class ShardActor:
    """Hosts one Shard on its event loop."""

    async def start(
        self, stages: Mapping[str, Ports], config: QueueConfig, capacity_groups: int
    ) -> None:
        """Build the empty shard."""
        self._shard = Shard(stages, config, capacity_groups=capacity_groups, store=store_columns)

    async def admit(self, entries: Sequence[tuple[Prompt, int]], wait_s: float) -> None:
        """See Shard.admit."""
        await self._shard.admit(entries, wait_s=wait_s)

    async def take(
        self, stage: str, max_groups: int, columns: Sequence[str], wait_s: float, holder: str
    ) -> list[Experience]:
        """See Shard.take."""
        return await self._shard.take(
            stage, max_groups=max_groups, columns=columns, wait_s=wait_s, holder=holder
        )

    async def put(self, entries: Sequence[tuple[Lease, Columns]]) -> list[str]:
        """See Shard.put."""
        return self._shard.put(entries)

    async def fail(self, entries: Sequence[tuple[Lease, StreamError]]) -> None:
        """See Shard.fail."""
        self._shard.fail(entries)

    async def read(self, uids: Sequence[str], columns: Sequence[str]) -> list[Mapping[str, Any]]:
        """See Shard.read."""
        return self._shard.read(uids, columns)

    async def settle(self, leases: Sequence[Lease]) -> None:
        """See Shard.settle."""
        self._shard.settle(leases)

    async def end_step(self, leases: Sequence[Lease], version: int) -> ShardStats:
        """See Shard.end_step."""
        return self._shard.end_step(leases, version)

    async def whereabouts(self, uids: Sequence[str]) -> dict[str, str]:
        """See Shard.whereabouts."""
        return self._shard.whereabouts(uids)


class RemoteShard:
    """ShardFace over an actor handle; picklable, so every actor gets its own."""

    def __init__(self, name: str, actor: Any) -> None:
        self._name = name
        self._actor = actor

    async def admit(self, entries: Sequence[tuple[Prompt, int]], *, wait_s: float) -> None:
        """Put prompts in."""
        reply = self._actor.admit.remote(entries, wait_s)
        await call(reply, f"{self._name}.admit", wait_s + CALL_TIMEOUT_S)

    async def take(
        self, stage: str, *, max_groups: int, columns: Sequence[str], wait_s: float, holder: str
    ) -> list[Experience]:
        """Lease groups, waiting for the first; their columns arrive as arrays."""
        reply = self._actor.take.remote(stage, max_groups, columns, wait_s, holder)
        taken = await call(reply, f"{self._name}.take({stage})", wait_s + CALL_TIMEOUT_S)
        return [replace(e, columns=await resolve_columns(e.columns)) for e in taken]

    async def put(self, entries: Sequence[tuple[Lease, Columns]]) -> list[str]:
        """Commit columns."""
        return list(await call(self._actor.put.remote(entries), f"{self._name}.put"))

    async def fail(self, entries: Sequence[tuple[Lease, StreamError]]) -> None:
        """Give groups back."""
        await call(self._actor.fail.remote(entries), f"{self._name}.fail")

    async def read(self, uids: Sequence[str], columns: Sequence[str]) -> list[Columns]:
        """Columns of groups, as arrays."""
        found = await call(self._actor.read.remote(uids, columns), f"{self._name}.read")
        return [await resolve_columns(values) for values in found]

    async def settle(self, leases: Sequence[Lease]) -> None:
        """Let groups leave."""
        await call(self._actor.settle.remote(leases), f"{self._name}.settle")

    async def end_step(self, leases: Sequence[Lease], version: int) -> ShardStats:
        """Let the groups of a step leave; the shard's figures."""
        stats = await call(self._actor.end_step.remote(leases, version), f"{self._name}.end_step")
        assert isinstance(stats, ShardStats)
        return stats

    async def whereabouts(self, uids: Sequence[str]) -> dict[str, str]:
        """Who holds which group."""
        return dict(await call(self._actor.whereabouts.remote(uids), f"{self._name}.whereabouts"))

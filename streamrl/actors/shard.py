"""A shard of the experience queue as an actor, and the face the queue's client calls."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import ray

from streamrl.actors.calls import CALL_TIMEOUT_S, call, fetch_objects
from streamrl.buffer import ShardKeeper, ShardPlan, ShardStats
from streamrl.buffer.blob import LARGE_BYTES, Blob, join, pieces_of, size_of
from streamrl.buffer.exchange import Commit, Grant
from streamrl.buffer.leases import Overdue, Request
from streamrl.errors import ActorLostError, StreamError
from streamrl.messages import Filtered, Lease

INLINE_BYTES = LARGE_BYTES
"""A blob up to this size lives with the shard and travels inside messages, a larger one in the
object store: the size up to which Ray itself does so. An object costs many copies of this size.
"""
BESIDE_BYTES = 4 * 1024
"""What is larger than this goes into a message without a copy before."""
RESTARTS = 10
"""Times Ray starts a shard anew that has a journal."""
RECONNECT_S = 60.0
"""Longest a caller waits for a shard that died to be back, s."""
RETRY_S = 0.2


@dataclass(frozen=True)
class Stored:
    """A blob in the object store: a list of its pieces, in an object the shard owns."""

    reference: ray.ObjectRef


def store_blob(blob: Blob) -> Any:
    """A small blob as it is; a large one as an object owned by the calling actor."""
    if size_of(blob) <= INLINE_BYTES:
        return to_message(join(blob))
    return Stored(ray.put(to_message(pieces_of(blob))))


def to_message(blob: Blob) -> Any:
    """A blob as messages take it along: Ray moves arrays without a copy, and bytes with one."""
    if isinstance(blob, tuple):
        return [to_message(piece) for piece in blob]
    return np.frombuffer(blob, np.uint8) if len(blob) > BESIDE_BYTES else bytes(blob)


def from_message(blob: Any) -> Blob:
    """Inverse of `to_message`, at the other end."""
    return tuple(map(memoryview, blob)) if isinstance(blob, list) else memoryview(blob)


async def resolve_blobs(groups: Sequence[Sequence[Any]]) -> list[tuple[Blob, ...]]:
    """Inverse of `store_blob`, on the reader's side: views of the object store, for each group."""
    stored = [blob.reference for blobs in groups for blob in blobs if isinstance(blob, Stored)]
    objects = iter(await fetch_objects(stored, "columns of groups") if stored else [])
    return [
        tuple([from_message(next(objects) if isinstance(b, Stored) else b) for b in blobs])
        for blobs in groups
    ]


async def _fetch(grants: Sequence[Grant]) -> list[Grant]:
    found = await resolve_blobs([grant.blobs for grant in grants])
    return [replace(grant, blobs=blobs) for grant, blobs in zip(grants, found, strict=True)]


@ray.remote(num_cpus=0)
class ShardActor:
    """Hosts one shard on its event loop, from the first call after each start of the process."""

    def __init__(self, plan: ShardPlan) -> None:
        self._plan = plan
        self._opened: ShardKeeper | None = None

    @property
    def _keeper(self) -> ShardKeeper:
        if self._opened is None:
            self._opened = ShardKeeper(self._plan, store_blob)
        return self._opened

    async def ready(self) -> list[str]:
        """What could not be read of what a predecessor left, a line each."""
        return [
            f"{bad.file}, byte {bad.position.offset}: {bad.reason}" for bad in self._keeper.corrupt
        ]

    async def admit(self, entries: Sequence[tuple[str, bytes, int]], wait_s: float) -> list[str]:
        """See Shard.admit."""
        return await self._keeper.shard.admit(entries, wait_s=wait_s)

    async def add(
        self, entries: Sequence[tuple[str, bytes, int]], commits: Sequence[Commit], wait_s: float
    ) -> list[str]:
        """See Shard.add."""
        return await self._keeper.shard.add(entries, _received(commits), wait_s=wait_s)

    async def take(self, request: Request, wait_s: float) -> list[Grant]:
        """See Shard.take."""
        return await self._keeper.shard.take(request, wait_s=wait_s)

    async def put(self, commits: Sequence[Commit]) -> list[str]:
        """See Shard.put."""
        return await self._keeper.shard.put(_received(commits))

    async def fail(self, entries: Sequence[tuple[Lease, StreamError]]) -> None:
        """See Shard.fail."""
        self._keeper.shard.fail(entries)

    async def filter(self, entries: Sequence[tuple[Lease, Filtered]]) -> None:
        """See Shard.filter."""
        self._keeper.shard.filter(entries)

    async def renew(self, leases: Sequence[Lease]) -> list[Lease]:
        """See Shard.renew."""
        return self._keeper.shard.renew(leases)

    async def read(self, uids: Sequence[str], columns: Sequence[str]) -> list[Sequence[Any]]:
        """See Shard.read."""
        return self._keeper.shard.read(uids, columns)

    async def leave(self, uids: Sequence[str], version: int) -> None:
        """See Shard.leave."""
        await self._keeper.shard.leave(uids, version)

    async def end_step(self, uids: Sequence[str], version: int) -> ShardStats:
        """See Shard.end_step."""
        return await self._keeper.shard.end_step(uids, version)

    async def stats(self) -> ShardStats:
        """See Shard.stats."""
        return self._keeper.shard.stats()

    async def release(self, holder: str) -> int:
        """See Shard.release."""
        return self._keeper.shard.release(holder)

    async def overdue(self, age_s: float, take_back: bool) -> list[Overdue]:
        """See Shard.overdue."""
        return self._keeper.shard.overdue(age_s, take_back=take_back)

    async def whereabouts(self, uids: Sequence[str]) -> dict[str, str]:
        """See Shard.whereabouts."""
        return self._keeper.shard.whereabouts(uids)

    async def cut(self) -> int:
        """See ShardKeeper.cut."""
        return await self._keeper.cut()

    async def snapshot(self, cut: int, out: Path) -> None:
        """See ShardKeeper.snapshot."""
        await self._keeper.snapshot(cut, out)

    async def discard_before(self, cut: int) -> None:
        """See ShardKeeper.discard_before."""
        self._keeper.discard_before(cut)

    async def close(self) -> None:
        """See ShardKeeper.close."""
        await self._keeper.close()


class RemoteShard:
    """ShardFace over an actor handle; picklable, so every actor gets its own.

    A shard that has died is called again until it is back: what it is told twice it does once.
    """

    def __init__(self, name: str, actor: Any, *, returns: bool) -> None:
        self.name = name
        self.actor = actor
        self._reconnect_s = RECONNECT_S if returns else 0.0

    async def admit(self, entries: Sequence[tuple[str, bytes, int]], *, wait_s: float) -> list[str]:
        """Put prompts in, as many as there is room for."""
        timeout_s = wait_s + CALL_TIMEOUT_S
        return list(await self._call("admit", entries, wait_s, timeout_s=timeout_s))

    async def add(
        self, entries: Sequence[tuple[str, bytes, int]], commits: Sequence[Commit], *, wait_s: float
    ) -> list[str]:
        """Put prompts in with columns; large ones travel beside the message."""
        timeout_s = wait_s + CALL_TIMEOUT_S
        entered = self._call("add", entries, _to_send(commits), wait_s, timeout_s=timeout_s)
        return list(await entered)

    async def take(self, request: Request, *, wait_s: float) -> list[Grant]:
        """Lease groups, waiting for the first; their blobs arrive as bytes."""
        timeout_s = wait_s + CALL_TIMEOUT_S
        return list(await self._call("take", request, wait_s, timeout_s=timeout_s, then=_fetch))

    async def put(self, commits: Sequence[Commit]) -> list[str]:
        """Commit columns; large ones travel beside the message."""
        return list(await self._call("put", _to_send(commits)))

    async def fail(self, entries: Sequence[tuple[Lease, StreamError]]) -> None:
        """Give groups back."""
        await self._call("fail", entries)

    async def filter(self, entries: Sequence[tuple[Lease, Filtered]]) -> None:
        """Take groups out."""
        await self._call("filter", entries)

    async def renew(self, leases: Sequence[Lease]) -> list[Lease]:
        """Keep leases; those that are lost."""
        return list(await self._call("renew", leases))

    async def read(self, uids: Sequence[str], columns: Sequence[str]) -> list[Sequence[Blob]]:
        """Blobs of groups."""
        return list(await self._call("read", uids, columns, then=resolve_blobs))

    async def leave(self, uids: Sequence[str], version: int) -> None:
        """Let groups leave."""
        await self._call("leave", uids, version)

    async def end_step(self, uids: Sequence[str], version: int) -> ShardStats:
        """Let groups leave; the shard's figures of the step."""
        return cast(ShardStats, await self._call("end_step", uids, version))

    async def stats(self) -> ShardStats:
        """The shard's figures."""
        return cast(ShardStats, await self._call("stats"))

    async def release(self, holder: str) -> int:
        """Take back what a dead holder had."""
        return int(await self._call("release", holder))

    async def overdue(self, age_s: float, *, take_back: bool) -> list[Overdue]:
        """Work that takes long."""
        return list(await self._call("overdue", age_s, take_back))

    async def whereabouts(self, uids: Sequence[str]) -> dict[str, str]:
        """Who holds which group."""
        return dict(await self._call("whereabouts", uids))

    async def cut(self) -> int:
        """Mark a moment in the journal."""
        return int(await self._call("cut"))

    async def snapshot(self, cut: int, out: Path, *, timeout_s: float) -> None:
        """Write the groups as they were at a cut."""
        await self._call("snapshot", cut, out, timeout_s=timeout_s)

    async def discard_before(self, cut: int) -> None:
        """Free the journal up to a cut."""
        await self._call("discard_before", cut)

    async def close(self) -> None:
        """Write what is left."""
        await self._call("close")

    async def _call(
        self,
        method: str,
        *arguments: Any,
        timeout_s: float = CALL_TIMEOUT_S,
        then: Callable[[Any], Awaitable[Any]] | None = None,
    ) -> Any:
        """What the shard answers; `then` fetches what the answer only names, which dies with it."""
        what = f"{self.name}.{method}"
        lost_at = math.inf
        while True:
            reply = getattr(self.actor, method).remote(*arguments)
            try:
                answer = await call(reply, what, timeout_s)
                return answer if then is None else await then(answer)
            except ActorLostError:
                lost_at = min(lost_at, time.monotonic())
                if time.monotonic() >= lost_at + self._reconnect_s:
                    raise
                await asyncio.sleep(RETRY_S)


def _to_send(commits: Sequence[Commit]) -> list[Commit]:
    return [replace(commit, blob=to_message(commit.blob)) for commit in commits]


def _received(commits: Sequence[Commit]) -> list[Commit]:
    """Inverse of `_to_send`, in the shard."""
    return [replace(commit, blob=from_message(commit.blob)) for commit in commits]


def create_shards(
    plans: Mapping[str, ShardPlan], create: Callable[..., Any] | None = None
) -> list[RemoteShard]:
    """A shard actor per name and plan, spread over the nodes, in the order of the names given.

    One with a journal is started again by Ray when it dies; one without takes its groups along.
    `create(name, actor class, arguments, options=...)` makes an actor, by default as Ray does.
    """
    shards = []
    for name, plan in plans.items():
        returns = plan.files is not None
        options = {"max_restarts": RESTARTS if returns else 0, "scheduling_strategy": "SPREAD"}
        # Ray spreads only what asks for something, were it a byte; the rest lands anywhere.
        options["memory"] = 1
        actor = (create or _create)(name, ShardActor, (plan,), options=options)
        shards.append(RemoteShard(name, actor, returns=returns))
    return shards


def _create(name: str, actor_class: Any, arguments: Sequence[Any], *, options: Any) -> Any:
    return actor_class.options(**options).remote(*arguments)

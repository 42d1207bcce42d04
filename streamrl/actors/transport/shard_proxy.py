"""The face of a shard that the queue's client calls, from any process."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from streamrl.actors.transport.object_store import (
    is_large,
    pack_commits,
    resolve_blobs,
    resolve_grants,
)
from streamrl.actors.transport.ray_calls import CALL_TIMEOUT_S, await_reply
from streamrl.actors.transport.rpc import RpcConnection, RpcEndpoint
from streamrl.buffer import ShardStats
from streamrl.buffer.codec import Blob
from streamrl.buffer.leases import LeaseRequest, OverdueLease
from streamrl.buffer.wire_types import ColumnCommit, FinishedGroup, LeaseGrant
from streamrl.errors import ActorLostError, StreamError
from streamrl.messages import FilteredGroup, GroupLease

RECONNECT_S = 60.0
"""Longest a caller waits for a shard that died, or cannot be reached, to be back, s."""
RETRY_INTERVAL_S = 0.2


@dataclass(frozen=True)
class RpcRequest:
    """A call of a method of Shard."""

    method: str
    arguments: tuple[Any, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class UseObjectStore:
    """The answer names objects of the store: ask again by a call of the actor."""


class RemoteShard:
    """ShardFace over an actor handle; picklable, so every actor gets its own.

    It asks over a connection of its own, by actor call where objects of the store are handed over.
    A shard that has died is asked again until it is back: what it is told twice it does once.
    """

    def __init__(self, name: str, actor: Any, *, returns: bool) -> None:
        self.name = name
        self.actor = actor
        self.is_restartable = returns
        self._reconnect_s = RECONNECT_S if returns else 0.0
        self._connection_tasks: dict[asyncio.AbstractEventLoop, asyncio.Task[RpcConnection]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_connection_tasks": {}}

    async def admit_prompts(
        self, entries: Sequence[tuple[str, bytes, int]], *, wait_s: float
    ) -> list[str]:
        """Put prompts in, as many as there is room for."""
        ask = RpcRequest("admit_prompts", (entries,), {"wait_s": wait_s})
        return list(await self._send_request(ask, timeout_s=wait_s + CALL_TIMEOUT_S))

    async def add_groups(
        self,
        entries: Sequence[tuple[str, bytes, int]],
        commits: Sequence[ColumnCommit],
        *,
        wait_s: float,
    ) -> list[str]:
        """Put prompts in with columns."""
        ask = RpcRequest("add_groups", (entries, pack_commits(commits)), {"wait_s": wait_s})
        timeout_s = wait_s + CALL_TIMEOUT_S
        return list(
            await self._send_request(ask, timeout_s=timeout_s, by_actor=_has_large_blob(commits))
        )

    async def lease_groups(self, request: LeaseRequest, *, wait_s: float) -> list[LeaseGrant]:
        """Lease groups, waiting for the first; their blobs arrive as bytes."""
        ask = RpcRequest("lease_groups", (request,), {"wait_s": wait_s})
        timeout_s = wait_s + CALL_TIMEOUT_S
        return list(await self._send_request(ask, timeout_s=timeout_s, then=resolve_grants))

    async def commit_columns(self, commits: Sequence[ColumnCommit]) -> list[str]:
        """Commit columns."""
        ask = RpcRequest("commit_columns", (pack_commits(commits),))
        return list(await self._send_request(ask, by_actor=_has_large_blob(commits)))

    async def save_partials(self, commits: Sequence[ColumnCommit]) -> None:
        """Leave what was begun."""
        await self._send_request(
            RpcRequest("save_partials", (pack_commits(commits),)), by_actor=_has_large_blob(commits)
        )

    async def fail_groups(self, entries: Sequence[tuple[GroupLease, StreamError]]) -> None:
        """Give groups back."""
        await self._send_request(RpcRequest("fail_groups", (entries,)))

    async def filter_groups(self, entries: Sequence[tuple[GroupLease, FilteredGroup]]) -> None:
        """Take groups out."""
        await self._send_request(RpcRequest("filter_groups", (entries,)))

    async def renew_leases(self, leases: Sequence[GroupLease]) -> list[GroupLease]:
        """Keep leases; those that are lost."""
        return list(await self._send_request(RpcRequest("renew_leases", (leases,))))

    async def read_columns(
        self, uids: Sequence[str], columns: Sequence[str]
    ) -> list[Sequence[Blob]]:
        """Blobs of groups."""
        return list(
            await self._send_request(
                RpcRequest("read_columns", (uids, columns)), then=resolve_blobs
            )
        )

    async def find_uids_with(self, column: str) -> list[str]:
        """Groups that have a column."""
        return list(await self._send_request(RpcRequest("find_uids_with", (column,))))

    async def wait_for_finished(self, *, wait_s: float) -> list[FinishedGroup]:
        """Groups that have ended, waiting for the first."""
        ask = RpcRequest("wait_for_finished", (), {"wait_s": wait_s})
        return list(await self._send_request(ask, timeout_s=wait_s + CALL_TIMEOUT_S))

    async def remove_groups(self, uids: Sequence[str], version: int) -> None:
        """Let groups leave."""
        await self._send_request(RpcRequest("remove_groups", (uids, version)))

    async def end_step(self, uids: Sequence[str], version: int) -> ShardStats:
        """Let groups leave; the shard's figures of the step."""
        return cast(ShardStats, await self._send_request(RpcRequest("end_step", (uids, version))))

    async def get_stats(self) -> ShardStats:
        """The shard's figures."""
        return cast(ShardStats, await self._send_request(RpcRequest("get_stats")))

    async def release_holder(self, holder: str, *, died: bool = True) -> int:
        """Take back what a holder had that is gone."""
        return int(
            await self._send_request(RpcRequest("release_holder", (holder,), {"died": died}))
        )

    async def find_overdue(self, age_s: float) -> list[OverdueLease]:
        """Work that takes long."""
        return list(await self._send_request(RpcRequest("find_overdue", (age_s,))))

    async def requeue_overdue(self, found: Sequence[OverdueLease]) -> None:
        """Hand it out anew."""
        await self._send_request(RpcRequest("requeue_overdue", (found,)))

    async def locate_groups(self, uids: Sequence[str]) -> dict[str, str]:
        """Who holds which group."""
        return dict(await self._send_request(RpcRequest("locate_groups", (uids,))))

    async def rotate_journal(self) -> int:
        """Mark a moment in the journal."""
        return int(await self._call_actor("rotate_journal"))

    async def write_snapshot(self, cut: int, out: Path, *, timeout_s: float) -> None:
        """Write the groups as they were at a cut."""
        await self._call_actor("write_snapshot", cut, out, timeout_s=timeout_s)

    async def discard_before(self, cut: int) -> None:
        """Free the journal up to a cut."""
        await self._call_actor("discard_before", cut)

    async def close(self) -> None:
        """Write what is left."""
        await self._call_actor("close")

    async def _send_request(
        self,
        ask: RpcRequest,
        *,
        timeout_s: float = CALL_TIMEOUT_S,
        by_actor: bool = False,
        then: Callable[[Any], Awaitable[Any]] | None = None,
    ) -> Any:
        """What the shard answers; `then` fetches what the answer only names, which dies with it."""
        what = f"{self.name}.{ask.method}"

        async def once() -> Any:
            answer: Any = UseObjectStore()
            if not by_actor:
                connection = await self._get_connection()
                answer = await connection.call(ask, what, timeout_s)
            if isinstance(answer, UseObjectStore):
                answer = await await_reply(self.actor.handle_request.remote(ask), what, timeout_s)
            return answer if then is None else await then(answer)

        return await self._retry_until_back(once, what, timeout_s)

    async def _call_actor(
        self, method: str, *arguments: Any, timeout_s: float = CALL_TIMEOUT_S
    ) -> Any:
        """What the actor of the shard answers."""
        what, command = f"{self.name}.{method}", getattr(self.actor, method)

        async def once() -> Any:
            return await await_reply(command.remote(*arguments), what, timeout_s)

        return await self._retry_until_back(once, what, timeout_s)

    async def _retry_until_back(
        self, once: Callable[[], Awaitable[Any]], what: str, timeout_s: float
    ) -> Any:
        """Ask until there is an answer, while the shard is away for no longer than it may be.

        Where connections are lost again and again it is asked for `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        lost_at = math.inf
        while True:
            try:
                return await once()
            except ActorLostError as error:
                loss, patience_s = error, self._reconnect_s
            except ConnectionError as error:
                # Whether it died, Ray will say when it is asked for the endpoint.
                loss, patience_s = ActorLostError(f"{what}: {error}"), RECONNECT_S
                if isinstance(error, ConnectionResetError) and time.monotonic() < deadline:
                    lost_at = math.inf  # until now it was there
            now = time.monotonic()
            lost_at = min(lost_at, now)
            if now >= lost_at + patience_s:
                raise loss
            await asyncio.sleep(RETRY_INTERVAL_S)

    async def _get_connection(self) -> RpcConnection:
        """The one connection of all that ask from this event loop; a new one if it is lost."""
        loop = asyncio.get_running_loop()
        opening = self._connection_tasks.get(loop)
        if opening is None or _is_disconnected(opening):
            others = {one: o for one, o in self._connection_tasks.items() if not one.is_closed()}
            opening = asyncio.create_task(self._open_connection())
            self._connection_tasks = {**others, loop: opening}
        return await asyncio.shield(opening)

    async def _open_connection(self) -> RpcConnection:
        endpoint = await await_reply(self.actor.get_endpoint.remote(), f"{self.name}.endpoint")
        assert isinstance(endpoint, RpcEndpoint)
        return await RpcConnection.open(endpoint)


def _is_disconnected(opening: "asyncio.Task[RpcConnection]") -> bool:
    if not opening.done():
        return False
    return bool(opening.cancelled() or opening.exception() or not opening.result().is_open)


def _has_large_blob(commits: Sequence[ColumnCommit]) -> bool:
    return any(is_large(commit.blob) for commit in commits)

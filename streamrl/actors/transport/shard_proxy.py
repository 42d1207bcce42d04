"""Shard proxy: calls a shard of the experience queue from any process."""

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
"""Longest wait for a dead or unreachable shard to come back."""
RETRY_INTERVAL_S = 0.2


@dataclass(frozen=True)
class RpcRequest:
    """Request to call a method of a shard, by name."""

    method: str
    arguments: tuple[Any, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class UseObjectStore:
    """Reply of a shard that cannot go over an RPC connection: it holds object references.

    The client then repeats the request as an actor call.
    """


class RemoteShard:
    """Proxy of a shard actor, with the methods of ShardProtocol. Picklable.

    Requests travel over an RPC connection of the process, or as an actor call if they carry large
    blobs. A request to a dead shard is repeated until the shard is back; a shard applies a repeated
    request only once.
    """

    def __init__(self, name: str, actor: Any, *, is_restartable: bool) -> None:
        self.name = name
        self.actor = actor
        self.is_restartable = is_restartable
        self._reconnect_s = RECONNECT_S if is_restartable else 0.0
        self._connection_tasks: dict[asyncio.AbstractEventLoop, asyncio.Task[RpcConnection]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_connection_tasks": {}}

    async def admit_prompts(
        self, entries: Sequence[tuple[str, bytes, int]], *, wait_s: float
    ) -> list[str]:
        rpc = RpcRequest("admit_prompts", (entries,), {"wait_s": wait_s})
        return list(await self._send_request(rpc, timeout_s=wait_s + CALL_TIMEOUT_S))

    async def add_groups(
        self,
        entries: Sequence[tuple[str, bytes, int]],
        commits: Sequence[ColumnCommit],
        *,
        wait_s: float,
    ) -> list[str]:
        rpc = RpcRequest("add_groups", (entries, pack_commits(commits)), {"wait_s": wait_s})
        timeout_s = wait_s + CALL_TIMEOUT_S
        return list(
            await self._send_request(rpc, timeout_s=timeout_s, by_actor=_has_large_blob(commits))
        )

    async def lease_groups(self, request: LeaseRequest, *, wait_s: float) -> list[LeaseGrant]:
        rpc = RpcRequest("lease_groups", (request,), {"wait_s": wait_s})
        timeout_s = wait_s + CALL_TIMEOUT_S
        return list(await self._send_request(rpc, timeout_s=timeout_s, then=resolve_grants))

    async def commit_columns(self, commits: Sequence[ColumnCommit]) -> list[str]:
        rpc = RpcRequest("commit_columns", (pack_commits(commits),))
        return list(await self._send_request(rpc, by_actor=_has_large_blob(commits)))

    async def save_partials(self, commits: Sequence[ColumnCommit]) -> None:
        await self._send_request(
            RpcRequest("save_partials", (pack_commits(commits),)), by_actor=_has_large_blob(commits)
        )

    async def fail_groups(self, entries: Sequence[tuple[GroupLease, StreamError]]) -> None:
        await self._send_request(RpcRequest("fail_groups", (entries,)))

    async def filter_groups(self, entries: Sequence[tuple[GroupLease, FilteredGroup]]) -> None:
        await self._send_request(RpcRequest("filter_groups", (entries,)))

    async def renew_leases(self, leases: Sequence[GroupLease]) -> list[GroupLease]:
        return list(await self._send_request(RpcRequest("renew_leases", (leases,))))

    async def read_columns(
        self, uids: Sequence[str], columns: Sequence[str]
    ) -> list[Sequence[Blob]]:
        return list(
            await self._send_request(
                RpcRequest("read_columns", (uids, columns)), then=resolve_blobs
            )
        )

    async def find_uids_with(self, column: str) -> list[str]:
        return list(await self._send_request(RpcRequest("find_uids_with", (column,))))

    async def wait_for_finished(self, *, wait_s: float) -> list[FinishedGroup]:
        rpc = RpcRequest("wait_for_finished", (), {"wait_s": wait_s})
        return list(await self._send_request(rpc, timeout_s=wait_s + CALL_TIMEOUT_S))

    async def remove_groups(self, uids: Sequence[str], version: int) -> None:
        await self._send_request(RpcRequest("remove_groups", (uids, version)))

    async def end_step(self, uids: Sequence[str], version: int) -> ShardStats:
        return cast(ShardStats, await self._send_request(RpcRequest("end_step", (uids, version))))

    async def get_stats(self) -> ShardStats:
        return cast(ShardStats, await self._send_request(RpcRequest("get_stats")))

    async def release_holder(self, holder: str, *, died: bool = True) -> int:
        return int(
            await self._send_request(RpcRequest("release_holder", (holder,), {"died": died}))
        )

    async def find_overdue(self, age_s: float) -> list[OverdueLease]:
        return list(await self._send_request(RpcRequest("find_overdue", (age_s,))))

    async def requeue_overdue(self, overdue: Sequence[OverdueLease]) -> None:
        await self._send_request(RpcRequest("requeue_overdue", (overdue,)))

    async def locate_groups(self, uids: Sequence[str]) -> dict[str, str]:
        return dict(await self._send_request(RpcRequest("locate_groups", (uids,))))

    async def rotate_journal(self) -> int:
        return int(await self._call_actor("rotate_journal"))

    async def write_snapshot(self, cut: int, out: Path, *, timeout_s: float) -> None:
        await self._call_actor("write_snapshot", cut, out, timeout_s=timeout_s)

    async def discard_before(self, cut: int) -> None:
        await self._call_actor("discard_before", cut)

    async def close(self) -> None:
        await self._call_actor("close")

    async def _send_request(
        self,
        request: RpcRequest,
        *,
        timeout_s: float = CALL_TIMEOUT_S,
        by_actor: bool = False,
        then: Callable[[Any], Awaitable[Any]] | None = None,
    ) -> Any:
        """Send a request to the shard and return the reply.

        by_actor: use an actor call, for a request with large blobs.
        then: function that fetches the stored objects of the reply. A retry repeats it too.
        """
        call_name = f"{self.name}.{request.method}"

        async def attempt() -> Any:
            result: Any = UseObjectStore()
            if not by_actor:
                connection = await self._get_connection()
                result = await connection.call(request, call_name, timeout_s)
            if isinstance(result, UseObjectStore):
                result = await await_reply(
                    self.actor.handle_request.remote(request), call_name, timeout_s
                )
            return result if then is None else await then(result)

        return await self._retry_until_back(attempt, call_name, timeout_s)

    async def _call_actor(
        self, method: str, *arguments: Any, timeout_s: float = CALL_TIMEOUT_S
    ) -> Any:
        """Call a method of the shard's actor that is not part of the RPC interface."""
        call_name, method_of_actor = f"{self.name}.{method}", getattr(self.actor, method)

        async def attempt() -> Any:
            return await await_reply(method_of_actor.remote(*arguments), call_name, timeout_s)

        return await self._retry_until_back(attempt, call_name, timeout_s)

    async def _retry_until_back(
        self, attempt: Callable[[], Awaitable[Any]], call_name: str, timeout_s: float
    ) -> Any:
        """Repeat a call until it succeeds or the shard has been down for its reconnect time.

        attempt: makes the call once. While connections open but keep breaking, retries for
        `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        lost_at = math.inf
        while True:
            try:
                return await attempt()
            except ActorLostError as error:
                actor_lost, wait_s = error, self._reconnect_s
            except ConnectionError as error:
                # The next attempt asks the actor for its endpoint, and Ray then reports a death.
                actor_lost, wait_s = ActorLostError(f"{call_name}: {error}"), RECONNECT_S
                if isinstance(error, ConnectionResetError) and time.monotonic() < deadline:
                    lost_at = math.inf  # the shard was reachable until this reset
            now = time.monotonic()
            lost_at = min(lost_at, now)
            if now >= lost_at + wait_s:
                raise actor_lost
            await asyncio.sleep(RETRY_INTERVAL_S)

    async def _get_connection(self) -> RpcConnection:
        """Return the RPC connection that all requests of this event loop share.

        Opens a new connection at the first call, and after the last one was lost.
        """
        loop = asyncio.get_running_loop()
        opening = self._connection_tasks.get(loop)
        if opening is None or _is_disconnected(opening):
            connection_tasks = {
                open_loop: task
                for open_loop, task in self._connection_tasks.items()
                if not open_loop.is_closed()
            }
            opening = asyncio.create_task(self._open_connection())
            self._connection_tasks = {**connection_tasks, loop: opening}
        return await asyncio.shield(opening)

    async def _open_connection(self) -> RpcConnection:
        endpoint = await await_reply(self.actor.get_endpoint.remote(), f"{self.name}.get_endpoint")
        assert isinstance(endpoint, RpcEndpoint)
        return await RpcConnection.open(endpoint)


def _is_disconnected(opening: "asyncio.Task[RpcConnection]") -> bool:
    if not opening.done():
        return False
    return bool(opening.cancelled() or opening.exception() or not opening.result().is_open)


def _has_large_blob(commits: Sequence[ColumnCommit]) -> bool:
    return any(is_large(commit.blob) for commit in commits)

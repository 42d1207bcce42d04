"""The face of a shard that the queue's client calls, from any process."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from streamrl.actors.transport.object_store import is_large, resolve_blobs, resolve_grants, to_send
from streamrl.actors.transport.ray_calls import CALL_TIMEOUT_S, call
from streamrl.actors.transport.rpc import Connection, Endpoint
from streamrl.buffer import ShardStats
from streamrl.buffer.codec import Blob
from streamrl.buffer.leases import Overdue, Request
from streamrl.buffer.wire_types import Commit, Farewell, Grant
from streamrl.errors import ActorLostError, StreamError
from streamrl.messages import Filtered, Lease

RECONNECT_S = 60.0
"""Longest a caller waits for a shard that died, or cannot be reached, to be back, s."""
RETRY_S = 0.2


@dataclass(frozen=True)
class Ask:
    """A call of a method of Shard."""

    method: str
    arguments: tuple[Any, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Elsewhere:
    """The answer names objects of the store: ask again by a call of the actor."""


class RemoteShard:
    """ShardFace over an actor handle; picklable, so every actor gets its own.

    It asks over a connection of its own, by actor call where objects of the store are handed over.
    A shard that has died is asked again until it is back: what it is told twice it does once.
    """

    def __init__(self, name: str, actor: Any, *, returns: bool) -> None:
        self.name = name
        self.actor = actor
        self.returns = returns
        self._reconnect_s = RECONNECT_S if returns else 0.0
        self._opening: dict[asyncio.AbstractEventLoop, asyncio.Task[Connection]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_opening": {}}

    async def admit(self, entries: Sequence[tuple[str, bytes, int]], *, wait_s: float) -> list[str]:
        """Put prompts in, as many as there is room for."""
        ask = Ask("admit", (entries,), {"wait_s": wait_s})
        return list(await self._ask(ask, timeout_s=wait_s + CALL_TIMEOUT_S))

    async def add(
        self, entries: Sequence[tuple[str, bytes, int]], commits: Sequence[Commit], *, wait_s: float
    ) -> list[str]:
        """Put prompts in with columns."""
        ask = Ask("add", (entries, to_send(commits)), {"wait_s": wait_s})
        timeout_s = wait_s + CALL_TIMEOUT_S
        return list(await self._ask(ask, timeout_s=timeout_s, by_actor=_any_large(commits)))

    async def take(self, request: Request, *, wait_s: float) -> list[Grant]:
        """Lease groups, waiting for the first; their blobs arrive as bytes."""
        ask = Ask("take", (request,), {"wait_s": wait_s})
        timeout_s = wait_s + CALL_TIMEOUT_S
        return list(await self._ask(ask, timeout_s=timeout_s, then=resolve_grants))

    async def put(self, commits: Sequence[Commit]) -> list[str]:
        """Commit columns."""
        ask = Ask("put", (to_send(commits),))
        return list(await self._ask(ask, by_actor=_any_large(commits)))

    async def note(self, commits: Sequence[Commit]) -> None:
        """Leave what was begun."""
        await self._ask(Ask("note", (to_send(commits),)), by_actor=_any_large(commits))

    async def fail(self, entries: Sequence[tuple[Lease, StreamError]]) -> None:
        """Give groups back."""
        await self._ask(Ask("fail", (entries,)))

    async def filter(self, entries: Sequence[tuple[Lease, Filtered]]) -> None:
        """Take groups out."""
        await self._ask(Ask("filter", (entries,)))

    async def renew(self, leases: Sequence[Lease]) -> list[Lease]:
        """Keep leases; those that are lost."""
        return list(await self._ask(Ask("renew", (leases,))))

    async def read(self, uids: Sequence[str], columns: Sequence[str]) -> list[Sequence[Blob]]:
        """Blobs of groups."""
        return list(await self._ask(Ask("read", (uids, columns)), then=resolve_blobs))

    async def uids_with(self, column: str) -> list[str]:
        """Groups that have a column."""
        return list(await self._ask(Ask("uids_with", (column,))))

    async def ended(self, *, wait_s: float) -> list[Farewell]:
        """Groups that have ended, waiting for the first."""
        ask = Ask("ended", (), {"wait_s": wait_s})
        return list(await self._ask(ask, timeout_s=wait_s + CALL_TIMEOUT_S))

    async def leave(self, uids: Sequence[str], version: int) -> None:
        """Let groups leave."""
        await self._ask(Ask("leave", (uids, version)))

    async def end_step(self, uids: Sequence[str], version: int) -> ShardStats:
        """Let groups leave; the shard's figures of the step."""
        return cast(ShardStats, await self._ask(Ask("end_step", (uids, version))))

    async def stats(self) -> ShardStats:
        """The shard's figures."""
        return cast(ShardStats, await self._ask(Ask("stats")))

    async def release(self, holder: str, *, died: bool = True) -> int:
        """Take back what a holder had that is gone."""
        return int(await self._ask(Ask("release", (holder,), {"died": died})))

    async def overdue(self, age_s: float) -> list[Overdue]:
        """Work that takes long."""
        return list(await self._ask(Ask("overdue", (age_s,))))

    async def take_back(self, found: Sequence[Overdue]) -> None:
        """Hand it out anew."""
        await self._ask(Ask("take_back", (found,)))

    async def whereabouts(self, uids: Sequence[str]) -> dict[str, str]:
        """Who holds which group."""
        return dict(await self._ask(Ask("whereabouts", (uids,))))

    async def cut(self) -> int:
        """Mark a moment in the journal."""
        return int(await self._command("cut"))

    async def snapshot(self, cut: int, out: Path, *, timeout_s: float) -> None:
        """Write the groups as they were at a cut."""
        await self._command("snapshot", cut, out, timeout_s=timeout_s)

    async def discard_before(self, cut: int) -> None:
        """Free the journal up to a cut."""
        await self._command("discard_before", cut)

    async def close(self) -> None:
        """Write what is left."""
        await self._command("close")

    async def _ask(
        self,
        ask: Ask,
        *,
        timeout_s: float = CALL_TIMEOUT_S,
        by_actor: bool = False,
        then: Callable[[Any], Awaitable[Any]] | None = None,
    ) -> Any:
        """What the shard answers; `then` fetches what the answer only names, which dies with it."""
        what = f"{self.name}.{ask.method}"

        async def once() -> Any:
            answer: Any = Elsewhere()
            if not by_actor:
                connection = await self._connection()
                answer = await connection.call(ask, what, timeout_s)
            if isinstance(answer, Elsewhere):
                answer = await call(self.actor.ask.remote(ask), what, timeout_s)
            return answer if then is None else await then(answer)

        return await self._insist(once, what, timeout_s)

    async def _command(
        self, method: str, *arguments: Any, timeout_s: float = CALL_TIMEOUT_S
    ) -> Any:
        """What the actor of the shard answers."""
        what, command = f"{self.name}.{method}", getattr(self.actor, method)

        async def once() -> Any:
            return await call(command.remote(*arguments), what, timeout_s)

        return await self._insist(once, what, timeout_s)

    async def _insist(self, once: Callable[[], Awaitable[Any]], what: str, timeout_s: float) -> Any:
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
            await asyncio.sleep(RETRY_S)

    async def _connection(self) -> Connection:
        """The one connection of all that ask from this event loop; a new one if it is lost."""
        loop = asyncio.get_running_loop()
        opening = self._opening.get(loop)
        if opening is None or _is_over(opening):
            others = {one: o for one, o in self._opening.items() if not one.is_closed()}
            opening = asyncio.create_task(self._connect())
            self._opening = {**others, loop: opening}
        return await asyncio.shield(opening)

    async def _connect(self) -> Connection:
        endpoint = await call(self.actor.endpoint.remote(), f"{self.name}.endpoint")
        assert isinstance(endpoint, Endpoint)
        return await Connection.open(endpoint)


def _is_over(opening: "asyncio.Task[Connection]") -> bool:
    if not opening.done():
        return False
    return bool(opening.cancelled() or opening.exception() or not opening.result().is_open)


def _any_large(commits: Sequence[Commit]) -> bool:
    return any(is_large(commit.blob) for commit in commits)

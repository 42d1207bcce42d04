"""A shard of the experience queue as an actor."""

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray

from streamrl.actors.liveness import Living
from streamrl.actors.transport.object_store import Stored, received, store_blob
from streamrl.actors.transport.rpc import Endpoint, Listener
from streamrl.actors.transport.shard_proxy import Ask, Elsewhere, RemoteShard
from streamrl.buffer import ShardKeeper, ShardPlan
from streamrl.buffer.wire_types import Grant
from streamrl.run_dir.crash_stacks import record_stacks

RESTARTS = 10
"""Times Ray starts a shard anew that has a journal."""


class ShardActor(Living):
    """Hosts one shard on its event loop, from the first call after each start of the process.

    Callers ask over connections; objects of the store, which only Ray can hand over, by actor call.
    """

    def __init__(self, plan: ShardPlan, crashes: tuple[Path, str] | None = None) -> None:
        """`crashes` is where the stacks of a crash go: see `record_stacks`."""
        if crashes is not None:
            record_stacks(*crashes)
        self._plan = plan
        self._opened: ShardKeeper | None = None
        self._listener = Listener(ray.util.get_node_ip_address(), self._answer)

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

    async def run(self) -> None:
        """Serve until the process ends: whoever waits for this is told of that by Ray."""
        await asyncio.Event().wait()

    async def endpoint(self) -> Endpoint:
        """Where this process of the shard listens."""
        return await self._listener.endpoint()

    async def ask(self, ask: Ask) -> Any:
        """What the shard answers; see the methods of Shard."""
        arguments = ask.arguments
        if ask.method in ("put", "add", "note"):
            *others, commits = arguments
            arguments = (*others, received(commits))
        answer = getattr(self._keeper.shard, ask.method)(*arguments, **ask.options)
        return await answer if inspect.isawaitable(answer) else answer

    async def _answer(self, ask: Ask) -> Any:
        answer = await self.ask(ask)
        if ask.method in ("take", "read") and any(map(_has_objects, answer)):
            return Elsewhere()
        return answer

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


def _has_objects(group: Grant | Sequence[Any]) -> bool:
    blobs = (*group.blobs, *group.begun) if isinstance(group, Grant) else group
    return any(isinstance(blob, Stored) for blob in blobs)


def create_shards(
    plans: Mapping[str, ShardPlan],
    create: Callable[..., Any] | None = None,
    *,
    run_dir: Path | None = None,
) -> list[RemoteShard]:
    """A shard actor per name and plan, spread over the nodes, in the order of the names given.

    One with a journal is started again by Ray when it dies; one without takes its groups along.
    `create(name, actor class, arguments, options=...)` makes an actor, by default as Ray does. The
    stacks of one that crashes are left in `run_dir`.
    """
    shards = []
    for name, plan in plans.items():
        returns = plan.files is not None
        options = {"max_restarts": RESTARTS if returns else 0, "scheduling_strategy": "SPREAD"}
        # Ray spreads only what asks for something, were it a byte; the rest lands anywhere.
        options["memory"] = 1
        crashes = None if run_dir is None else (run_dir, name)
        actor = (create or _create)(name, ShardActor, (plan, crashes), options=options)
        shards.append(RemoteShard(name, actor, returns=returns))
    return shards


def _create(name: str, actor_class: Any, arguments: Sequence[Any], *, options: Any) -> Any:
    return ray.remote(actor_class).options(num_cpus=0, **options).remote(*arguments)

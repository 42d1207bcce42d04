"""A shard of the experience queue as an actor."""

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray

from streamrl.actors.liveness import PingableActor
from streamrl.actors.transport.object_store import ObjectStoreBlob, store_blob, unpack_commits
from streamrl.actors.transport.rpc import RpcEndpoint, RpcServer
from streamrl.actors.transport.shard_proxy import RemoteShard, RpcRequest, UseObjectStore
from streamrl.buffer import ShardHost, ShardPlan
from streamrl.buffer.wire_types import LeaseGrant
from streamrl.run_dir.crash_stacks import record_crash_stacks

MAX_SHARD_RESTARTS = 10
"""Times Ray starts a shard anew that has a journal."""


class ShardActor(PingableActor):
    """Hosts one shard on its event loop, from the first call after each start of the process.

    Callers ask over connections; objects of the store, which only Ray can hand over, by actor call.
    """

    def __init__(self, plan: ShardPlan, crashes: tuple[Path, str] | None = None) -> None:
        """`crashes` is where the stacks of a crash go: see `record_crash_stacks`."""
        if crashes is not None:
            record_crash_stacks(*crashes)
        self._plan = plan
        self._open_host: ShardHost | None = None
        self._rpc_server = RpcServer(ray.util.get_node_ip_address(), self._handle_rpc)

    @property
    def _shard_host(self) -> ShardHost:
        if self._open_host is None:
            self._open_host = ShardHost(self._plan, store_blob)
        return self._open_host

    async def open_shard(self) -> list[str]:
        """What could not be read of what a predecessor left, a line each."""
        return [
            f"{bad.file}, byte {bad.position.offset}: {bad.reason}"
            for bad in self._shard_host.corrupt_records
        ]

    async def run(self) -> None:
        """Serve until the process ends: whoever waits for this is told of that by Ray."""
        await asyncio.Event().wait()

    async def get_endpoint(self) -> RpcEndpoint:
        """Where this process of the shard listens."""
        return await self._rpc_server.get_endpoint()

    async def handle_request(self, ask: RpcRequest) -> Any:
        """What the shard answers; see the methods of Shard."""
        arguments = ask.arguments
        if ask.method in ("commit_columns", "add_groups", "save_partials"):
            *others, commits = arguments
            arguments = (*others, unpack_commits(commits))
        answer = getattr(self._shard_host.shard, ask.method)(*arguments, **ask.options)
        return await answer if inspect.isawaitable(answer) else answer

    async def _handle_rpc(self, ask: RpcRequest) -> Any:
        answer = await self.handle_request(ask)
        if ask.method in ("lease_groups", "read_columns") and any(map(_has_stored_blobs, answer)):
            return UseObjectStore()
        return answer

    async def rotate_journal(self) -> int:
        """See ShardKeeper.cut."""
        return await self._shard_host.rotate_journal()

    async def write_snapshot(self, cut: int, out: Path) -> None:
        """See ShardKeeper.snapshot."""
        await self._shard_host.write_snapshot(cut, out)

    async def discard_before(self, cut: int) -> None:
        """See ShardKeeper.discard_before."""
        self._shard_host.discard_before(cut)

    async def close(self) -> None:
        """See ShardKeeper.close."""
        await self._shard_host.close()


def _has_stored_blobs(group: LeaseGrant | Sequence[Any]) -> bool:
    blobs = (*group.blobs, *group.partial_rollouts) if isinstance(group, LeaseGrant) else group
    return any(isinstance(blob, ObjectStoreBlob) for blob in blobs)


def create_shards(
    plans: Mapping[str, ShardPlan],
    create: Callable[..., Any] | None = None,
    *,
    run_dir: Path | None = None,
) -> list[RemoteShard]:
    """A shard actor per name and plan, spread over the nodes, in the order of the names given.

    One with a journal is started again by Ray when it dies; one without takes its groups along.
    `create_actor(name, actor class, arguments, options=...)` makes an actor, by default as Ray
    does. The stacks of one that crashes are left in `run_dir`.
    """
    shards = []
    for name, plan in plans.items():
        returns = plan.files is not None
        options = {
            "max_restarts": MAX_SHARD_RESTARTS if returns else 0,
            "scheduling_strategy": "SPREAD",
        }
        # Ray spreads only what asks for something, were it a byte; the rest lands anywhere.
        options["memory"] = 1
        crashes = None if run_dir is None else (run_dir, name)
        actor = (create or _create_actor)(name, ShardActor, (plan, crashes), options=options)
        shards.append(RemoteShard(name, actor, returns=returns))
    return shards


def _create_actor(name: str, actor_class: Any, arguments: Sequence[Any], *, options: Any) -> Any:
    return ray.remote(actor_class).options(num_cpus=0, **options).remote(*arguments)

"""Actor that hosts a shard of the experience queue."""

import asyncio
import inspect
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray

from streamrl.actors.liveness import PingableActor
from streamrl.actors.transport.object_store import ObjectStoreBlob, store_blob, unpack_commits
from streamrl.actors.transport.ray_calls import fetch_reply
from streamrl.actors.transport.rpc import RpcEndpoint, RpcServer
from streamrl.actors.transport.shard_proxy import RemoteShard, RpcRequest, UseObjectStore
from streamrl.buffer import (
    QueueConfig,
    ShardCapacity,
    ShardFiles,
    ShardHost,
    ShardPlan,
    StageSchema,
)
from streamrl.buffer.wire_types import LeaseGrant
from streamrl.run_dir.crash_stacks import record_crash_stacks

MAX_SHARD_RESTARTS = 10
"""Restarts that Ray may make of a shard with a journal."""


class ShardActor(PingableActor):
    """Actor that hosts a shard of the experience queue on its event loop.

    The first call after each start of the process recovers the shard from its journal. Clients call
    over RPC connections; a reply with object-store references needs an actor call, because only Ray
    transfers the ownership of objects.
    """

    def __init__(self, plan: ShardPlan, crashes: tuple[Path, str] | None = None) -> None:
        """Create the actor of the shard that `plan` describes.

        crashes: run directory and name of this process, for `record_crash_stacks`.
        """
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
        """Recover the shard from its journal; return a line for each unreadable journal record."""
        return [
            f"{record.file}, byte {record.position.offset}: {record.reason}"
            for record in self._shard_host.corrupt_records
        ]

    async def run(self) -> None:
        """Wait forever, so that the pending reply of this call fails when the process dies."""
        await asyncio.Event().wait()

    async def get_endpoint(self) -> RpcEndpoint:
        return await self._rpc_server.get_endpoint()

    async def handle_request(self, request: RpcRequest) -> Any:
        """Call a method of the shard; the reply may hold object-store references."""
        arguments = request.arguments
        if request.method in ("commit_columns", "add_groups", "save_partials"):
            *others, commits = arguments
            arguments = (*others, unpack_commits(commits))
        reply = getattr(self._shard_host.shard, request.method)(*arguments, **request.options)
        return await reply if inspect.isawaitable(reply) else reply

    async def _handle_rpc(self, request: RpcRequest) -> Any:
        """Handle a request of an RPC connection.

        Returns UseObjectStore if the reply holds object-store references and needs an actor call.
        """
        reply = await self.handle_request(request)
        if request.method in ("lease_groups", "read_columns") and any(
            map(_has_stored_blobs, reply)
        ):
            return UseObjectStore()
        return reply

    async def rotate_journal(self) -> int:
        return await self._shard_host.rotate_journal()

    async def write_snapshot(self, cut: int, out: Path) -> None:
        await self._shard_host.write_snapshot(cut, out)

    async def discard_before(self, cut: int) -> None:
        self._shard_host.discard_before(cut)

    async def close(self) -> None:
        await self._shard_host.close()


def _has_stored_blobs(group: LeaseGrant | Sequence[Any]) -> bool:
    blobs = (*group.blobs, *group.partial_rollouts) if isinstance(group, LeaseGrant) else group
    return any(isinstance(blob, ObjectStoreBlob) for blob in blobs)


def create_shards(
    plans: Mapping[str, ShardPlan],
    create_actor: Callable[..., Any] | None = None,
    *,
    run_dir: Path | None = None,
) -> list[RemoteShard]:
    """Create a shard actor for each plan, by name, spread over the nodes.

    Returns their proxies in the order of `plans`. Ray restarts a shard that has a journal; a shard
    without a journal loses its groups when it dies.

    create_actor: makes an actor from `(name, actor class, arguments, options=...)`; Ray by default.
    run_dir: run directory into which a crashed shard writes its stack traces.
    """
    shards = []
    for name, plan in plans.items():
        has_journal = plan.files is not None
        options = {
            "max_restarts": MAX_SHARD_RESTARTS if has_journal else 0,
            "scheduling_strategy": "SPREAD",
        }
        # SPREAD only applies to actors with a resource request, so request one byte of memory.
        options["memory"] = 1
        crashes = None if run_dir is None else (run_dir, name)
        actor = (create_actor or _create_actor)(name, ShardActor, (plan, crashes), options=options)
        shards.append(RemoteShard(name, actor, is_restartable=has_journal))
    return shards


def start_shards(
    stages: Mapping[str, StageSchema],
    folder: Path | None,
    *,
    bounds: ShardCapacity,
    config: QueueConfig | None = None,
) -> list[RemoteShard]:
    """Start the shards of a queue without a run; return their proxies. Ray must be initialized.

    stages: columns that each stage requires and commits. bounds: capacity of a shard.
    folder: folder for the journals; None for a queue without journals.

    Shards recover the groups that an earlier program left in the folder, unleased; a warning names
    each unreadable record.
    """
    config, session = config or QueueConfig(), uuid.uuid4().hex
    plans = {
        name: ShardPlan(
            stages,
            config,
            bounds,
            session,
            ShardFiles(folder.absolute() / name) if folder is not None else None,
        )
        for name in (f"shard-{i}" for i in range(config.shards))
    }
    shards = create_shards(plans)
    for shard in shards:
        for text in fetch_reply(shard.actor.open_shard.remote(), f"{shard.name}.open_shard"):
            warnings.warn(f"{text}; its groups are lost or must be made again", stacklevel=2)
    return shards


def _create_actor(name: str, actor_class: Any, arguments: Sequence[Any], *, options: Any) -> Any:
    return ray.remote(actor_class).options(num_cpus=0, **options).remote(*arguments)

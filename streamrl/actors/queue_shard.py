"""Actor that hosts a shard of the experience queue, and the proxy that calls it.

Small blobs of columns travel in messages, large ones as objects in Ray's store.
"""

import asyncio
import math
import time
import uuid
import warnings
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import methodcaller
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import msgspec
import ray

from streamrl.actors.liveness import PingableActor
from streamrl.actors.transport.ray_calls import (
    CALL_TIMEOUT_S,
    await_reply,
    call_actor,
    fetch_objects,
    fetch_reply,
)
from streamrl.actors.transport.rpc import RpcConnection, RpcEndpoint, RpcServer
from streamrl.buffer import QueueConfig, QueueShard, ShardCapacity, StageSchema
from streamrl.buffer.durable_shard import (
    METHOD_TIMEOUTS_S,
    DurableShard,
    ShardFiles,
    ShardPlan,
    open_shard,
)
from streamrl.buffer.encoding import (
    LARGE_BLOB_BYTES,
    Blob,
    ColumnBlobs,
    ColumnCommit,
    LeaseGrant,
    count_blob_bytes,
    from_message,
    join_pieces,
    split_pieces,
    to_message,
)
from streamrl.errors import ActorLostError
from streamrl.run_dir.crash_stacks import record_crash_stacks

P = ParamSpec("P")
T = TypeVar("T")
MAX_SHARD_RESTARTS = 10
"""Restarts that Ray may make of a shard with a journal."""
RECONNECT_S = 60.0
"""Longest wait for a dead or unreachable shard to come back."""
RETRY_INTERVAL_S = 0.2
INLINE_BYTES = LARGE_BLOB_BYTES
"""Largest blob that a shard stores itself and sends inside messages. Ray inlines objects up to the
same size, because an object costs as much as many copies of this many bytes.
"""


@dataclass(frozen=True)
class ObjectStoreBlob:
    """Large blob as a reference to an object in Ray's store, which the shard owns.

    The object is a list of the blob's pieces.
    """

    object_ref: ray.ObjectRef


def is_large(blob: Blob) -> bool:
    """Return whether a blob is too large for messages and goes to Ray's object store."""
    return count_blob_bytes(blob) > INLINE_BYTES


def store_blob(blob: Blob) -> Any:
    """Return the form in which a shard keeps a blob: bytes, or an ObjectStoreBlob if large."""
    if is_large(blob):
        return ObjectStoreBlob(ray.put(to_message(split_pieces(blob))))
    return to_message(join_pieces(blob))


def list_blobs(item: Any) -> tuple[Any, ...]:
    """Return the blobs that an item of a shard's reply holds; () if it holds none."""
    if isinstance(item, LeaseGrant):
        return (*item.blobs, *item.partial_rollouts)
    return item if isinstance(item, ColumnBlobs) else ()


def has_stored_blobs(reply: Any) -> bool:
    """Return whether a shard's reply holds references to objects in Ray's store."""
    return isinstance(reply, list) and any(
        isinstance(blob, ObjectStoreBlob) for item in reply for blob in list_blobs(item)
    )


async def resolve_reply_blobs(reply: Any) -> Any:
    """Return a shard's reply with its large blobs fetched from Ray's object store, as views."""
    if not isinstance(reply, list):
        return reply
    blobs = [blob for item in reply for blob in list_blobs(item)]
    if not blobs:
        return reply
    stored = [blob.object_ref for blob in blobs if isinstance(blob, ObjectStoreBlob)]
    objects = iter(await fetch_objects(stored, "columns of groups") if stored else [])
    resolved = iter(
        [from_message(next(objects) if isinstance(b, ObjectStoreBlob) else b) for b in blobs]
    )
    return [_replace_blobs(item, resolved) for item in reply]


def _replace_blobs(item: Any, resolved: Iterator[Blob]) -> Any:
    """Return an item of a reply with the next blobs in place of those that it holds."""
    if not isinstance(item, LeaseGrant):
        return tuple(islice(resolved, len(item))) if isinstance(item, ColumnBlobs) else item
    return msgspec.structs.replace(
        item,
        blobs=tuple(islice(resolved, len(item.blobs))),
        partial_rollouts=tuple(islice(resolved, len(item.partial_rollouts))),
    )


@dataclass(frozen=True)
class UseObjectStore:
    """Reply of a shard that cannot go over an RPC connection: it holds object references.

    The client then repeats the request as an actor call, because only Ray transfers the ownership
    of objects.
    """


ShardRequest = Callable[[QueueShard], Coroutine[Any, Any, Any]]
"""Call of a method of a shard, as `operator.methodcaller` makes it; picklable."""


class ShardActor(PingableActor):
    """Actor that hosts a shard of the experience queue on its event loop.

    The first call after each start of the process recovers the shard from its journal.
    """

    def __init__(self, plan: ShardPlan, crashes: tuple[Path, str] | None = None) -> None:
        """Create the actor of the shard that `plan` describes.

        crashes: run directory and name of this process, for `record_crash_stacks`.
        """
        if crashes is not None:
            record_crash_stacks(*crashes)
        self._plan = plan
        self._opened_shard: QueueShard | None = None
        self._rpc_server = RpcServer(ray.util.get_node_ip_address(), self._handle_rpc)

    @property
    def _shard(self) -> QueueShard:
        if self._opened_shard is None:
            self._opened_shard = open_shard(self._plan, store_blob)
        return self._opened_shard

    async def open_shard(self) -> list[str]:
        """Recover the shard from its journal; return a line for each unreadable journal record."""
        return [
            f"{record.file}, byte {record.position.offset}: {record.reason}"
            for record in self._shard.corrupt_records
        ]

    async def run(self) -> None:
        """Wait forever, so that the pending reply of this call fails when the process dies."""
        await asyncio.Event().wait()

    async def get_endpoint(self) -> RpcEndpoint:
        return await self._rpc_server.get_endpoint()

    async def handle_request(self, request: ShardRequest) -> Any:
        """Run a method of the shard; the reply may hold object-store references."""
        return await request(self._shard)

    async def _handle_rpc(self, request: ShardRequest) -> Any:
        reply = await self.handle_request(request)
        return UseObjectStore() if has_stored_blobs(reply) else reply


class RemoteShard:
    """Proxy of a shard actor. Picklable.

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

    async def call(
        self,
        method: Callable[Concatenate[DurableShard, P], Coroutine[Any, Any, T]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Run a method of the shard and return its result, with large blobs fetched.

        The deadline is the method's of METHOD_TIMEOUTS_S or else CALL_TIMEOUT_S, plus its keyword
        argument `wait_s` if it has one. Methods of DurableShard need a shard with a journal.

        Raises ActorLostError if the shard does not come back, DeadlineError, and the errors of the
        method.
        """
        named: Mapping[str, Any] = kwargs
        request: ShardRequest = methodcaller(method.__name__, *args, **named)
        call_name = f"{self.name}.{method.__name__}"
        by_actor = _has_large_blobs([*args, *named.values()])
        timeout_s = METHOD_TIMEOUTS_S.get(method, CALL_TIMEOUT_S) + named.get("wait_s", 0.0)

        async def attempt() -> Any:
            reply: Any = UseObjectStore()
            if not by_actor:
                connection = await self._get_connection()
                reply = await connection.call(request, call_name, timeout_s)
            if isinstance(reply, UseObjectStore):
                reply = await await_reply(
                    self.actor.handle_request.remote(request), call_name, timeout_s
                )
            return await resolve_reply_blobs(reply)

        result: T = await self._retry_until_back(attempt, call_name, timeout_s)
        return result

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
        endpoint = await call_actor(self.actor, self.name, "get_endpoint")
        assert isinstance(endpoint, RpcEndpoint)
        return await RpcConnection.open(endpoint)


def _is_disconnected(opening: "asyncio.Task[RpcConnection]") -> bool:
    if not opening.done():
        return False
    return bool(opening.cancelled() or opening.exception() or not opening.result().is_open)


def _has_large_blobs(values: Iterable[Any]) -> bool:
    """Return whether a commit with a large blob is among the arguments, or in a list of them."""
    return any(
        isinstance(item, ColumnCommit) and is_large(item.blob)
        for value in values
        for item in (value if isinstance(value, list | tuple) else (value,))
    )


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

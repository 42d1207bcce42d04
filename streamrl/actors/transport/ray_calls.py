"""Calls of Ray actors with a deadline; Ray's exceptions become streamrl errors."""

import asyncio
import contextlib
import os
import random
import socket
from collections.abc import Awaitable, Iterable, Sequence
from typing import Any

import ray
from ray.exceptions import (
    GetTimeoutError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
)

from streamrl.errors import (
    ActorError,
    ActorLostError,
    CheckpointError,
    ConfigError,
    DeadlineError,
    DiskError,
    JournalError,
    RankLostError,
    StreamError,
    get_first_line,
)
from streamrl.weights.transport import ClusterAccess

CALL_TIMEOUT_S = 120.0
"""Timeout of an actor call that only handles metadata. Calls that compute pass their own."""
RENDEZVOUS_PORTS = range(20_000, 32_000)
"""Ports below Linux's ephemeral ones (32768 and up), which gloo's own sockets use."""
DEATH_NOTICE_S = 20.0
"""Ray reports the death of an actor within this time."""
_DISK_ERRORS = (CheckpointError, JournalError, DiskError)


async def await_reply(reply: Any, call_name: str, timeout_s: float = CALL_TIMEOUT_S) -> Any:
    """Return the reply of an actor call on the event loop.

    call_name: name of the call for errors, such as "shard-0.commit_columns".

    Raises DeadlineError after `timeout_s`, ActorLostError if the actor died, and the StreamError or
    ConfigError that the actor raised.
    """
    try:
        return await asyncio.wait_for(reply, timeout_s)
    except TimeoutError:
        raise DeadlineError(f"{call_name}: no answer within {timeout_s:g} s") from None
    except RayError as error:
        raise translate_error(error, call_name) from None


async def call_actor(
    actor: Any, name: str, method: str, *arguments: Any, timeout_s: float = CALL_TIMEOUT_S
) -> Any:
    """Call a method of the actor `name`; return its reply, or raise as `await_reply` does."""
    reply = getattr(actor, method).remote(*arguments)
    return await await_reply(reply, f"{name}.{method}", timeout_s)


def fetch_reply(replies: Any, call_name: str, timeout_s: float = CALL_TIMEOUT_S) -> Any:
    """Return the reply of an actor call, or a list of replies; blocks the thread.

    For code without an event loop. Raises the errors of `await_reply`.
    """
    try:
        return ray.get(replies, timeout=timeout_s)
    except GetTimeoutError:
        raise DeadlineError(f"{call_name}: no answer within {timeout_s:g} s") from None
    except RayError as error:
        raise translate_error(error, call_name) from None


async def fetch_objects(references: Sequence[Any], call_name: str) -> list[Any]:
    """Fetch many objects of Ray's store at once, in a thread.

    Awaiting each reference instead costs ten times as much.
    """
    # Ray warns about a blocking get in an asyncio actor; this get runs in a thread.
    os.environ.setdefault("RAY_WARN_BLOCKING_GET_INSIDE_ASYNC", "0")
    return list(await asyncio.to_thread(fetch_reply, list(references), call_name))


def put_object(value: Any) -> Any:
    """Put a value into the object store. `ray.put` itself cannot be pickled."""
    return ray.put(value)


def get_address() -> str:
    return str(ray.util.get_node_ip_address())


RAY_ACCESS = ClusterAccess(put_object, fetch_reply, get_address)


def find_rendezvous() -> tuple[str, int]:
    """Return this node's address and a free port, where the ranks of a model meet.

    They form their torch.distributed group there.
    """
    for port in random.sample(RENDEZVOUS_PORTS, 50):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return get_address(), port
    raise ActorError(
        f"no free port between {RENDEZVOUS_PORTS.start} and {RENDEZVOUS_PORTS.stop} in 50 tries"
    )


def set_rendezvous(address: str, port: int) -> None:
    """Let this process, a rank of a model, meet the others at the address of rank 0."""
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = address, str(port)


async def gather_replies(*replies: Awaitable[Any]) -> list[Any]:
    """Await the replies of actors that work together; raise the first error.

    After a disk error, first waits for all replies, so that the caller can remove the written
    files. After a RankLostError, which names a lost peer, waits up to DEATH_NOTICE_S for the error
    of that peer and raises the peer's error.
    """
    tasks = [asyncio.ensure_future(reply) for reply in replies]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        errors = _collect_errors(tasks)
        if all(isinstance(error, _DISK_ERRORS) for error in errors):
            await asyncio.wait(tasks)
        elif any(isinstance(error, RankLostError) for error in errors):
            await asyncio.wait(tasks, timeout=DEATH_NOTICE_S)
    finally:
        for task in tasks:
            task.cancel()
    for error in sorted(_collect_errors(tasks), key=lambda error: isinstance(error, RankLostError)):
        raise error
    return [task.result() for task in tasks]


def _collect_errors(tasks: Iterable[asyncio.Future[Any]]) -> list[BaseException]:
    """Return the errors of the tasks that have failed so far."""
    ended = (task for task in tasks if task.done() and not task.cancelled())
    return [error for task in ended if (error := task.exception()) is not None]


def has_died(reply: Any) -> bool:
    """Return whether a failed reply means that the called actor itself died.

    False if the actor only reported the death of another one.
    """
    try:
        ray.get(reply, timeout=0)
    except (RayActorError, OutOfMemoryError):
        return True
    except RayError:
        return False
    return False


def translate_error(error: RayError, call_name: str) -> StreamError | ConfigError:
    """Return the streamrl error that stands for a Ray error of the call `call_name`."""
    if isinstance(error, RayTaskError):
        cause = unwrap_error(error.cause)
        if isinstance(cause, StreamError | ConfigError):
            return cause
        return ActorError(f"{call_name}: {type(cause).__name__}: {cause}\n{error}")
    if isinstance(error, RayActorError):
        return ActorLostError(f"{call_name}: the actor died ({get_first_line(error)})")
    if isinstance(error, ObjectLostError):
        return ActorLostError(f"{call_name}: the actor that owned it died")
    if isinstance(error, OutOfMemoryError):
        return ActorLostError(
            f"{call_name}: Ray killed the actor because its node ran out of memory"
        )
    return ActorError(f"{call_name}: {type(error).__name__}: {get_first_line(error)}")


def unwrap_error(error: BaseException) -> BaseException:
    """Return the first error inside nested exception groups, which asyncio.TaskGroup raises."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error

"""Calling an actor with a deadline, and turning what Ray raises into the errors of streamrl."""

import asyncio
import os
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
)

CALL_TIMEOUT_S = 120.0
"""Deadline of a call that only keeps books, s. Work that computes brings its own."""
DEATH_NOTICE_S = 20.0
"""Longest that Ray takes to tell that an actor has died, s."""
_DISK_ERRORS = (CheckpointError, JournalError, DiskError)


async def await_reply(reply: Any, what: str, timeout_s: float = CALL_TIMEOUT_S) -> Any:
    """Await the reply of an actor. `what` names the call in errors, e.g. "shard-0.put".

    Raises DeadlineError after `timeout_s`, ActorLostError if the actor died, and the actor's own
    StreamError or ConfigError if it raised one.
    """
    try:
        return await asyncio.wait_for(reply, timeout_s)
    except TimeoutError:
        raise DeadlineError(f"{what}: no answer within {timeout_s:g} s") from None
    except RayError as error:
        raise translate_error(error, what) from None


def fetch_reply(replies: Any, what: str, timeout_s: float = CALL_TIMEOUT_S) -> Any:
    """`call` for the driver, which is not asyncio: one reply or a list of them."""
    try:
        return ray.get(replies, timeout=timeout_s)
    except GetTimeoutError:
        raise DeadlineError(f"{what}: no answer within {timeout_s:g} s") from None
    except RayError as error:
        raise translate_error(error, what) from None


async def fetch_objects(
    references: Sequence[Any], what: str, timeout_s: float = CALL_TIMEOUT_S
) -> list[Any]:
    """`call` for many objects, of which all are there: to await each costs ten times as much."""
    # Ray warns of a get in an asyncio actor, since it stops the loop; this one is in a thread.
    os.environ.setdefault("RAY_WARN_BLOCKING_GET_INSIDE_ASYNC", "0")
    return list(await asyncio.to_thread(fetch_reply, list(references), what, timeout_s))


async def gather_replies(*replies: Awaitable[Any]) -> list[Any]:
    """What all of those who work together answer; the first error of one is raised.

    If the disk refuses one of them, not before all have ended: what they write is removed then. If
    one tells that another rank is gone, the error is that one's, as soon as it is known.
    """
    tasks = [asyncio.ensure_future(reply) for reply in replies]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        failed = _collect_errors(tasks)
        if all(isinstance(error, _DISK_ERRORS) for error in failed):
            await asyncio.wait(tasks)
        elif any(isinstance(error, RankLostError) for error in failed):
            await asyncio.wait(tasks, timeout=DEATH_NOTICE_S)
    finally:
        for task in tasks:
            task.cancel()
    for error in sorted(_collect_errors(tasks), key=lambda error: isinstance(error, RankLostError)):
        raise error
    return [task.result() for task in tasks]


def _collect_errors(tasks: Iterable[asyncio.Future[Any]]) -> list[BaseException]:
    ended = (task for task in tasks if task.done() and not task.cancelled())
    return [error for task in ended if (error := task.exception()) is not None]


def has_died(reply: Any) -> bool:
    """Whether an actor died over a call: not so if it only told of another one's death."""
    try:
        ray.get(reply, timeout=0)
    except (RayActorError, OutOfMemoryError):
        return True
    except RayError:
        return False
    return False


def translate_error(error: RayError, what: str) -> StreamError | ConfigError:
    """The streamrl error that says the same as an error of Ray, in one line."""
    if isinstance(error, RayTaskError):
        cause = unwrap_error(error.cause)
        if isinstance(cause, StreamError | ConfigError):
            return cause
        return ActorError(f"{what}: {type(cause).__name__}: {cause}\n{error}")
    if isinstance(error, RayActorError):
        return ActorLostError(f"{what}: the actor died ({_first_line(error)})")
    if isinstance(error, ObjectLostError):
        return ActorLostError(f"{what}: the actor that owned it died")
    if isinstance(error, OutOfMemoryError):
        return ActorLostError(f"{what}: the actor was ended, as its node was running out of memory")
    return ActorError(f"{what}: {type(error).__name__}: {_first_line(error)}")


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def unwrap_error(error: BaseException) -> BaseException:
    """The first error inside nested exception groups (asyncio task groups wrap what fails)."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error

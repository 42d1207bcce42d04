"""Calls of user code in a host: sync methods in threads, async methods as tasks.

A call may be given up at any time. An async method is then cancelled. A thread cannot be stopped:
it is counted as hanging until the method returns, and the pool replaces a host with hanging calls.
"""

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from streamrl.files.python_module import FileFunction

MAX_THREADS = 256
"""Concurrent sync calls of a host; further calls wait. With thousands of threads that all want the
interpreter lock, the event loop would hardly ever get it."""
CANCEL_TIMEOUT_S = 1.0
"""Grace period of a cancelled async method; afterwards it counts as hanging."""


class UserCodeError(Exception):
    """Exception of user code; the message has method, file, line, type and text."""


class UserCallRunner:
    """Runs methods of users without blocking the event loop."""

    def __init__(self) -> None:
        self._threads = asyncio.Semaphore(MAX_THREADS)
        self._hanging: set[asyncio.Future[Any]] = set()

    @property
    def num_hanging(self) -> int:
        return len(self._hanging)

    async def run(
        self, method: FileFunction, function: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Call a method and return its result; give it up when cancelled. Raises UserCodeError.

        method: description of the function, for its errors. Positional, because keyword arguments
        of tools and constructors may have any name. A sync call has a thread of its own,
        so nothing thread-local passes from one session to another.
        """
        call = partial(function, *args, **kwargs)
        if method.is_async:
            return await self._wait_for(asyncio.create_task(_await_call(method, call)))
        async with self._threads:
            return await self._wait_for(_start_thread(method, call))

    async def _wait_for(self, work: "asyncio.Future[Any]") -> Any:
        try:
            await asyncio.wait({work})
        except asyncio.CancelledError:
            self._hanging.add(work)
            work.add_done_callback(self._on_hanging_done)
            if isinstance(work, asyncio.Task):
                work.cancel()
                await asyncio.wait({work}, timeout=CANCEL_TIMEOUT_S)
            raise
        return work.result()

    def _on_hanging_done(self, work: "asyncio.Future[Any]") -> None:
        self._hanging.discard(work)
        if not work.cancelled():
            # Retrieve the exception; asyncio logs "exception was never retrieved" otherwise.
            work.exception()


async def _await_call(method: FileFunction, call: Callable[[], Awaitable[Any]]) -> Any:
    host_pid, task = os.getpid(), asyncio.current_task()
    assert task is not None
    try:
        return await call()
    except asyncio.CancelledError as error:
        if task.cancelling():
            raise
        raise UserCodeError(method.describe_error(error)) from error
    # SystemExit included, which would otherwise stop the event loop.
    except BaseException as error:
        raise UserCodeError(method.describe_error(error)) from error
    finally:
        _exit_if_forked(host_pid)


def _start_thread(method: FileFunction, call: Callable[[], Any]) -> "asyncio.Future[Any]":
    """Call in a new thread; return a future of the result."""
    loop, host_pid = asyncio.get_running_loop(), os.getpid()
    future: asyncio.Future[Any] = loop.create_future()

    def run_call() -> None:
        try:
            result = call()
        except BaseException as error:  # noqa: BLE001 - user code may raise anything
            _exit_if_forked(host_pid)
            failure = UserCodeError(method.describe_error(error))
            failure.__cause__ = error
            loop.call_soon_threadsafe(future.set_exception, failure)
        else:
            _exit_if_forked(host_pid)
            loop.call_soon_threadsafe(future.set_result, result)

    threading.Thread(target=run_call, name=method.name, daemon=True).start()
    return future


def _exit_if_forked(host_pid: int) -> None:
    """Exit if this process is a fork of the host: user code may fork and return in the child."""
    if os.getpid() != host_pid:
        os._exit(0)

"""Calls of user code in a host: an episode's sync methods in one thread, async methods as tasks.

A call may be given up at any time. An async method is then cancelled. A thread cannot be stopped:
its call is counted as hanging until it returns, and the pool replaces a host with hanging calls.
"""

import asyncio
import contextvars
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from streamrl.user_code.pool.worker import exit_if_forked
from streamrl.user_code.python_module import FileFunction

MAX_RUNNING_CALLS = 256
"""Concurrent sync calls of a host; further calls wait. With thousands of threads that all want the
interpreter lock, the event loop would hardly ever get it."""
CANCEL_TIMEOUT_S = 1.0
"""Grace period of a cancelled async method; afterwards it counts as hanging."""


class UserCodeError(Exception):
    """Exception of user code; the message has method, file, line, type and text."""


class HostCalls:
    """Limit of the sync calls of all episodes of a host, and its calls that hang."""

    def __init__(self) -> None:
        self.slots = asyncio.Semaphore(MAX_RUNNING_CALLS)
        self.hanging: set[asyncio.Future[Any]] = set()

    def add_hanging(self, work: "asyncio.Future[Any]") -> None:
        """Count a call that was given up until it returns."""
        self.hanging.add(work)
        work.add_done_callback(self._on_hanging_done)

    def _on_hanging_done(self, work: "asyncio.Future[Any]") -> None:
        self.hanging.discard(work)
        if not work.cancelled():
            # Retrieve the exception; asyncio logs "exception was never retrieved" otherwise.
            work.exception()


class EpisodeCalls:
    """Runs methods of an episode's object without blocking the event loop.

    All sync calls have the same thread: connections, event loops and contexts may be bound to
    theirs. Another thread serves a call that comes while the thread is busy: a parallel call of the
    same turn, or one after a call that hangs.
    """

    def __init__(self, host_calls: HostCalls) -> None:
        self._host_calls = host_calls
        self._thread: ThreadPoolExecutor | None = None
        self._in_thread: asyncio.Future[Any] | None = None
        self._context = contextvars.copy_context()

    @property
    def is_hanging(self) -> bool:
        """True while the episode's thread runs a call that was given up."""
        return self._in_thread in self._host_calls.hanging

    async def run(
        self, method: FileFunction, function: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Call a method and return its result; give it up when cancelled. Raises UserCodeError.

        method: description of the function, for its errors. Positional, because keyword arguments
        of tools and constructors may have any name.
        """
        call = partial(function, *args, **kwargs)
        if method.is_async:
            work = asyncio.create_task(_await_call(method, call), context=self._context)
            return await self._wait_for(work)
        async with self._host_calls.slots:
            return await self._wait_for(self._start_call(method, call))

    def _start_call(self, method: FileFunction, call: Callable[[], Any]) -> "asyncio.Future[Any]":
        is_busy = self._in_thread is not None and not self._in_thread.done()
        thread = None if is_busy else self._thread
        if thread is None:
            thread = ThreadPoolExecutor(1, thread_name_prefix=method.name)
        run = partial(_make_call, method, call, os.getpid())
        try:
            work = asyncio.get_running_loop().run_in_executor(thread, run)
        except RuntimeError as error:
            raise UserCodeError(
                f"{method.name}: {error}: an open episode whose class has blocking methods has a"
                " thread; lower environment.open_episodes, or write async methods"
            ) from error
        if is_busy:
            thread.shutdown(wait=False)
        else:
            self._thread, self._in_thread = thread, work
        return work

    def end_thread(self) -> None:
        """Let the episode's thread end after its call; a later call has another."""
        if self._thread is not None:
            self._thread.shutdown(wait=False)
        self._thread = self._in_thread = None

    async def _wait_for(self, work: "asyncio.Future[Any]") -> Any:
        try:
            await asyncio.wait({work})
        except asyncio.CancelledError:
            self._host_calls.add_hanging(work)
            if isinstance(work, asyncio.Task):
                work.cancel()
                await asyncio.wait({work}, timeout=CANCEL_TIMEOUT_S)
            raise
        return work.result()


async def _await_call(method: FileFunction, call: Callable[[], Any]) -> Any:
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
        exit_if_forked(host_pid)


def _make_call(method: FileFunction, call: Callable[[], Any], host_pid: int) -> Any:
    try:
        return call()
    # SystemExit included, which would otherwise end the thread.
    except BaseException as error:
        raise UserCodeError(method.describe_error(error)) from error
    finally:
        exit_if_forked(host_pid)

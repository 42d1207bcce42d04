"""Tasks that a pool does not wait for at once, or that outlast the cancellation of their caller."""

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def run_to_end(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run the cleanup of a caller that raises afterwards; its cancellations do not interrupt it."""
    task = asyncio.create_task(coroutine)
    while not task.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.shield(task)


class BackgroundTasks:
    """Tasks kept alive until they end; asyncio itself keeps only weak references to tasks."""

    def __init__(self) -> None:
        self.running: set[asyncio.Future[Any]] = set()

    def spawn(self, coroutine: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        task = asyncio.create_task(coroutine)
        self.watch(task)
        return task

    def watch(self, task: "asyncio.Future[Any]") -> None:
        """Keep a task until it ends."""
        self.running.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: "asyncio.Future[Any]") -> None:
        self.running.discard(task)
        if not task.cancelled():
            # Retrieve the exception; asyncio logs "exception was never retrieved" otherwise.
            task.exception()

    async def drain(self) -> None:
        """Wait until all tasks have ended, those started meanwhile included."""
        while self.running:
            await asyncio.wait(set(self.running))

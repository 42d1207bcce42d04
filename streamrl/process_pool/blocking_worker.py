"""Worker process for callers without an event loop, such as threads that read data."""

import asyncio
import itertools
import threading
from typing import Any

from streamrl.process_pool.background_tasks import BackgroundTasks
from streamrl.process_pool.pool import (
    START_TIMEOUT_S,
    WorkerCrashError,
    WorkerError,
    WorkerTimeoutError,
)
from streamrl.process_pool.process import ProcessExitedError, WorkerProcess

IDLE_TIMEOUT_S = 30.0
"""Time without a call after which the process ends; the next call starts another."""


class BlockingWorker:
    """A worker process that starts with the first call and runs one call at a time.

    target: "module:function"; the worker calls this function with `payload` to get its handler.
    timeout_s: deadline of a call. The process dies with this one. Calls may come from any thread:
    an event loop in a thread of its own holds the process.
    """

    def __init__(self, target: str, payload: Any, *, timeout_s: float) -> None:
        self._target = target
        self._payload = payload
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._process: WorkerProcess | None = None
        self._call_ids = itertools.count()
        self._idle: asyncio.TimerHandle | None = None
        self._tasks = BackgroundTasks()

    def call(self, request: Any) -> Any:
        """Run a request in the worker and return the handler's result.

        Raises ConfigError if loading the handler does, and WorkerError: if the handler raised, the
        process exited, or the deadline passed, which ends the process.
        """
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, daemon=True).start()
            return asyncio.run_coroutine_threadsafe(self._call(request), self._loop).result()

    async def _call(self, request: Any) -> Any:
        if self._idle is not None:
            self._idle.cancel()
        try:
            if self._process is None:
                self._process = await WorkerProcess.start(
                    self._target, self._payload, within_s=START_TIMEOUT_S
                )
            async with asyncio.timeout(self._timeout_s):
                ok, answer = await self._process.send_request(next(self._call_ids), request)
        except TimeoutError:
            await self._end()
            raise WorkerTimeoutError(f"no result in {self._timeout_s:g} s") from None
        except ProcessExitedError as error:
            await self._end()
            raise WorkerCrashError(str(error)) from None
        self._idle = asyncio.get_running_loop().call_later(
            IDLE_TIMEOUT_S, lambda: self._tasks.spawn(self._end())
        )
        if not ok:
            raise WorkerError(answer)
        return answer

    def close(self) -> None:
        """End the process; a later call starts another."""
        with self._lock:
            if self._loop is not None:
                asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await process.kill()

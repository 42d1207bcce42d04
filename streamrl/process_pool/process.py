"""The pool's end of one worker: started, asked, looked at, ended."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from typing import Any

from streamrl.errors import ConfigError
from streamrl.process_pool import reaper as keeper
from streamrl.process_pool.framing import (
    HEADER_BYTES,
    pack_message,
    unpack_length,
    unpickle_response,
)
from streamrl.process_pool.worker import CANCEL, LOAD_FAILED, READY, REQUEST, RESULT

EXIT_TIMEOUT_S = 10.0
"""A keeper has this long to end everything, s; then it is killed too."""
LOWEST_PRIORITY = 19
MAX_RESPONSE_BYTES = 1 << 28
"""Most bytes of one answer."""


class ProcessExitedError(Exception):
    """The process ended."""


class WorkerProcess:
    """A keeper and its worker, at the other end of a socket."""

    def __init__(self, keeper: "subprocess.Popen[bytes]", streams: "_SocketStreams") -> None:
        self._reaper = keeper
        self._reader, self._writer = streams
        self._pending_responses: dict[int, asyncio.Future[tuple[bool, Any]]] = {}
        self._reader_task: asyncio.Task[None] | None = None
        self._worker_pid = 0
        self._last_error = ""
        self.is_async = False

    @classmethod
    async def start(cls, target: str, payload: Any, *, within_s: float) -> "WorkerProcess":
        """A worker that has loaded what it serves with. Raises ConfigError as the load does.

        Raises ProcessEndedError if the process ends before, or is not ready within so many seconds.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            launched = await _launch_reaper(theirs, target, ours)
        process = cls(launched, await asyncio.open_connection(sock=ours))
        try:
            async with asyncio.timeout(within_s):
                await process._wait_until_ready(payload)
        except TimeoutError:
            await process.kill()
            raise ProcessExitedError(f"it was not ready in {within_s:g} s") from None
        except ProcessExitedError:
            # Its end of the socket closes a moment before it can say how it ended.
            await process.kill()
            raise ProcessExitedError(process.exit_reason) from None
        except BaseException:
            await process.kill()
            raise
        process._reader_task = asyncio.create_task(process._dispatch_responses())
        return process

    async def _wait_until_ready(self, payload: Any) -> None:
        self._writer.write(pack_message(payload))
        kind, first, self.is_async = await self._receive_message()
        if kind == LOAD_FAILED:
            raise ConfigError(first)
        assert kind == READY
        self._worker_pid = first

    async def send_request(self, number: int, request: Any) -> tuple[bool, Any]:
        """Whether the handler answered, and its answer or what it raised.

        Raises ProcessEndedError.
        """
        answer = asyncio.get_running_loop().create_future()
        self._pending_responses[number] = answer
        try:
            if self._reader_task is None or self._reader_task.done():
                raise ProcessExitedError(self.exit_reason)
            self._writer.write(pack_message((REQUEST, number, request)))
            return await answer
        finally:
            self._pending_responses.pop(number, None)

    async def cancel_request(self, number: int, *, within_s: float) -> bool:
        """Have an async handler end one call; False if it does not in time."""
        ended = asyncio.get_running_loop().create_future()
        self._pending_responses[number] = ended
        try:
            self._writer.write(pack_message((CANCEL, number, None)))
            async with asyncio.timeout(within_s):
                await ended
        except (TimeoutError, ProcessExitedError):
            return False
        finally:
            self._pending_responses.pop(number, None)
        return True

    async def _dispatch_responses(self) -> None:
        """Hand each reply to who waits for it, until the process is gone."""
        try:
            while True:
                kind, number, answer = await self._receive_message()
                waiting = self._pending_responses.get(number)
                if waiting is not None and not waiting.done():
                    waiting.set_result((kind == RESULT, answer))
        except ProcessExitedError as error:
            self._last_error = str(error)
            self._writer.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._reaper.wait, EXIT_TIMEOUT_S)
            for waiting in self._pending_responses.values():
                if not waiting.done():
                    waiting.set_exception(ProcessExitedError(self.exit_reason))

    async def _receive_message(self) -> Any:
        try:
            size = unpack_length(await self._reader.readexactly(HEADER_BYTES))
            if size > MAX_RESPONSE_BYTES:
                raise ProcessExitedError(
                    f"its answer has {size} bytes, of {MAX_RESPONSE_BYTES} it may"
                )
            return unpickle_response(await self._reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError):
            raise ProcessExitedError(self.exit_reason) from None
        except ProcessExitedError:
            raise
        # There is nothing that a garbled message cannot make of pickle.
        except Exception as error:  # noqa: BLE001
            raise ProcessExitedError(f"its answer cannot be read: {error}") from None

    @property
    def exit_reason(self) -> str:
        """Its exit code, or the signal that ended it, or what was wrong with what it said last."""
        code = self._reaper.poll()
        if self._last_error.startswith("its answer"):
            return self._last_error
        if code is None:
            return "its process ended"
        if code - 128 in signal.valid_signals():
            return f"its process was ended by {signal.Signals(code - 128).name}"
        return f"its process ended with exit code {code}"

    @property
    def pid(self) -> int:
        """The keeper's process: above all that the worker starts."""
        return self._reaper.pid

    def lower_priority(self) -> None:
        """Let all others go first from now on."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.setpriority(os.PRIO_PGRP, self._worker_pid, LOWEST_PRIORITY)

    async def kill(self) -> None:
        """Kill it with everything it started, and wait until all of it is gone."""
        self._writer.close()
        try:
            await asyncio.to_thread(self._reaper.wait, EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            # Stopped, it may be. The worker dies with its keeper.
            self._reaper.kill()
            await asyncio.to_thread(self._reaper.wait)
        # Of a keeper that was killed before its time the worker's own session is left.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self._worker_pid:
                os.killpg(self._worker_pid, signal.SIGKILL)
        if self._reader_task is not None:
            self._reader_task.cancel()
            await asyncio.gather(self._reader_task, return_exceptions=True)
            for waiting in self._pending_responses.values():
                if not waiting.done():
                    waiting.set_exception(ProcessExitedError(self.exit_reason))


_SocketStreams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def _launch_reaper(
    theirs: socket.socket, target: str, ours: socket.socket
) -> "subprocess.Popen[bytes]":
    """A keeper at the other end of `ours`. Who is cancelled meanwhile leaves none behind."""
    launching = asyncio.create_task(asyncio.to_thread(_spawn_reaper, theirs.fileno(), target))
    try:
        return await asyncio.shield(launching)
    except asyncio.CancelledError:
        # The thread goes on to the end of it.
        launched = await launching
        ours.close()
        theirs.close()
        await asyncio.to_thread(launched.wait)
        raise


def _spawn_reaper(number: int, target: str) -> "subprocess.Popen[bytes]":
    """It imports from where this process does, and from no other place."""
    command = [sys.executable, "-P", keeper.__file__, str(number), target, json.dumps(sys.path)]
    return subprocess.Popen(command, pass_fds=[number], stdin=subprocess.DEVNULL)

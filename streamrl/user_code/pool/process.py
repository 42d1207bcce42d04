"""Handle by which the pool starts, calls and kills a worker process, over a socket."""

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
from streamrl.user_code.pool import reaper
from streamrl.user_code.pool.framing import (
    HEADER_BYTES,
    pack_message,
    unpack_length,
    unpickle_response,
)
from streamrl.user_code.pool.worker import CANCEL, LOAD_FAILED, READY, REQUEST, RESULT

EXIT_TIMEOUT_S = 10.0
"""Time for the reaper to kill all descendants; afterwards the pool kills the reaper."""
LOWEST_PRIORITY = 19
MAX_RESPONSE_BYTES = 1 << 28
_BAD_RESPONSE = "worker response"
"""First words of the errors of a response that is too long or cannot be unpickled."""


class ProcessExitedError(Exception):
    """The worker process exited, or sent an unreadable response."""


class WorkerProcess:
    """A worker process, connected by a socket. Create with `start`.

    The worker's parent is a reaper process (reaper.py), which kills all descendants of the worker.
    """

    def __init__(
        self, reaper_process: "subprocess.Popen[bytes]", streams: "_SocketStreams"
    ) -> None:
        self._reaper = reaper_process
        self._reader, self._writer = streams
        self._pending_responses: dict[int, asyncio.Future[tuple[bool, Any]]] = {}
        self._reader_task: asyncio.Task[None] | None = None
        self._worker_pid = 0
        self._last_error = ""
        self.is_async = False

    @classmethod
    async def start(cls, target: str, payload: Any, *, within_s: float) -> "WorkerProcess":
        """Start a worker and wait until the handler is loaded.

        target: "module:function"; the worker calls this function with `payload` to get the handler.
            Raises ConfigError if loading the handler does, and ProcessExitedError if the process
            exits early or is not ready within `within_s` seconds.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            reaper_process = await _launch_reaper(theirs, target, ours)
        process = cls(reaper_process, await asyncio.open_connection(sock=ours))
        try:
            async with asyncio.timeout(within_s):
                await process._wait_until_ready(payload)
        except TimeoutError:
            await process.kill()
            raise ProcessExitedError(f"worker was not ready in {within_s:g} s") from None
        except ProcessExitedError:
            # The socket closes before the exit status is available; kill() waits for the status.
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

    async def send_request(self, call_id: int, request: Any) -> tuple[bool, Any]:
        """Return (True, result) or (False, error of the handler). Raises ProcessExitedError."""
        response = asyncio.get_running_loop().create_future()
        self._pending_responses[call_id] = response
        try:
            if self._reader_task is None or self._reader_task.done():
                raise ProcessExitedError(self.exit_reason)
            self._send_message((REQUEST, call_id, request))
            return await response
        finally:
            self._pending_responses.pop(call_id, None)

    def _send_message(self, message: Any) -> None:
        """Send a message, unless the process is exiting: pending calls then get the exit reason.

        uvloop's transports raise RuntimeError for a write after the other side has closed.
        """
        if not self._writer.is_closing():
            self._writer.write(pack_message(message))

    async def cancel_request(self, call_id: int, *, within_s: float) -> bool:
        """Cancel a call of an async handler; return False if still running after `within_s`."""
        response = asyncio.get_running_loop().create_future()
        self._pending_responses[call_id] = response
        try:
            self._send_message((CANCEL, call_id, None))
            async with asyncio.timeout(within_s):
                await response
        except (TimeoutError, ProcessExitedError):
            return False
        finally:
            self._pending_responses.pop(call_id, None)
        return True

    async def _dispatch_responses(self) -> None:
        """Pass responses to the calls that await them; fail open calls when the process exits."""
        try:
            while True:
                kind, call_id, answer = await self._receive_message()
                future = self._pending_responses.get(call_id)
                if future is not None and not future.done():
                    future.set_result((kind == RESULT, answer))
        except ProcessExitedError as error:
            self._last_error = str(error)
            self._writer.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._reaper.wait, EXIT_TIMEOUT_S)
            self._fail_pending_calls()

    def _fail_pending_calls(self) -> None:
        for future in self._pending_responses.values():
            if not future.done():
                future.set_exception(ProcessExitedError(self.exit_reason))

    async def _receive_message(self) -> Any:
        """Read and unpickle the next message. Raises ProcessExitedError, also if unreadable."""
        try:
            size = unpack_length(await self._reader.readexactly(HEADER_BYTES))
            if size > MAX_RESPONSE_BYTES:
                raise ProcessExitedError(
                    f"{_BAD_RESPONSE} has {size} bytes, the limit is {MAX_RESPONSE_BYTES}"
                )
            return unpickle_response(await self._reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError):
            raise ProcessExitedError(self.exit_reason) from None
        except ProcessExitedError:
            raise
        # Unpickling malformed bytes may raise any exception.
        except Exception as error:  # noqa: BLE001
            raise ProcessExitedError(f"{_BAD_RESPONSE} cannot be read: {error}") from None

    @property
    def exit_reason(self) -> str:
        """Error message: exit code, signal or unreadable response that ended the worker."""
        code = self._reaper.poll()
        if self._last_error.startswith(_BAD_RESPONSE):
            return self._last_error
        if code is None:
            return "worker process exited"
        if code - 128 in signal.valid_signals():
            return f"worker process was killed by {signal.Signals(code - 128).name}"
        return f"worker process exited with code {code}"

    @property
    def has_exited(self) -> bool:
        """True once the socket is closed; the exit status may follow a little later."""
        is_reading = self._reader_task is not None and not self._reader_task.done()
        return not is_reading or self._writer.is_closing()

    @property
    def pid(self) -> int:
        """Pid of the reaper, the root of the worker's process tree."""
        return self._reaper.pid

    def lower_priority(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.setpriority(os.PRIO_PGRP, self._worker_pid, LOWEST_PRIORITY)

    async def kill(self) -> None:
        """Kill the worker and all its descendants, and wait until they have exited."""
        self._writer.close()
        try:
            await asyncio.to_thread(self._reaper.wait, EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            # The reaper may be stopped (SIGSTOP). Its death kills the worker (PR_SET_PDEATHSIG).
            self._reaper.kill()
            await asyncio.to_thread(self._reaper.wait)
        # A reaper killed early leaves the worker's session behind.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self._worker_pid:
                os.killpg(self._worker_pid, signal.SIGKILL)
        if self._reader_task is not None:
            self._reader_task.cancel()
            await asyncio.gather(self._reader_task, return_exceptions=True)
            self._fail_pending_calls()


_SocketStreams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def _launch_reaper(
    theirs: socket.socket, target: str, ours: socket.socket
) -> "subprocess.Popen[bytes]":
    """Start a reaper, which starts the worker; if cancelled, wait for the reaper's exit."""
    launching = asyncio.create_task(asyncio.to_thread(spawn_reaper, theirs.fileno(), target))
    try:
        return await asyncio.shield(launching)
    except asyncio.CancelledError:
        # A thread cannot be cancelled: wait for the process that it spawns.
        reaper_process = await launching
        ours.close()
        theirs.close()
        await asyncio.to_thread(reaper_process.wait)
        raise


def spawn_reaper(fd: int, target: str) -> "subprocess.Popen[bytes]":
    """Start a reaper and its worker, which serves the socket `fd`."""
    # -P and sys.path: the child imports from the same folders as this process, and no others.
    command = [sys.executable, "-P", reaper.__file__, str(fd), target, json.dumps(sys.path)]
    # Every worker hashes text alike: code that iterates over a set of words is reproducible.
    env = {**os.environ, "PYTHONHASHSEED": "0"}
    # A session of its own: who kills a process group must leave the reaper to kill the rest.
    return subprocess.Popen(
        command, pass_fds=[fd], stdin=subprocess.DEVNULL, env=env, start_new_session=True
    )

"""Handle by which the pool starts, calls and kills a worker process, over a socket."""

import asyncio
import contextlib
import io
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
from typing import Any

from streamrl.errors import ConfigError
from streamrl.user_code.pool import reaper
from streamrl.user_code.pool.background_tasks import run_to_end
from streamrl.user_code.pool.worker import (
    CANCEL,
    HEADER,
    LOAD_FAILED,
    READY,
    REQUEST,
    RESULT,
    pack_message,
)

EXIT_TIMEOUT_S = 10.0
"""Time for the reaper to kill all descendants; afterwards the pool kills the reaper."""
LOWEST_PRIORITY = 19
MAX_RESPONSE_BYTES = 1 << 28
_ALLOWED_CLASSES = frozenset(
    {
        ("streamrl.environments.hosts.host_protocol", "EnvironmentDescription"),
        ("streamrl.environments.hosts.host_protocol", "HostResponse"),
        ("streamrl.environments.interface", "CallOutcome"),
        ("streamrl.environments.interface", "EnvironmentStep"),
        ("streamrl.environments.interface", "ResetResult"),
        ("streamrl.user_code.reward_function", "FunctionCallSpec"),
        ("streamrl.user_code.reward_result", "RewardResult"),
        ("streamrl.user_code.reward_result", "RewardOutcome"),
        ("streamrl.user_code.service_gate", "Outage"),
    }
)
"""Classes allowed in responses of workers, as (module, class name)."""


class _RestrictedUnpickler(pickle.Unpickler):
    """Unpickler for plain data and _ALLOWED_CLASSES.

    A worker runs untrusted code: a response must not execute anything in the pool's process.
    """

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED_CLASSES:
            raise pickle.UnpicklingError(f"{module}.{name} is not an allowed class")
        return super().find_class(module, name)


def unpickle_response(body: bytes) -> Any:
    """Unpickle plain data and _ALLOWED_CLASSES. Malformed bytes may raise any exception."""
    return _RestrictedUnpickler(io.BytesIO(body)).load()


class ProcessExitedError(Exception):
    """The process exited, did not start, or sent an unreadable response."""


class WorkerProcess:
    """A worker process, connected by a socket. Create with `start`.

    The worker's parent is a reaper process (reaper.py), which kills all descendants of the worker.
    """

    def __init__(
        self,
        reaper_process: "subprocess.Popen[bytes]",
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    ) -> None:
        self._reaper = reaper_process
        self._reader, self._writer = streams
        self._pending_responses: dict[int, asyncio.Future[tuple[bool, Any]]] = {}
        self._reader_task: asyncio.Task[None] | None = None
        self._worker_pid = 0
        self._bad_response = ""
        self.is_async = False

    @classmethod
    async def start(cls, target: str, payload: Any, within_s: float) -> "WorkerProcess":
        """Start a worker and wait until the handler is loaded.

        target: "module:function"; the worker calls this function with `payload` to get the handler.
            Raises ConfigError if loading the handler does, and ProcessExitedError if the process
            exits early or is not ready within `within_s` seconds.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            streams = await asyncio.open_connection(sock=ours)
            process = cls(spawn_reaper(theirs.fileno(), target), streams)
        try:
            async with asyncio.timeout(within_s):
                await process._wait_until_ready(payload)
        except BaseException as error:
            # The socket closes before the exit status is available; kill() waits for the status.
            await run_to_end(process.kill())
            if isinstance(error, TimeoutError):
                raise ProcessExitedError(f"worker was not ready in {within_s:g} s") from None
            if isinstance(error, ProcessExitedError):
                raise ProcessExitedError(process.exit_reason) from None
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
        if self._reader_task is None or self._reader_task.done():
            raise ProcessExitedError(self.exit_reason)
        return await self._await_response(call_id, (REQUEST, call_id, request))

    async def cancel_request(self, call_id: int, *, within_s: float) -> bool:
        """Cancel a call of an async handler; return False if still running after `within_s`."""
        try:
            async with asyncio.timeout(within_s):
                await self._await_response(call_id, (CANCEL, call_id, None))
        except (TimeoutError, ProcessExitedError):
            return False
        return True

    async def _await_response(self, call_id: int, message: Any) -> tuple[bool, Any]:
        response = asyncio.get_running_loop().create_future()
        self._pending_responses[call_id] = response
        try:
            # A process that is exiting gets no message: pending calls then get the exit reason.
            # uvloop's transports raise RuntimeError for a write after the other side has closed.
            if not self._writer.is_closing():
                self._writer.write(pack_message(message))
            return await response
        finally:
            self._pending_responses.pop(call_id, None)

    async def _dispatch_responses(self) -> None:
        """Pass responses to the calls that await them; fail open calls when the process exits."""
        try:
            while True:
                kind, call_id, answer = await self._receive_message()
                future = self._pending_responses.get(call_id)
                if future is not None and not future.done():
                    future.set_result((kind == RESULT, answer))
        except ProcessExitedError:
            self._writer.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._reaper.wait, EXIT_TIMEOUT_S)
            self._fail_pending_calls()

    def _fail_pending_calls(self) -> None:
        for future in self._pending_responses.values():
            if not future.done():
                future.set_exception(ProcessExitedError(self.exit_reason))

    async def _receive_message(self) -> tuple[Any, Any, Any]:
        """Read and unpickle the next message. Raises ProcessExitedError, also if unreadable."""
        try:
            (size,) = HEADER.unpack(await self._reader.readexactly(HEADER.size))
            if size > MAX_RESPONSE_BYTES:
                raise ValueError(f"{size} bytes, the limit is {MAX_RESPONSE_BYTES}")
            kind, first, second = unpickle_response(await self._reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError):
            raise ProcessExitedError from None
        # Unpickling malformed bytes may raise any exception.
        except Exception as error:  # noqa: BLE001
            self._bad_response = f"worker response cannot be read: {error}"
            raise ProcessExitedError from None
        return kind, first, second

    @property
    def exit_reason(self) -> str:
        """Error message: exit code, signal or unreadable response that ended the worker."""
        code = self._reaper.poll()
        if self._bad_response:
            return self._bad_response
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

"""Worker process for callers without an event loop, such as threads that read data."""

import contextlib
import socket
import subprocess
import threading
import time
from typing import Any

from streamrl.errors import ConfigError
from streamrl.process_pool.framing import (
    HEADER_BYTES,
    pack_message,
    unpack_length,
    unpickle_response,
)
from streamrl.process_pool.pool import (
    START_TIMEOUT_S,
    WorkerCrashError,
    WorkerError,
    WorkerTimeoutError,
)
from streamrl.process_pool.process import EXIT_TIMEOUT_S, spawn_reaper
from streamrl.process_pool.worker import LOAD_FAILED, REQUEST, RESULT

IDLE_TIMEOUT_S = 30.0
"""Time without a call after which the process ends; the next call starts another."""


class BlockingWorker:
    """A worker process that starts with the first call and runs one call at a time.

    target: "module:function"; the worker calls this function with `payload` to get its handler.
    timeout_s: deadline of a call. The process dies with this one. Calls may come from any thread.
    """

    def __init__(self, target: str, payload: Any, *, timeout_s: float) -> None:
        self._target = target
        self._payload = payload
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._reaper: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._last_used = 0.0

    def call(self, request: Any) -> Any:
        """Run a request in the worker and return the handler's result.

        Raises ConfigError if loading the handler does, and WorkerError: if the handler raised, the
        process exited, or the deadline passed, which ends the process.
        """
        with self._lock:
            self._last_used = time.monotonic()
            try:
                if self._channel is None:
                    self._start()
                kind, _, answer = self._exchange((REQUEST, 0, request), self._timeout_s)
            except TimeoutError:
                self._end()
                raise WorkerTimeoutError(f"no result in {self._timeout_s:g} s") from None
            except (EOFError, ConnectionError):
                raise WorkerCrashError(f"worker process exited with code {self._end()}") from None
            except BaseException:
                # A caller that was interrupted leaves a response behind that no one reads.
                self._end()
                raise
        if kind != RESULT:
            raise WorkerError(answer)
        return answer

    def close(self) -> None:
        """End the process; a later call starts another."""
        with self._lock:
            self._end()

    def _start(self) -> None:
        self._channel, theirs = socket.socketpair()
        with theirs:
            self._reaper = spawn_reaper(theirs.fileno(), self._target)
        try:
            kind, first, _ = self._exchange(self._payload, START_TIMEOUT_S)
        except TimeoutError:
            self._end()
            raise WorkerCrashError(f"worker was not ready in {START_TIMEOUT_S:g} s") from None
        if kind == LOAD_FAILED:
            raise ConfigError(first)
        threading.Thread(target=self._end_when_idle, args=[self._channel], daemon=True).start()

    def _exchange(self, message: Any, timeout_s: float) -> Any:
        """Send a message and return the next one. Raises TimeoutError, EOFError, OSError."""
        assert self._channel is not None
        deadline = time.monotonic() + timeout_s
        self._channel.settimeout(timeout_s)
        self._channel.sendall(pack_message(message))
        size = unpack_length(self._receive(HEADER_BYTES, deadline))
        return unpickle_response(self._receive(size, deadline))

    def _receive(self, size: int, deadline: float) -> bytes:
        assert self._channel is not None
        data = bytearray()
        while len(data) < size:
            # A timeout of 0 would mean a socket that does not wait.
            self._channel.settimeout(max(deadline - time.monotonic(), 1e-3))
            part = self._channel.recv(size - len(data))
            if not part:
                raise EOFError
            data += part
        return bytes(data)

    def _end_when_idle(self, channel: socket.socket) -> None:
        """End the process that serves `channel` once no call has come for IDLE_TIMEOUT_S."""
        while True:
            with self._lock:
                if self._channel is not channel:
                    return
                rest_s = self._last_used + IDLE_TIMEOUT_S - time.monotonic()
                if rest_s <= 0:
                    self._end()
                    return
            time.sleep(rest_s)

    def _end(self) -> int | None:
        """End the process; return the exit code of the worker, None if there is no process."""
        if self._channel is None or self._reaper is None:
            return None
        channel, reaper = self._channel, self._reaper
        self._channel = self._reaper = None
        with contextlib.suppress(OSError):
            channel.close()
        try:
            return reaper.wait(EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            # A stopped reaper (SIGSTOP). Its death kills the worker.
            reaper.kill()
            return reaper.wait()

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
from streamrl.process_pool.framing import HEADER_BYTES, length, pack, read_answer
from streamrl.process_pool.worker import ANSWER, ASK, CANCEL, READY, REFUSED

END_S = 10.0
"""A keeper has this long to end everything, s; then it is killed too."""
LOWEST_PRIORITY = 19
MOST_BYTES = 1 << 28
"""Most bytes of one answer."""


class ProcessEndedError(Exception):
    """The process ended."""


class Process:
    """A keeper and its worker, at the other end of a socket."""

    def __init__(self, keeper: "subprocess.Popen[bytes]", streams: "_Streams") -> None:
        self._keeper = keeper
        self._reader, self._writer = streams
        self._answers: dict[int, asyncio.Future[tuple[bool, Any]]] = {}
        self._reading: asyncio.Task[None] | None = None
        self._worker_pid = 0
        self._said_last = ""
        self.is_async = False

    @classmethod
    async def start(cls, target: str, payload: Any, *, within_s: float) -> "Process":
        """A worker that has loaded what it serves with. Raises ConfigError as the load does.

        Raises ProcessEndedError if the process ends before, or is not ready within so many seconds.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            launched = await _launched(theirs, target, ours)
        process = cls(launched, await asyncio.open_connection(sock=ours))
        try:
            async with asyncio.timeout(within_s):
                await process._get_ready(payload)
        except TimeoutError:
            await process.end()
            raise ProcessEndedError(f"it was not ready in {within_s:g} s") from None
        except ProcessEndedError:
            # Its end of the socket closes a moment before it can say how it ended.
            await process.end()
            raise ProcessEndedError(process.how_it_ended) from None
        except BaseException:
            await process.end()
            raise
        process._reading = asyncio.create_task(process._read())
        return process

    async def _get_ready(self, payload: Any) -> None:
        self._writer.write(pack(payload))
        kind, first, self.is_async = await self._receive()
        if kind == REFUSED:
            raise ConfigError(first)
        assert kind == READY
        self._worker_pid = first

    async def ask(self, number: int, request: Any) -> tuple[bool, Any]:
        """Whether the handler answered, and its answer or what it raised.

        Raises ProcessEndedError.
        """
        answer = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        try:
            if self._reading is None or self._reading.done():
                raise ProcessEndedError(self.how_it_ended)
            self._writer.write(pack((ASK, number, request)))
            return await answer
        finally:
            self._answers.pop(number, None)

    async def cancel(self, number: int, *, within_s: float) -> bool:
        """Have an async handler end one call; False if it does not in time."""
        ended = asyncio.get_running_loop().create_future()
        self._answers[number] = ended
        try:
            self._writer.write(pack((CANCEL, number, None)))
            async with asyncio.timeout(within_s):
                await ended
        except (TimeoutError, ProcessEndedError):
            return False
        finally:
            self._answers.pop(number, None)
        return True

    async def _read(self) -> None:
        """Hand each reply to who waits for it, until the process is gone."""
        try:
            while True:
                kind, number, answer = await self._receive()
                waiting = self._answers.get(number)
                if waiting is not None and not waiting.done():
                    waiting.set_result((kind == ANSWER, answer))
        except ProcessEndedError as error:
            self._said_last = str(error)
            self._writer.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._keeper.wait, END_S)
            for waiting in self._answers.values():
                if not waiting.done():
                    waiting.set_exception(ProcessEndedError(self.how_it_ended))

    async def _receive(self) -> Any:
        try:
            size = length(await self._reader.readexactly(HEADER_BYTES))
            if size > MOST_BYTES:
                raise ProcessEndedError(f"its answer has {size} bytes, of {MOST_BYTES} it may")
            return read_answer(await self._reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError):
            raise ProcessEndedError(self.how_it_ended) from None
        except ProcessEndedError:
            raise
        # There is nothing that a garbled message cannot make of pickle.
        except Exception as error:  # noqa: BLE001
            raise ProcessEndedError(f"its answer cannot be read: {error}") from None

    @property
    def how_it_ended(self) -> str:
        """Its exit code, or the signal that ended it, or what was wrong with what it said last."""
        code = self._keeper.poll()
        if self._said_last.startswith("its answer"):
            return self._said_last
        if code is None:
            return "its process ended"
        if code - 128 in signal.valid_signals():
            return f"its process was ended by {signal.Signals(code - 128).name}"
        return f"its process ended with exit code {code}"

    @property
    def pid(self) -> int:
        """The keeper's process: above all that the worker starts."""
        return self._keeper.pid

    def step_back(self) -> None:
        """Let all others go first from now on."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.setpriority(os.PRIO_PGRP, self._worker_pid, LOWEST_PRIORITY)

    async def end(self) -> None:
        """Kill it with everything it started, and wait until all of it is gone."""
        self._writer.close()
        try:
            await asyncio.to_thread(self._keeper.wait, END_S)
        except subprocess.TimeoutExpired:
            # Stopped, it may be. The worker dies with its keeper.
            self._keeper.kill()
            await asyncio.to_thread(self._keeper.wait)
        # Of a keeper that was killed before its time the worker's own session is left.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self._worker_pid:
                os.killpg(self._worker_pid, signal.SIGKILL)
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
            for waiting in self._answers.values():
                if not waiting.done():
                    waiting.set_exception(ProcessEndedError(self.how_it_ended))


_Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def _launched(
    theirs: socket.socket, target: str, ours: socket.socket
) -> "subprocess.Popen[bytes]":
    """A keeper at the other end of `ours`. Who is cancelled meanwhile leaves none behind."""
    launching = asyncio.create_task(asyncio.to_thread(_launch, theirs.fileno(), target))
    try:
        return await asyncio.shield(launching)
    except asyncio.CancelledError:
        # The thread goes on to the end of it.
        launched = await launching
        ours.close()
        theirs.close()
        await asyncio.to_thread(launched.wait)
        raise


def _launch(number: int, target: str) -> "subprocess.Popen[bytes]":
    """It imports from where this process does, and from no other place."""
    command = [sys.executable, "-P", keeper.__file__, str(number), target, json.dumps(sys.path)]
    return subprocess.Popen(command, pass_fds=[number], stdin=subprocess.DEVNULL)

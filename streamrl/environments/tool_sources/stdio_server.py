"""MCP server in a process that talks over stdin and stdout, as a transport of the package `mcp`."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from streamrl.environments.tool_calls.reply_text import replace_surrogates
from streamrl.environments.tool_sources import stdio_supervisor
from streamrl.files.bounded_read import MIB

INHERITED_VARIABLES = ("PATH", "HOME", "LANG")
MAX_MESSAGE_BYTES = 64 * MIB
"""Limit of a server's message: a guard for the memory of the host, far above any context window."""
MAX_ERROR_BYTES = 4096
EXIT_TIMEOUT_S = 5.0
LAST_WORDS_S = 0.5
"""Time after the end of stdout in which the end of stderr, with the reason, may follow."""


class StdioServer:
    """Process of a server, with all processes that it starts.

    The package's own stdio client inherits more of the environment, gives no way to kill the server
    at once, and leaves processes that are no longer in its process group.

    has_ended: the server has closed its stdout, as at its exit.
    """

    def __init__(self, command: Sequence[str], variables: Sequence[str]) -> None:
        self._command = command
        self._variables = variables
        self._process: asyncio.subprocess.Process | None = None
        self.has_ended = False
        self._errors = b""
        self._has_no_more_errors = asyncio.Event()

    @property
    def last_error(self) -> str:
        """Last line that the server wrote to stderr, and its exit code; "" if there is neither."""
        lines = self._errors.decode(errors="replace").strip().splitlines()
        if self._process is not None and self._process.returncode is not None:
            lines.append(", ".join([*lines[-1:], f"exit code {self._process.returncode}"]))
        return lines[-1].strip() if lines else ""

    def kill(self) -> None:
        """Begin to kill all processes of the server."""
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Any]:
        """Start the server; yield streams for messages from it and to it; kill it at the end."""
        import anyio
        from mcp.shared.message import SessionMessage

        self._process = process = await self._start_process()
        assert process.stdin and process.stdout and process.stderr
        incoming_writer, incoming = anyio.create_memory_object_stream[SessionMessage | Exception]()
        outgoing, outgoing_reader = anyio.create_memory_object_stream[SessionMessage]()
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._receive, process.stdout, incoming_writer)
                tasks.start_soon(self._send, outgoing_reader, process.stdin)
                tasks.start_soon(self._read_errors, process.stderr)
                try:
                    yield incoming, outgoing
                finally:
                    tasks.cancel_scope.cancel()
        finally:
            await self._end_process()

    async def _start_process(self) -> asyncio.subprocess.Process:
        names = [*INHERITED_VARIABLES, *self._variables]
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", stdio_supervisor.__file__, *self._command),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={name: os.environ[name] for name in names if name in os.environ},
            start_new_session=True,
        )

    async def _end_process(self) -> None:
        self.kill()
        assert self._process is not None
        try:
            async with asyncio.timeout(EXIT_TIMEOUT_S):
                await self._process.wait()
        except TimeoutError:
            # A process that cannot be killed yet, as on a dead network disk.
            self._process.kill()

    async def _receive(self, stdout: asyncio.StreamReader, messages: Any) -> None:
        """Parse the lines of stdout as messages, until it ends."""
        import anyio

        buffer = bytearray()
        async with messages:
            while chunk := await stdout.read(1 << 16):
                begin = len(buffer)
                buffer += chunk
                if b"\n" not in chunk:
                    if len(buffer) > MAX_MESSAGE_BYTES:
                        self._errors = b"a message exceeds %d MiB" % (MAX_MESSAGE_BYTES // MIB)
                        return
                    continue
                end = buffer.rindex(b"\n", begin)
                for message in _parse_messages(bytes(buffer[:end])):
                    try:
                        await messages.send(message)
                    except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                        return
                del buffer[: end + 1]
            self.has_ended = True
            with anyio.move_on_after(LAST_WORDS_S):
                await self._has_no_more_errors.wait()

    async def _send(self, messages: Any, stdin: asyncio.StreamWriter) -> None:
        async with messages:
            async for message in messages:
                text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
                stdin.write(text.encode() + b"\n")
                try:
                    await stdin.drain()
                except ConnectionError:
                    # The server is gone; `_receive` ends the session.
                    return

    async def _read_errors(self, stderr: asyncio.StreamReader) -> None:
        while chunk := await stderr.read(1 << 16):
            self._errors = (self._errors + chunk)[-MAX_ERROR_BYTES:]
        self._has_no_more_errors.set()


def _parse_messages(data: bytes) -> Iterator[Any]:
    """Yield the messages in whole lines; skip lines that are none, such as prints of the server."""
    from mcp.shared.message import SessionMessage
    from mcp_types import jsonrpc_message_adapter

    for line in data.split(b"\n"):
        try:
            yield SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
        except ValueError:
            # pydantic refuses lone surrogates, which JSON can write as \ud800.
            try:
                value = json.loads(line.decode(errors="replace"))
                text = replace_surrogates(json.dumps(value, ensure_ascii=False))
                yield SessionMessage(jsonrpc_message_adapter.validate_json(text, by_name=False))
            except ValueError:
                continue

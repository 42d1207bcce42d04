"""Tools of an MCP server: a session of each episode, with the client of the package `mcp`."""

import asyncio
import contextlib
import json
import logging
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any

import httpx2
from mcp import Client, MCPError, StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp_types import (
    CONNECTION_CLOSED,
    CallToolResult,
    EmbeddedResource,
    TextContent,
    TextResourceContents,
    Tool,
)

from streamrl.environments.config import ToolConfig
from streamrl.environments.interface import CallOutcome, ToolSchema
from streamrl.environments.tool_calls.reply_text import format_tool_result
from streamrl.environments.tool_calls.schema_check import check_tool_schema
from streamrl.environments.tool_calls.tool_schema import get_tool_name
from streamrl.environments.tool_sources.python_tools import ToolAnswer
from streamrl.errors import ConfigError, EpisodeError, EpisodeOutageError
from streamrl.files.typed_settings import suggest_nearest
from streamrl.user_code.pool.background_tasks import BackgroundTasks
from streamrl.user_code.service_gate import describe_failure, is_outage

CONNECT_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 300.0
"""Longest silence of a server on an open connection; calls have deadlines of their own."""
CLOSE_TIMEOUT_S = 4.0
EXIT_LINE = "streamrl: exit code "
"""Start of the line that follows a server's last; a server's own lines begin otherwise."""
RUN_COMMAND = f"""
sh -c 'echo $$ >&2; exec "$0" "$@"' "$0" "$@"
printf "\\n{EXIT_LINE}%d" $? >&2
kill -KILL 0
"""
"""Shell script that runs its arguments, then kills what they have left in its process group.

stderr begins with the pid of their process and ends with its exit code: nothing else shows these.
"""
MAX_ERROR_BYTES = 4096
RESTARTED = "the server has been stopped: what it kept of earlier calls is lost"


def read_headers(config: ToolConfig) -> dict[str, str]:
    """Return HTTP headers with the values of environment variables. Raises ConfigError."""
    missing = [name for name in config.headers_env.values() if not os.environ.get(name)]
    if missing:
        raise ConfigError(
            f"{config.label}: headers_env: the environment variables {', '.join(missing)} are not"
            " set, or empty"
        )
    return {header: os.environ[name] for header, name in config.headers_env.items()}


class McpSession:
    """Open session with a server. Create with `start`.

    The process of a `command` is killed at its end, with those that it started in its process
    group. Any others end with the host process.

    The scopes of anyio in the package `mcp` may be left only by the task that entered them.
    Therefore a task of its own enters and leaves them; calls come from any task.
    """

    def __init__(self, config: ToolConfig) -> None:
        self._config = config
        self._client: Client | None = None
        self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115 - open as long as the session
        self._closing = asyncio.Event()
        self._opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._failure, self._refusal, self._is_out = "", 0, False
        self._calls = BackgroundTasks()
        self._owner = asyncio.create_task(self._keep_open())

    @classmethod
    async def start(cls, config: ToolConfig) -> "McpSession":
        """Open a session. Raises EpisodeError if the server does not start or answer."""
        session = cls(config)
        try:
            await asyncio.wait(
                {session._opened, session._owner}, return_when=asyncio.FIRST_COMPLETED
            )
        except asyncio.CancelledError:
            await session.close()
            raise
        if not session._opened.done():
            raise await session._make_error("does not start")
        return session

    async def _keep_open(self) -> None:
        try:
            async with Client(self._connect(), cache=None) as client:
                self._client = client
                self._opened.set_result(None)
                await self._closing.wait()
                self._kill_process()
        # The package raises what its tasks met, also in groups: any of it ends the session.
        except Exception as error:  # noqa: BLE001
            has_lost_session = self._opened.done() and self._refusal == HTTPStatus.NOT_FOUND
            self._is_out = bool(self._config.url) and (is_outage(error) or has_lost_session)
            while isinstance(error, ExceptionGroup):
                error = error.exceptions[0]
            if not (isinstance(error, MCPError) and error.code == CONNECTION_CLOSED):
                self._failure = describe_failure(error)
        finally:
            self._kill_process()

    def _read_stderr(self) -> tuple[str, str, str]:
        """Return a server's pid, its last line and its exit code; "" for what is not there.

        The file is shared with it, so that a seek would harm.
        """
        file = self._stderr.fileno()
        pid = os.pread(file, MAX_ERROR_BYTES, 0).decode(errors="replace").partition("\n")[0]
        end = os.pread(file, MAX_ERROR_BYTES, max(0, os.fstat(file).st_size - MAX_ERROR_BYTES))
        lines = [line.strip() for line in end.decode(errors="replace").split("\n") if line.strip()]
        code = lines.pop() if lines and lines[-1].startswith(EXIT_LINE) else ""
        return pid, lines[-1] if len(lines) > 1 else "", code.partition(": ")[2]

    def _kill_process(self) -> None:
        """Kill the process of a command, unless it has ended; the package would wait 2 s for it."""
        pid, _, code = self._read_stderr()
        if pid and not code:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    @asynccontextmanager
    async def _connect(self) -> AsyncIterator[Any]:
        """Yield streams for messages from the server and to it."""
        config = self._config
        if config.command:
            names = ("LANG", *config.env)
            parameters = StdioServerParameters(
                command="sh",
                args=["-c", RUN_COMMAND, *config.command],
                env={name: os.environ[name] for name in names if name in os.environ},
                encoding_error_handler="replace",
            )
            async with stdio_client(parameters, errlog=self._stderr) as streams:
                yield streams
            return
        # Without the environment: it may name a proxy, and .netrc has passwords for other hosts.
        client = httpx2.AsyncClient(
            headers=read_headers(config),
            timeout=httpx2.Timeout(CONNECT_TIMEOUT_S, read=READ_TIMEOUT_S),
            trust_env=False,
            event_hooks={"response": [self._check_response]},
        )
        async with client, streamable_http_client(config.url, http_client=client) as streams:
            yield streams

    async def _check_response(self, response: httpx2.Response) -> None:
        """End the session if the server refuses a request, as after it has lost the session.

        The package would report that like an error of the tool. Only with status 400 may a server
        that goes on answer a call. Before the session is open, refusals of requests belong to the
        negotiation of the protocol's version.
        """
        status = response.status_code
        is_json = response.headers.get("content-type", "").startswith("application/json")
        is_open = self._opened.done()
        least = HTTPStatus.BAD_REQUEST if is_open else HTTPStatus.INTERNAL_SERVER_ERROR
        is_answer = status == HTTPStatus.BAD_REQUEST and is_json
        if response.request.method == "POST" and status >= least and not is_answer:
            self._refusal = status
            response.raise_for_status()

    async def list_tools(self) -> Sequence[ToolSchema]:
        """Return the schemas of the server's tools. Raises EpisodeError."""
        assert self._client is not None
        tools: list[Tool] = []
        cursor = None
        try:
            while True:  # a list without end ends at the caller's deadline
                page = await self._request(self._client.list_tools(cursor=cursor), "list of tools")
                tools += page.tools
                cursor = page.next_cursor
                if cursor is None:
                    return [_make_schema(tool) for tool in tools]
        except MCPError as error:
            raise EpisodeError(f"{self._config.label}: list of tools: {error.message}") from error

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolAnswer:
        """Call a tool. Raises EpisodeError if the server ends, or breaks the protocol."""
        if self._owner.done():
            raise await self._make_error("ended")
        assert self._client is not None
        try:
            result = await self._request(self._client.call_tool(name, dict(arguments)), name)
        except MCPError as error:
            return ToolAnswer(format_tool_result(f"error: {error.message}"), CallOutcome.TOOL_ERROR)
        outcome = CallOutcome.TOOL_ERROR if result.is_error else CallOutcome.OK
        return ToolAnswer(format_tool_result(format_content(result)), outcome)

    async def _request(self, request: Any, purpose: str) -> Any:
        """Wait for an answer of the server, or its end.

        Raises MCPError, if the server answers with an error, and EpisodeError.
        """
        answering = self._calls.spawn(request)
        try:
            await asyncio.wait({answering, self._owner}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                raise await self._make_error("ended")
            return answering.result()
        except MCPError as error:
            if error.code != CONNECTION_CLOSED:
                raise
            raise await self._make_error("ended") from error
        except (RuntimeError, ValueError) as error:
            # The package checks results against the schema that the server has declared.
            raise EpisodeError(f"{self._config.label}: {purpose}: {error}") from error
        finally:
            answering.cancel()

    async def _make_error(self, event: str) -> EpisodeError:
        """Build the error of a session that has ended: last line of stderr, failure or exit code.

        The session is closed first: then the reason is known. A server may write to stderr what
        has nothing to do with its end.
        """
        await self.close()
        _, last, code = self._read_stderr()
        reason = ", ".join(filter(None, (last, self._failure or code))) or "it has ended"
        kind = EpisodeOutageError if self._is_out else EpisodeError
        return kind(f"{self._config.label}: {event}: {reason}")

    async def close(self) -> None:
        """Close the session, and kill the server's process."""
        self._closing.set()
        if self._client is None:
            self._kill_process()
            self._owner.cancel()
        _, late = await asyncio.wait({self._owner}, timeout=CLOSE_TIMEOUT_S)
        for owner in late:  # a server at a URL does not answer the last message
            owner.cancel()
            await asyncio.wait({owner}, timeout=CLOSE_TIMEOUT_S)


def _make_schema(tool: Tool) -> ToolSchema:
    described = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description:
        described["description"] = tool.description
    return {"type": "function", "function": described}


def format_content(result: CallToolResult) -> str:
    """Return the content of a result as text; content that is no text is named."""
    if not result.content and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(_format_blocks(result))


def _format_blocks(result: CallToolResult) -> Iterator[str]:
    for block in result.content:
        if isinstance(block, TextContent):
            yield block.text
        elif isinstance(block, EmbeddedResource) and isinstance(
            block.resource, TextResourceContents
        ):
            yield block.resource.text
        else:
            yield f"[{block.type}]"


class McpTools:
    """Source of the tools of a server (ToolSource); each episode has a session of its own."""

    def __init__(self, config: ToolConfig) -> None:
        # It logs a traceback for each line of a server that is no message.
        logging.getLogger("mcp.client.stdio").setLevel(logging.CRITICAL)
        self.label = config.label
        self.config = config
        # A Python server starts in about 2 s of one core: all at once, all would be late.
        self._starts = asyncio.Semaphore(len(os.sched_getaffinity(0)))

    async def check(self) -> None:
        """Raise ConfigError without the command, or a variable that it or a header needs."""
        for name in self.config.env:
            if name not in os.environ:
                raise ConfigError(f"{self.label}: env: {name} is not set in the environment")
        if self.config.command and shutil.which(self.config.command[0]) is None:
            raise ConfigError(f"{self.label}: no program {self.config.command[0]} is found")
        read_headers(self.config)

    async def list_tools(self, deadline: float) -> Sequence[ToolSchema]:
        async with self._limit_time(deadline):
            session = await self.start_session()
            try:
                tools = await session.list_tools()
            finally:
                await session.close()
        for tool in tools:
            check_tool_schema(tool, place=self.label)
        by_name = {get_tool_name(tool): tool for tool in tools}
        for name in self.config.only:
            if name not in by_name:
                hint = suggest_nearest(name, by_name, noun="tool")
                raise ConfigError(
                    f"{self.label}: only: {name}: the server has no such tool; {hint}"
                )
        return [by_name[name] for name in self.config.only or by_name]

    async def open(self, deadline: float) -> "McpEpisode":
        async with self._limit_time(deadline):
            starting = asyncio.create_task(self.start_session())
            await starting
        return McpEpisode(self, starting)

    @asynccontextmanager
    async def _limit_time(self, deadline: float) -> AsyncIterator[None]:
        """Raise EpisodeError if the server has not answered its first messages in time."""
        try:
            async with asyncio.timeout_at(deadline):
                yield
        except TimeoutError:
            kind = EpisodeOutageError if self.config.url else EpisodeError
            raise kind(f"{self.label}: not ready in time") from None

    async def start_session(self) -> McpSession:
        """Start a server's process, if it has one, and a session. Raises EpisodeError."""
        async with self._starts:
            return await McpSession.start(self.config)


class McpEpisode:
    """Tools of an episode (ToolSession); a call that was given up costs them their server.

    The next server is started at once, while the policy samples. A call that comes too early and
    reaches its deadline leaves the start to the next call: a server may take longer to start than
    a call may take.
    """

    def __init__(self, source: McpTools, starting: asyncio.Task[McpSession]) -> None:
        self._source = source
        self._starting = starting
        self._closing = BackgroundTasks()
        self.url = source.config.url
        self.timeout_note = "" if self.url else RESTARTED

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolAnswer:
        starting = self._starting
        session = await asyncio.shield(starting)
        try:
            return await session.call(name, arguments)
        except asyncio.CancelledError:
            # It might go on with the call, and the next one would wait behind it.
            if not self.url and self._starting is starting:
                self._closing.spawn(session.close())
                self._starting = asyncio.create_task(self._source.start_session())
            raise

    async def close(self) -> None:
        self._starting.cancel()  # unless it has ended
        (started,) = await asyncio.gather(self._starting, return_exceptions=True)
        if isinstance(started, McpSession):
            await started.close()
        await self._closing.drain()

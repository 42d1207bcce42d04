"""Tools of an MCP server: a session of each episode, and servers that episodes share in turn."""

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from streamrl.environments.interface import CallOutcome, ToolSchema
from streamrl.environments.tool_calls.reply_text import format_tool_result
from streamrl.environments.tool_calls.tool_schema import check_tool_schema, get_tool_name
from streamrl.environments.tool_config import ToolConfig
from streamrl.environments.tool_sources.stdio_server import MAX_MESSAGE_BYTES, StdioServer
from streamrl.environments.tool_sources.tool_source import ToolAnswer
from streamrl.errors import ConfigError, EpisodeError, EpisodeOutageError
from streamrl.files.typed_settings import suggest_nearest
from streamrl.user_code.pool.background_tasks import BackgroundTasks
from streamrl.user_code.service_gate import UNAVAILABLE_STATUSES, is_outage

if TYPE_CHECKING:
    import httpx2
    from mcp import Client
    from mcp_types import CallToolResult, ContentBlock

CONNECT_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 300.0
"""Longest silence of a server on an open connection; calls have deadlines of their own."""


class HttpServer:
    """Address of a server with streamable HTTP."""

    has_ended = False
    last_error = ""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        self._url = url
        self._headers = headers
        self._is_open, self._refusal = False, 0

    def kill(self) -> None:
        """Do nothing: the server is not ours."""

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Any]:
        """Yield streams for messages from the server and to it."""
        import httpx2
        from mcp.client.streamable_http import streamable_http_client

        # Without the environment: it may name a proxy, and .netrc has passwords for other hosts.
        client = httpx2.AsyncClient(
            headers=dict(self._headers),
            timeout=httpx2.Timeout(CONNECT_TIMEOUT_S, read=READ_TIMEOUT_S),
            trust_env=False,
            event_hooks={"response": [self._check_response]},
        )
        async with (
            client,
            streamable_http_client(
                self._url, http_client=client, max_sse_event_size=MAX_MESSAGE_BYTES
            ) as streams,
        ):
            yield streams

    def mark_open(self) -> None:
        """End the session at every refused request from now on.

        Before, refusals belong to the negotiation of the protocol's version.
        """
        self._is_open = True

    def is_outage(self, error: BaseException) -> bool:
        """Return whether nobody answers, or nobody knows the session of an open connection."""
        return (
            is_outage(error)
            or self._refusal in UNAVAILABLE_STATUSES
            or (self._is_open and self._refusal == HTTPStatus.NOT_FOUND)
        )

    async def _check_response(self, response: "httpx2.Response") -> None:
        """End the session if the server refuses a request, as after it has lost the session.

        The package would report that like an error of the tool. Only with status 400 may a server
        that goes on answer a call.
        """
        import httpx2

        status = response.status_code
        is_json = response.headers.get("content-type", "").startswith("application/json")
        least = HTTPStatus.BAD_REQUEST if self._is_open else HTTPStatus.INTERNAL_SERVER_ERROR
        is_answer = status == HTTPStatus.BAD_REQUEST and is_json
        if response.request.method == "POST" and status >= least and not is_answer:
            self._refusal = status
            raise httpx2.HTTPStatusError(
                f"HTTP status {response.status_code}", request=response.request, response=response
            )


def read_headers(headers_env: Mapping[str, str], *, label: str) -> dict[str, str]:
    """Return HTTP headers with the values of environment variables. Raises ConfigError."""
    missing = [name for name in headers_env.values() if not os.environ.get(name)]
    if missing:
        raise ConfigError(
            f"{label}: headers_env: the environment variables {', '.join(missing)} are not set, or"
            " empty"
        )
    return {header: os.environ[name] for header, name in headers_env.items()}


CLOSE_TIMEOUT_S = 4.0
MAX_PAGES = 100
"""Most pages of a list of tools; a server that never ends it would be asked for ever."""


class McpSession:
    """Open session with a server. Create with `start`.

    The scopes of anyio in the package `mcp` may be left only by the task that entered them.
    Therefore a task of its own enters and leaves them; calls come from any task.
    """

    def __init__(self, server: StdioServer | HttpServer, label: str) -> None:
        self._server = server
        self._label = label
        self._client: Client | None = None
        self._closing = asyncio.Event()
        self._opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._failure = ""
        self._is_out = False
        self.was_given_up = False
        self._calls = BackgroundTasks()
        self._owner = asyncio.create_task(self._keep_open())

    @classmethod
    async def start(cls, server: StdioServer | HttpServer, label: str) -> "McpSession":
        """Open a session. Raises EpisodeError if the server does not start or answer."""
        session = cls(server, label)
        try:
            await asyncio.wait(
                {session._opened, session._owner}, return_when=asyncio.FIRST_COMPLETED
            )
        except asyncio.CancelledError:
            await session.close()
            raise
        if not session._opened.done():
            raise session.make_error("does not start")
        return session

    async def _keep_open(self) -> None:
        from mcp import Client

        try:
            async with Client(self._server.connect(), cache=None) as client:
                self._client = client
                if isinstance(self._server, HttpServer):
                    self._server.mark_open()
                self._opened.set_result(None)
                await self._closing.wait()
                self._server.kill()
        # The package raises what its tasks met, also in groups: any of it ends the session.
        except Exception as error:  # noqa: BLE001
            self._failure = describe_first_error(error)
            self._is_out = isinstance(self._server, HttpServer) and self._server.is_outage(error)
        finally:
            self._server.kill()

    @property
    def is_own_process(self) -> bool:
        """True if the server is a process that lives as long as the session."""
        return isinstance(self._server, StdioServer)

    @property
    def is_open(self) -> bool:
        is_ending = self._owner.done() or self.was_given_up or self._closing.is_set()
        return not (is_ending or self._server.has_ended)

    @property
    def end_reason(self) -> str:
        """Last line of the server's stderr, or the error that ended the session."""
        return self._server.last_error or self._failure or "it has ended"

    async def list_tools(self) -> Sequence[ToolSchema]:
        """Return the schemas of the server's tools. Raises EpisodeError."""
        assert self._client is not None
        schemas: list[ToolSchema] = []
        cursor = None
        for _ in range(MAX_PAGES):
            page = await self._request(self._client.list_tools(cursor=cursor), "list of tools")
            for tool in page.tools:
                described = {"name": tool.name, "parameters": tool.input_schema}
                if tool.description:
                    described["description"] = tool.description
                schemas.append({"type": "function", "function": described})
            cursor = page.next_cursor
            if cursor is None:
                break
        return schemas

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolAnswer:
        """Call a tool; a call that is cancelled kills the server's process.

        Raises EpisodeError if the server ends, or breaks the protocol.
        """
        from mcp import MCPError

        if not self.is_open:
            raise await self._make_end_error()
        assert self._client is not None
        try:
            result = await self._request(self._client.call_tool(name, dict(arguments)), name)
        except asyncio.CancelledError:
            if self.is_own_process:
                # It might go on with the call, and the next one would wait behind it.
                self.was_given_up = True
                self._server.kill()
            raise
        except MCPError as error:
            return ToolAnswer(format_tool_result(f"error: {error.message}"), CallOutcome.TOOL_ERROR)
        outcome = CallOutcome.TOOL_ERROR if result.is_error else CallOutcome.OK
        return ToolAnswer(format_tool_result(format_content(result)), outcome)

    async def _request(self, request: Any, purpose: str) -> Any:
        """Wait for an answer of the server, or its end.

        Raises MCPError, if the server answers with an error, and EpisodeError.
        """
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED

        answering = self._calls.spawn(request)
        try:
            await asyncio.wait({answering, self._owner}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                raise await self._make_end_error()
            return answering.result()
        except MCPError as error:
            if error.code != CONNECTION_CLOSED:
                raise
            raise await self._make_end_error() from error
        except (RuntimeError, ValueError) as error:
            # The package checks results against the schema that the server has declared.
            raise EpisodeError(f"{self._label}: {purpose}: {error}") from error
        finally:
            answering.cancel()

    async def _make_end_error(self) -> EpisodeError:
        await self.close()  # so that the reason is known
        return self.make_error("ended")

    def make_error(self, event: str) -> EpisodeError:
        """Build the error of a session that has ended, or did not start."""
        kind = EpisodeOutageError if self._is_out else EpisodeError
        return kind(f"{self._label}: {event}: {self.end_reason}")

    async def close(self) -> None:
        """Close the session; kill the server's process and all that it started."""
        self._closing.set()
        self._server.kill()
        if self._client is None:
            self._owner.cancel()
        _, late = await asyncio.wait({self._owner}, timeout=CLOSE_TIMEOUT_S)
        for owner in late:
            owner.cancel()
            await asyncio.wait({owner}, timeout=CLOSE_TIMEOUT_S)


def describe_first_error(error: BaseException) -> str:
    """Describe the first error in nested groups of errors."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def format_content(result: "CallToolResult") -> str:
    """Return the content of a result as text; content that is no text is described in a line."""
    if not result.content and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(_format_blocks(result.content))


def _format_blocks(blocks: "Sequence[ContentBlock]") -> Iterator[str]:
    from mcp_types import EmbeddedResource, ResourceLink, TextContent, TextResourceContents

    for block in blocks:
        if isinstance(block, TextContent):
            yield block.text
        elif isinstance(block, ResourceLink):
            yield f"[resource {block.uri}]"
        elif isinstance(block, EmbeddedResource):
            if isinstance(block.resource, TextResourceContents):
                yield block.resource.text
            else:
                yield f"[resource {block.resource.uri}, {len(block.resource.blob)} bytes of base64]"
        else:
            yield f"[{block.type}, {block.mime_type}, {len(block.data)} bytes of base64]"


RESTARTED = "the server has been stopped: what it kept of earlier calls is lost"


class McpTools:
    """Source of the tools of a server (ToolSource).

    A process of a server serves one episode at a time. A session that no episode has used, or that
    episodes share, is idle until the next episode takes it. Construction raises ConfigError without
    the package `mcp`.
    """

    def __init__(self, config: ToolConfig) -> None:
        try:
            # Here, because the import takes 1 s, for which no episode should wait.
            import mcp  # noqa: F401
        except ImportError as error:
            raise ConfigError(
                f"{config.label}: needs the package mcp ({error}): pip install 'streamrl[mcp]'"
            ) from error
        self.label = config.label
        self.url = config.url
        self._config = config
        self._idle: list[McpSession] = []
        # A Python server starts in about 2 s of one core: all at once, all would be late.
        self._starts = asyncio.Semaphore(len(os.sched_getaffinity(0)))

    async def check(self) -> None:
        """Raise ConfigError without the command, or a variable that it or a header needs."""
        config = self._config
        for name in config.env:
            if name not in os.environ:
                raise ConfigError(f"{self.label}: env: {name} is not set in the environment")
        if config.command and shutil.which(config.command[0]) is None:
            raise ConfigError(f"{self.label}: {config.command[0]} is not on PATH")
        read_headers(config.headers_env, label=self.label)

    async def list_tools(self, deadline: float) -> Sequence[ToolSchema]:
        session = await self._take_session(deadline)
        try:
            async with asyncio.timeout_at(deadline):
                tools = await session.list_tools()
        except TimeoutError:
            await session.close()
            raise self._make_late_error("no list of tools in time") from None
        except BaseException:
            await session.close()
            raise
        self._idle.append(session)
        for tool in tools:
            check_tool_schema(tool, place=self.label)
        return self._select_tools(tools)

    def _select_tools(self, tools: Sequence[ToolSchema]) -> Sequence[ToolSchema]:
        by_name = {get_tool_name(tool): tool for tool in tools}
        for name in self._config.only:
            if name not in by_name:
                hint = suggest_nearest(name, by_name, noun="tool")
                raise ConfigError(
                    f"{self.label}: only: {name}: the server has no such tool; {hint}"
                )
        return [by_name[name] for name in self._config.only or by_name]

    async def open(self, deadline: float) -> "McpEpisode":
        return McpEpisode(self, await self._take_session(deadline))

    async def _take_session(self, deadline: float) -> McpSession:
        """Return an idle session, or start one until the deadline."""
        while self._idle:
            session = self._idle.pop()
            if session.is_open:
                return session
            await session.close()
        try:
            async with asyncio.timeout_at(deadline):
                return await self.start_session()
        except TimeoutError:
            raise self._make_late_error("not ready in time") from None

    def _make_late_error(self, event: str) -> EpisodeError:
        """Build the error of a server that has not answered the first messages of a session."""
        kind = EpisodeOutageError if self.url else EpisodeError
        return kind(f"{self.label}: {event}")

    async def start_session(self) -> McpSession:
        """Start a server's process, if it has one, and a session. Raises EpisodeError."""
        config = self._config
        async with self._starts:
            if config.url:
                headers = read_headers(config.headers_env, label=self.label)
                return await McpSession.start(HttpServer(config.url, headers), self.label)
            server = StdioServer(config.command, config.env)
            return await McpSession.start(server, self.label)

    async def release(self, session: McpSession) -> None:
        """Close the session of an ended episode, or keep it for the next one."""
        if self._config.share and session.is_open:
            self._idle.append(session)
        else:
            await session.close()


class McpEpisode:
    """Tools of an episode (ToolSession); a call that was given up costs them their server.

    The next server is started at once, while the policy samples. A call that comes too early and
    reaches its deadline leaves the start to the next call: a server may take longer to start than
    a call may take.
    """

    def __init__(self, source: McpTools, session: McpSession) -> None:
        self._source = source
        self._session: McpSession | None = session
        self._starting: asyncio.Task[McpSession] | None = None
        self._closing = BackgroundTasks()
        self.timeout_note = RESTARTED if session.is_own_process else ""
        self.url = source.url

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolAnswer:
        session = self._session or await self._await_start()
        try:
            return await session.call(name, arguments)
        except asyncio.CancelledError:
            if session.is_own_process and self._session is session:
                self._session = None
                self._closing.spawn(session.close())
                self._starting = asyncio.create_task(self._source.start_session())
            raise
        except EpisodeError:
            if session.was_given_up:
                # Another call of the same turn has timed out, which is the policy's doing.
                return ToolAnswer(RESTARTED, CallOutcome.TOOL_ERROR)
            raise

    async def _await_start(self) -> McpSession:
        """Wait for the server that is being started. Raises EpisodeError."""
        assert self._starting is not None
        self._session = await asyncio.shield(self._starting)
        return self._session

    async def close(self) -> None:
        if self._session is None and self._starting is not None:
            self._starting.cancel()
            (started,) = await asyncio.gather(self._starting, return_exceptions=True)
            self._session = started if isinstance(started, McpSession) else None
        if self._session is not None:
            await self._source.release(self._session)
            self._session = None
        await self._closing.drain()

"""Tools of an MCP server: a session of each episode, and servers that episodes share in turn."""

import asyncio
import os
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from streamrl.environments.interface import CallOutcome, ToolSchema
from streamrl.environments.tool_calls.tool_schema import check_tool_schema, get_tool_name
from streamrl.environments.tool_config import ToolConfig
from streamrl.environments.tool_sources.http_server import HttpServer, read_headers
from streamrl.environments.tool_sources.mcp_session import McpSession
from streamrl.environments.tool_sources.stdio_server import StdioServer
from streamrl.environments.tool_sources.tool_source import ToolAnswer
from streamrl.errors import ConfigError, EpisodeError, EpisodeOutageError
from streamrl.files.typed_settings import suggest_nearest
from streamrl.process_pool.background_tasks import BackgroundTasks

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

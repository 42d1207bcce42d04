"""Handler of a host process: the sessions of a user's environment class, on one event loop."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from streamrl.environments.config import EnvironmentConfig, get_environment_section
from streamrl.environments.environment_kinds import CLASS_KIND, LIST_TOOLS
from streamrl.environments.hosts.call_runner import (
    CANCEL_TIMEOUT_S,
    HostCalls,
    UserCodeError,
)
from streamrl.environments.hosts.host_protocol import (
    CLOSE_TIMEOUT_S,
    EnvironmentDescription,
    EnvironmentShape,
    HostOperation,
    HostRequest,
    HostResponse,
)
from streamrl.environments.hosts.shared_state import digest_shared_state
from streamrl.environments.hosts.tool_environment import ToolEnvironment
from streamrl.environments.hosts.user_class import load_user_class
from streamrl.environments.hosts.user_environment import TurnEnvironment, UserEnvironment
from streamrl.environments.interface import ToolSchema
from streamrl.environments.tool_sources.tool_sources import ToolSources
from streamrl.errors import ConfigError, EpisodeError, ServiceOutageError


class EnvironmentHost:
    """Sessions of a process. An idle session of an async class costs neither a thread nor a task.

    settings: of a single environment. Construction loads its class and raises ConfigError.
    """

    def __init__(self, settings: EnvironmentConfig) -> None:
        self._settings = settings
        name, spec = settings.single
        self._is_adapter = spec.kind != CLASS_KIND
        self._class = load_user_class(spec, section=get_environment_section(name))
        self._sources = ToolSources(
            spec.tools, self._class.description.tools, max_reply_chars=settings.max_reply_chars
        )
        self._calls = HostCalls()
        self._sessions: dict[int, UserEnvironment] = {}
        self._running: dict[int, asyncio.Task[Any]] = {}
        self._watched: dict[int, dict[str, str]] = {}

    async def __call__(self, request: HostRequest) -> HostResponse:
        try:
            result = await self._run_operation(request)
        except TimeoutError:
            name = f"{self._class.description.name}.{request.operation.value}"
            timeout_s = self._settings.turn_timeout_s
            if request.operation is HostOperation.CLOSE:
                timeout_s = CLOSE_TIMEOUT_S
            error = f"{name} in {self._class.description.file}: no result in {timeout_s:g} s"
            response = HostResponse(error=error, is_timeout=True)
        except (UserCodeError, EpisodeError, ConfigError) as error:
            is_refused = isinstance(error, ConfigError)
            is_refused &= request.operation is HostOperation.DESCRIBE
            is_outage = any(isinstance(e, ServiceOutageError) for e in (error, error.__cause__))
            response = HostResponse(
                error=str(error), is_outage=is_outage, is_config_error=is_refused
            )
        else:
            response = HostResponse(result)
        return replace(response, num_hanging=len(self._calls.hanging))

    async def _run_operation(self, request: HostRequest) -> Any:
        session_id, arguments = request.session_id, request.arguments
        if request.operation is HostOperation.DESCRIBE:
            return await self._describe()
        if request.operation is HostOperation.WATCH:
            state = digest_shared_state(self._class.class_object)
            before = self._watched.pop(session_id, None)
            if before is None:
                self._watched[session_id] = state
                return ()
            return sorted(name for name in before if state.get(name) != before[name])
        if request.operation is HostOperation.CLOSE:
            return await self._close_session(session_id)
        if request.operation is HostOperation.RESET:
            prompt, seed, *served = arguments
            self._adopt_tools(*served)
            arguments = (prompt, seed)
            self._sessions[session_id] = self._make_environment()
        environment = self._sessions[session_id]
        task = asyncio.current_task()
        assert task is not None
        self._running[session_id] = task
        try:
            return await getattr(environment, request.operation.value)(*arguments)
        finally:
            del self._running[session_id]

    async def _describe(self) -> EnvironmentDescription:
        """Return the description of the class with the tools of all sources."""
        await self._sources.check()
        deadline = asyncio.get_running_loop().time() + self._settings.turn_timeout_s
        if self._is_adapter and LIST_TOOLS in self._class.methods:
            list_tools = getattr(self._class.class_object, LIST_TOOLS)
            async with asyncio.timeout_at(deadline):
                self._adopt_tools(await list_tools(**self._class.options))
        tools = await self._sources.list_tools(deadline)
        return replace(self._class.description, tools=tools)

    def _adopt_tools(self, tools: Sequence[ToolSchema] = ()) -> None:
        """Offer the tools that an adapter's server has listed, if any, in place of turns."""
        if tools:
            shape, known = EnvironmentShape.TOOLS, self._class.description
            known = replace(known, shape=shape, tools=tools, serves_tools=True)
            self._class = replace(self._class, description=known)
            self._sources = ToolSources((), tools, max_reply_chars=self._settings.max_reply_chars)

    def _make_environment(self) -> UserEnvironment:
        if self._class.description.shape is EnvironmentShape.TURNS:
            return TurnEnvironment(self._class, self._settings, self._calls)
        return ToolEnvironment(self._class, self._settings, self._calls, self._sources)

    async def _close_session(self, session_id: int) -> None:
        """Give up the operation that the session is in, if any, and close the session."""
        environment = self._sessions.pop(session_id, None)
        running = self._running.get(session_id)
        if running is not None:
            running.cancel()
            await asyncio.wait({running}, timeout=2 * CANCEL_TIMEOUT_S)
        if environment is not None:
            await environment.close()

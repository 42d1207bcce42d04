"""Handle of a host process: calls with a deadline, and why the process ended."""

import asyncio
import itertools
from typing import Any

from streamrl.environments.config import EnvironmentConfig
from streamrl.environments.hosts.host_protocol import (
    HostOperation,
    HostRequest,
    HostResponse,
)
from streamrl.errors import ConfigError, EpisodeError, EpisodeOutageError, EpisodeTimeoutError
from streamrl.process_pool.process import ProcessExitedError, WorkerProcess

TARGET = "streamrl.environments.hosts.environment_host:EnvironmentHost"
START_TIMEOUT_S = 120.0
"""Long because a host imports the user's file, which may import torch."""
REACTION_TIMEOUT_S = 5.0
"""Time beyond an operation's deadline in which a host must report that it was missed. A host whose
event loop is blocked does not react."""


class HostProcess:
    """Host process with its open sessions, as the pool sees it. Create with `start`.

    num_sessions: open sessions. was_used: it had a session.
    num_hanging: calls that run in the host although they were given up, as last reported.
    is_unresponsive: the host did not react to the deadline of an operation.
    kill_reason: reason for which the pool kills the host; "" if it does not.
    """

    def __init__(self, process: WorkerProcess) -> None:
        self._process = process
        self._call_ids = itertools.count()
        self.num_sessions = 0
        self.num_hanging = 0
        self.was_used = False
        self.is_unresponsive = False
        self.kill_reason = ""

    @classmethod
    async def start(cls, settings: EnvironmentConfig) -> "HostProcess":
        """Start a process. Raises ConfigError, and ProcessExitedError (`WorkerProcess.start`)."""
        return cls(await WorkerProcess.start(TARGET, settings, within_s=START_TIMEOUT_S))

    @property
    def pid(self) -> int:
        """Pid of the root of the process tree."""
        return self._process.pid

    @property
    def has_exited(self) -> bool:
        """True also if the host is about to be killed."""
        return bool(self.kill_reason) or self._process.has_exited

    @property
    def exit_reason(self) -> str:
        return self.kill_reason or self._process.exit_reason

    async def call(
        self, operation: HostOperation, session_id: int, *arguments: Any, timeout_s: float
    ) -> Any:
        """Run an operation and return its result.

        Raises EpisodeTimeoutError, EpisodeOutageError, EpisodeError if the user's code raises or
        the host exits, and ConfigError for an environment that cannot be used.
        """
        request = HostRequest(operation, session_id, arguments)
        try:
            async with asyncio.timeout(timeout_s + REACTION_TIMEOUT_S):
                ok, answer = await self._process.send_request(next(self._call_ids), request)
        except TimeoutError:
            self.is_unresponsive = True
            raise EpisodeTimeoutError(
                f"{operation.value}: no result in {timeout_s:g} s, and the environment's process"
                " does not react: async methods must not block the event loop"
            ) from None
        except ProcessExitedError:
            raise EpisodeError(
                f"{operation.value}: the environment's process ended: {self.exit_reason}"
            ) from None
        if not ok:
            raise EpisodeError(f"{operation.value}: {answer}")
        response: HostResponse = answer
        self.num_hanging = response.num_hanging
        if response.is_config_error:
            raise ConfigError(response.error)
        if response.is_outage:
            raise EpisodeOutageError(response.error)
        if response.error:
            raise (EpisodeTimeoutError if response.is_timeout else EpisodeError)(response.error)
        return response.result

    async def kill(self) -> None:
        """Kill the host with all processes that it started; its open calls raise EpisodeError."""
        await self._process.kill()

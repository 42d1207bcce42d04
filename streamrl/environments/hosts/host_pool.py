"""Pool of host processes, and the sessions of episodes in them.

A session stays in its host from reset to close: it is a claim of the pool. An operation that failed
is never repeated by the pool: environments have side effects.

Hanging calls: a sync method past its deadline cannot be stopped. Its host takes no new sessions
until the call returns, and a further host is started.
"""

import itertools
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from streamrl.environments.config import EnvironmentConfig
from streamrl.environments.hosts.host_protocol import (
    CLOSE_TIMEOUT_S,
    EnvironmentDescription,
    HostOperation,
    HostRequest,
    HostResponse,
)
from streamrl.environments.interface import (
    EnvironmentStep,
    EpisodeSummary,
    Message,
    Reply,
    ResetResult,
)
from streamrl.errors import ConfigError, EpisodeError, EpisodeOutageError, EpisodeTimeoutError
from streamrl.messages import Prompt
from streamrl.user_code.concurrent_calls import map_concurrently
from streamrl.user_code.pool.pool import (
    START_TIMEOUT_S,
    PoolSettings,
    SharedTimeoutError,
    Worker,
    WorkerCrashError,
    WorkerError,
    WorkerMemoryError,
    WorkerPool,
    WorkerTimeoutError,
)

_log = logging.getLogger(__name__)

TARGET = "streamrl.environments.hosts.environment_host:EnvironmentHost"
REACTION_TIMEOUT_S = 5.0
"""Time beyond an operation's deadline in which a host must report that it was missed. A host whose
event loop is blocked does not react."""


class EnvironmentHostPool(WorkerPool):
    """Host processes of an environment class.

    settings: of a single environment. As many hosts as `processes` stand in for those that hang.
    """

    def __init__(self, settings: EnvironmentConfig) -> None:
        pool_settings = PoolSettings(
            settings.processes,
            memory_bytes=settings.memory_bytes,
            is_isolated=settings.isolate,
            max_spares=math.inf if settings.isolate else settings.processes,
        )
        super().__init__("the environment", TARGET, settings, pool_settings)
        self.turn_timeout_s = settings.turn_timeout_s
        self._session_ids = itertools.count()
        self._description: EnvironmentDescription | None = None

    async def start(self) -> None:
        """Start the hosts, and check the class in the first one.

        Raises ConfigError if the class cannot be used, and EpisodeError if the host does not start.
        """
        try:
            await super().start()
        except WorkerError as error:
            raise EpisodeError(str(error)) from None
        self._description = await self.call_host(
            self.processes[0], HostRequest(HostOperation.DESCRIBE), START_TIMEOUT_S
        )

    @property
    def description(self) -> EnvironmentDescription:
        assert self._description is not None, "call start first"
        return self._description

    def open_session(self, prompt: Prompt, *, seed: int) -> "HostedSession":
        """Return a session that is not reset yet.

        seed: seed of the environment, equal for all episodes of a group.
        """
        return HostedSession(self, next(self._session_ids), prompt, seed)

    async def claim_host(self) -> Worker:
        """Wait for a host with room for a session. Raises EpisodeError."""
        try:
            return await self.claim()
        except WorkerError as error:
            raise EpisodeError(str(error)) from None

    async def call_host(self, host: Worker, request: HostRequest, timeout_s: float) -> Any:
        """Run an operation and return its result.

        Raises EpisodeTimeoutError, EpisodeOutageError, EpisodeError if the user's code raises or
        the host exits, and ConfigError for an environment that cannot be used.
        """
        name = request.operation.value
        try:
            response: HostResponse = await self.request(
                host, request, timeout_s + REACTION_TIMEOUT_S
            )
        except (WorkerTimeoutError, SharedTimeoutError):
            raise EpisodeTimeoutError(
                f"{name}: no result in {timeout_s:g} s, and the environment's process does not"
                " react: async methods must not block the event loop"
            ) from None
        except (WorkerCrashError, WorkerMemoryError) as error:
            raise EpisodeError(f"{name}: the environment's process ended: {error}") from None
        except WorkerError as error:
            raise EpisodeError(f"{name}: {error}") from None
        finally:
            self.check(host)
        host.num_hanging = response.num_hanging
        self.check(host)
        if response.is_config_error:
            raise ConfigError(response.error)
        if response.is_outage:
            raise EpisodeOutageError(response.error)
        if response.error:
            raise (EpisodeTimeoutError if response.is_timeout else EpisodeError)(response.error)
        return response.result


async def start_pools(config: EnvironmentConfig) -> dict[str, EnvironmentHostPool]:
    """Start a pool for each environment at the same time; return them by name.

    Raises ConfigError if a class cannot be used, and EpisodeError if a process does not start; then
    all pools are closed.
    """
    pools = {name: EnvironmentHostPool(config.select(name)) for name in config.specs}
    try:
        await map_concurrently(EnvironmentHostPool.start, [*pools.values()], most=len(pools))
    except Exception:
        await close_pools(pools)
        raise
    return pools


async def close_pools(pools: Mapping[str, EnvironmentHostPool]) -> None:
    for pool in pools.values():
        await pool.close()


class HostedSession:
    """Session of a user's environment in a host process.

    Methods besides `close` raise EpisodeError. close_error: failure of the user's `close`; "" if it
    has not failed.
    """

    def __init__(
        self, pool: EnvironmentHostPool, session_id: int, prompt: Prompt, seed: int
    ) -> None:
        self._pool = pool
        self._id = session_id
        self._prompt = prompt
        self._seed = seed
        self._host: Worker | None = None
        self.close_error = ""

    async def reset(self) -> ResetResult:
        """Wait for a host, and reset a new environment object in it."""
        self._host = await self._pool.claim_host()
        found = self._pool.description
        # Only the first host has asked the server.
        arguments = self._prompt, self._seed, found.tools if found.serves_tools else ()
        result: ResetResult = await self._call(HostOperation.RESET, *arguments)
        return result

    async def step(self, reply: Reply) -> EnvironmentStep:
        result: EnvironmentStep = await self._call(HostOperation.STEP, reply)
        return result

    async def score(self, episode: EpisodeSummary) -> float:
        """Return the environment's score; the sum of the rewards if it has no own score."""
        result: float = await self._call(HostOperation.SCORE, episode)
        return result

    async def ask_oracle(self, messages: Sequence[Message]) -> str:
        """Return the turn that the class's `oracle` would write after these messages."""
        reply: str = await self._call(HostOperation.ORACLE, messages)
        return reply

    async def close(self) -> None:
        """Close the environment and give up a call that still runs. A failure is only logged."""
        host = self._host
        if host is None:
            return
        try:
            if not host.has_ended:
                await self._call(HostOperation.CLOSE)
        except EpisodeError as error:
            self.close_error = str(error)
            _log.warning("closing an environment failed: %s", error)
        finally:
            self._host = None
            self._pool.release(host)

    async def _call(self, operation: HostOperation, *arguments: Any) -> Any:
        assert self._host is not None, "call reset first"
        is_close = operation is HostOperation.CLOSE
        timeout_s = CLOSE_TIMEOUT_S if is_close else self._pool.turn_timeout_s
        request = HostRequest(operation, self._id, arguments)
        return await self._pool.call_host(self._host, request, timeout_s)

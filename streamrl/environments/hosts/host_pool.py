"""Pool of host processes: opens sessions, and replaces hosts that hang, crash or use much memory.

A session stays in its host from reset to close. An operation that failed is never repeated by the
pool: environments have side effects.

Hanging calls: a sync method past its deadline cannot be stopped. Its host takes no new sessions
until the call returns, and a further host is started. The host is killed when its last session is
closed, or when more than MAX_HANGING_CALLS hang.
"""

import asyncio
import itertools
import logging
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

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
from streamrl.user_code.pool.background_tasks import BackgroundTasks
from streamrl.user_code.pool.proc_stats import ProcessTable
from streamrl.user_code.pool.process import ProcessExitedError, WorkerProcess

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


_log = logging.getLogger(__name__)

MAX_FAILED_STARTS = 3
"""Consecutive failures after which sessions that wait for a host raise EpisodeError."""
MAX_HANGING_CALLS = 8
MAX_HOSTS_PER_PROCESS = 2
"""Limit of all hosts, as a multiple of `processes`. At the limit, hosts with hanging calls take new
sessions, too."""
MONITOR_INTERVAL_S = 0.5


class EnvironmentHostPool:
    """Host processes of an environment class.

    settings: of a single environment.
    kill_counts: number of hosts that ended or were killed, by cause: crash, memory, hanging,
        unresponsive.
    """

    def __init__(self, settings: EnvironmentConfig) -> None:
        self._settings = settings
        self._hosts: list[HostProcess] = []
        self._num_starting = 0
        self._num_failed_starts, self._num_given_up, self._start_error = 0, 0, ""
        self._hosts_changed = asyncio.Event()
        self._tasks = BackgroundTasks()
        self._service_tasks: set[asyncio.Task[None]] = set()
        self._process_table = ProcessTable()
        self._session_ids = itertools.count()
        self._description: EnvironmentDescription | None = None
        self._is_closed = False
        self.kill_counts: Counter[str] = Counter()

    async def start(self) -> None:
        """Start the first host, check the class, and start the other hosts in the background.

        Raises ConfigError if the class cannot be used, and EpisodeError if the host does not start.
        """
        self._num_starting += 1
        try:
            await self._add_host()
        except (ProcessExitedError, OSError) as error:
            raise EpisodeError(f"the environment's process does not start: {error}") from None
        self._description = await self._hosts[0].call(
            HostOperation.DESCRIBE, 0, timeout_s=START_TIMEOUT_S
        )
        self._service_tasks.add(self._tasks.spawn(self._monitor_hosts()))
        self._start_missing_hosts()

    @property
    def turn_timeout_s(self) -> float:
        return self._settings.turn_timeout_s

    @property
    def description(self) -> EnvironmentDescription:
        assert self._description is not None, "call start first"
        return self._description

    @property
    def num_hosts(self) -> int:
        return len(self._hosts)

    @property
    def num_sessions(self) -> int:
        return sum(host.num_sessions for host in self._hosts)

    def open_session(self, prompt: Prompt, *, seed: int) -> "HostedSession":
        return HostedSession(self, next(self._session_ids), prompt, seed)

    async def claim_host(self) -> HostProcess:
        """Wait for a host with room for a session; return the one with the fewest sessions.

        Raises EpisodeError if hosts do not start, or the pool is closed.
        """
        if self._num_failed_starts >= MAX_FAILED_STARTS:
            # The reason may be gone since then: try again for the new session.
            self._num_failed_starts = 0
        num_given_up = self._num_given_up
        while not (hosts := self._find_claimable_hosts()):
            if self._is_closed:
                raise EpisodeError("the environment's processes are closed")
            if self._num_given_up > num_given_up:
                raise EpisodeError(f"the environment's process does not start: {self._start_error}")
            self._start_missing_hosts()
            await self._hosts_changed.wait()
        host = min(hosts, key=lambda host: (host.num_hanging, host.num_sessions))
        host.num_sessions += 1
        host.was_used = True
        self._start_missing_hosts()
        return host

    def release_host(self, host: HostProcess) -> None:
        """Release the slot of a session that is closed."""
        host.num_sessions -= 1
        self.check_host(host)

    def check_host(self, host: HostProcess) -> None:
        """Kill a host if its state demands it, and start hosts that are missing."""
        if host not in self._hosts:
            return
        if host.has_exited:
            # Without a reason: the exit status, which may follow later, is the reason.
            self._kill_host(host, "", "crash")
        elif host.is_unresponsive:
            self._kill_host(host, "a call of another episode blocked it", "unresponsive")
        elif host.num_hanging > MAX_HANGING_CALLS:
            self._kill_host(host, f"{host.num_hanging} calls hang in it", "hanging")
        elif not host.num_sessions and host.num_hanging:
            self._kill_host(host, "calls hang in it", "hanging")
        elif not host.num_sessions and (
            host.was_used if self._settings.isolate else self._num_missing_hosts < 0
        ):
            self._remove_host(host, "it is no longer needed")
        self._start_missing_hosts()
        self._notify_waiters()

    def _has_room(self, host: HostProcess) -> bool:
        is_taken = self._settings.isolate and host.was_used
        return not (is_taken or host.num_hanging or host.has_exited)

    def _find_claimable_hosts(self) -> list[HostProcess]:
        hosts = [host for host in self._hosts if self._has_room(host)]
        if hosts or self._settings.isolate or self._num_startable_hosts > 0:
            return hosts
        return [host for host in self._hosts if not host.has_exited]

    @property
    def _num_missing_hosts(self) -> int:
        """Number of hosts to start; negative if the pool has more than needed."""
        num_free = sum(map(self._has_room, self._hosts))
        return self._settings.processes - num_free - self._num_starting

    @property
    def _num_startable_hosts(self) -> int:
        """Number of hosts below the limit of all hosts; those that are starting do not count."""
        return MAX_HOSTS_PER_PROCESS * self._settings.processes - len(self._hosts)

    def _start_missing_hosts(self) -> None:
        if self._is_closed or self._num_failed_starts >= MAX_FAILED_STARTS:
            return
        num_missing = self._num_missing_hosts
        if not self._settings.isolate:
            num_missing = min(num_missing, self._num_startable_hosts - self._num_starting)
        for _ in range(num_missing):
            self._num_starting += 1
            self._service_tasks.add(self._tasks.spawn(self._try_add_host()))

    async def _try_add_host(self) -> None:
        """Add a host in the background; record a failure for the sessions that wait for a host."""
        try:
            await self._add_host()
        except (ConfigError, ProcessExitedError, OSError) as error:
            self._start_error = str(error)
            self._num_failed_starts += 1
            self._num_given_up += self._num_failed_starts == MAX_FAILED_STARTS
        self._service_tasks -= {task for task in self._service_tasks if task.done()}
        self._start_missing_hosts()
        self._notify_waiters()

    async def _add_host(self) -> None:
        try:
            host = await HostProcess.start(self._settings)
        finally:
            self._num_starting -= 1
        if self._is_closed:
            await host.kill()
            return
        self._num_failed_starts = 0
        self._hosts.append(host)

    def _kill_host(self, host: HostProcess, reason: str, cause: str) -> None:
        self.kill_counts[cause] += 1
        self._remove_host(host, reason)

    def _remove_host(self, host: HostProcess, reason: str) -> None:
        self._hosts.remove(host)
        host.kill_reason = reason
        self._tasks.spawn(self._end_host(host))
        self._start_missing_hosts()

    async def _end_host(self, host: HostProcess) -> None:
        num_sessions = host.num_sessions
        await host.kill()
        if num_sessions and not self._is_closed:
            _log.warning(
                "an environment process with %d open sessions ended: %s",
                *(num_sessions, host.exit_reason),
            )

    def _notify_waiters(self) -> None:
        self._hosts_changed.set()
        self._hosts_changed = asyncio.Event()

    async def _monitor_hosts(self) -> None:
        """Look for exited hosts and excessive memory every MONITOR_INTERVAL_S, until cancelled."""
        while True:
            await asyncio.sleep(MONITOR_INTERVAL_S)
            try:
                await self._check_all_hosts()
            except Exception:  # noqa: BLE001 - otherwise the monitor would stop for good
                _log.exception("monitoring the environment's processes failed")

    async def _check_all_hosts(self) -> None:
        for host in list(self._hosts):
            excess = await asyncio.to_thread(
                self._process_table.describe_excess, host.pid, self._settings.memory_bytes
            )
            if excess and host in self._hosts:
                self._kill_host(host, excess, "memory")
            self.check_host(host)

    async def close(self) -> None:
        """Kill all hosts; open sessions and those that wait for a host raise EpisodeError."""
        self._is_closed = True
        for task in self._service_tasks:
            task.cancel()
        for host in list(self._hosts):
            self._remove_host(host, "the environment's processes are closed")
        self._notify_waiters()
        await self._tasks.drain()


class EpisodeObserver(Protocol):
    """Observer of an episode."""

    def see(self, operation: HostOperation, arguments: Any, result: Any, seconds: float) -> None:
        """Receive an answer of the environment and the time that it took."""
        ...


class HostedSession:
    """Session of a user's environment in a host process (EnvironmentSession).

    observer: receives each answer. is_watched: find what the episode changes of the state that all
    of its process share; then no other one may be open.
    close_error: failure of the user's `close`; "" if it has not failed. changes: names of the state
    that a watched episode has changed.
    """

    def __init__(
        self, pool: EnvironmentHostPool, session_id: int, prompt: Prompt, seed: int
    ) -> None:
        self._pool = pool
        self._id = session_id
        self._prompt = prompt
        self._seed = seed
        self._host: HostProcess | None = None
        self.observer: EpisodeObserver | None = None
        self.is_watched = False
        self.close_error = ""
        self.changes: Sequence[str] = ()

    async def reset(self) -> ResetResult:
        """Wait for a host, and reset a new environment object in it."""
        self._host = await self._pool.claim_host()
        if self.is_watched:
            await self._call(HostOperation.WATCH)
        found = self._pool.description
        # Only the first host has asked the server.
        arguments = self._prompt, self._seed, found.tools if found.serves_tools else ()
        result: ResetResult = await self._call(HostOperation.RESET, *arguments)
        return result

    async def step(self, reply: Reply) -> EnvironmentStep:
        result: EnvironmentStep = await self._call(HostOperation.STEP, reply)
        return result

    async def score(self, episode: EpisodeSummary) -> float:
        result: float = await self._call(HostOperation.SCORE, episode)
        return result

    async def ask_oracle(self, messages: Sequence[Message]) -> str:
        """Return the turn that the class's `oracle` would write after these messages."""
        reply: str = await self._call(HostOperation.ORACLE, messages)
        return reply

    @property
    def host_pid(self) -> int:
        """Pid of the root of the process tree in which the session is open."""
        assert self._host is not None, "call reset first"
        return self._host.pid

    async def kill_host(self) -> None:
        """Kill the process in which the session is open; its episodes fail as after a crash."""
        assert self._host is not None, "call reset first"
        await self._host.kill()

    async def close(self) -> None:
        """Close the environment and give up a call that still runs. A failure is only logged."""
        host, self._host = self._host, None
        if host is None:
            return
        try:
            if self.is_watched and not host.has_exited:
                self.changes = await host.call(
                    HostOperation.WATCH, self._id, timeout_s=CLOSE_TIMEOUT_S
                )
            if not host.has_exited:
                await host.call(HostOperation.CLOSE, self._id, timeout_s=CLOSE_TIMEOUT_S)
        except EpisodeError as error:
            self.close_error = str(error)
            _log.warning("closing an environment failed: %s", error)
        finally:
            self._pool.release_host(host)

    async def _call(self, operation: HostOperation, *arguments: Any) -> Any:
        host, started = self._host, time.monotonic()
        assert host is not None, "call reset first"
        try:
            result = await host.call(
                operation, self._id, *arguments, timeout_s=self._pool.turn_timeout_s
            )
        finally:
            self._pool.check_host(host)
        if self.observer is not None:
            self.observer.see(operation, arguments, result, time.monotonic() - started)
        return result

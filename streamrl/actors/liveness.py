"""Liveness of a run's processes: find those that are stopped, hung or unreachable.

The driver pings all actors throughout the run, and once more after a timeout of any call. A timeout
alone names the wrong process: the called process may itself wait for the stopped one.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from streamrl.errors import DeadlineError, DropLimitError, GenerationError, WeightsError

PING_TIMEOUT_S = 5.0
"""Longest wait for the reply of a live process, which does no work for a ping."""
WAIT_ERRORS = (DeadlineError, DropLimitError, GenerationError, WeightsError)
"""Errors that an unresponsive process may cause in processes that wait for it."""


@contextmanager
def name_unresponsive(processes: Callable[[], Mapping[str, Any]]) -> Iterator[None]:
    """Run the body; name unresponsive processes in an error that such a process may have caused.

    Only errors in WAIT_ERRORS change. Processes are checked by `find_unresponsive`.
    processes: returns an actor of each process, by process name.
    """
    try:
        yield
    except WAIT_ERRORS as error:
        names = find_unresponsive(processes())
        if not names:
            raise
        reason = "; ".join(f"the process of {name} does not answer" for name in names)
        raise type(error)(f"{reason}; {error}") from error


def find_unresponsive(processes: Mapping[str, Any], timeout_s: float = PING_TIMEOUT_S) -> list[str]:
    """Return the names of processes that do not reply within `timeout_s`: stopped or unreachable.

    processes: an async actor of each process, by process name. An actor that waits for another
    actor still replies, since its event loop runs. For a dead actor Ray replies.
    """
    replies = {actor.__ray_ready__.remote(): name for name, actor in processes.items()}
    _, late = ray.wait(list(replies), num_returns=len(replies), timeout=timeout_s)
    return sorted(replies[reply] for reply in late)


MAX_POLL_GAP_S = 1.0
"""Longest time counted between two calls of `ping_actors`: the caller may have been stopped."""
PINGS_PER_DEADLINE = 6
"""Pings per actor within `silent_s` of LivenessMonitor."""


@dataclass(frozen=True)
class ProcessLocation:
    """Node id and pid of an actor's process."""

    node: str
    pid: int

    @classmethod
    def from_this_process(cls) -> "ProcessLocation":
        return cls(ray.get_runtime_context().get_node_id(), os.getpid())


class PingableActor:
    """Base class of all actors of a run. No async method may block the event loop."""

    async def ping(self) -> ProcessLocation:
        """Reply at once with the location of this process, to show that the event loop runs."""
        return ProcessLocation.from_this_process()


@dataclass(frozen=True)
class _PendingPing:
    reply: Any
    sent_at_s: float


class LivenessMonitor:
    """Pings actors and reports those that have not replied for `silent_s`. No method blocks."""

    def __init__(self, silent_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeout_s = silent_s
        self._clock = clock
        self._polled_at_s = clock()
        self._now_s = 0.0
        self._pending_pings: dict[str, _PendingPing] = {}
        self._unresponsive: set[str] = set()
        self._answered_at_s: dict[str, float] = {}
        self._locations: dict[str, ProcessLocation] = {}

    def ping_actors(self, actors: Mapping[str, Any]) -> list[str]:
        """Ping each actor whose next ping is due; return the names of actors that became silent.

        Call this method repeatedly. A silent actor is named once, and again only after a reply in
        between.
        """
        now = self._clock()
        self._now_s += min(now - self._polled_at_s, MAX_POLL_GAP_S)
        self._polled_at_s = now
        self._pending_pings = {
            name: ping for name, ping in self._pending_pings.items() if name in actors
        }
        self._collect_pings()
        late = [
            n
            for n, ping in self._pending_pings.items()
            if self._now_s - ping.sent_at_s >= self._timeout_s
        ]
        newly_silent = [name for name in late if name not in self._unresponsive]
        self._unresponsive = set(late)
        every_s = self._timeout_s / PINGS_PER_DEADLINE
        for name, actor in actors.items():
            due_s = self._answered_at_s.get(name, -every_s) + every_s
            if name not in self._pending_pings and self._now_s >= due_s:
                self._pending_pings[name] = _PendingPing(actor.ping.remote(), self._now_s)
        return newly_silent

    def _collect_pings(self) -> None:
        """Record the replies that have arrived to pending pings, without waiting."""
        if not self._pending_pings:
            return
        names = {ping.reply: name for name, ping in self._pending_pings.items()}
        ready, _ = ray.wait(list(names), num_returns=len(names), timeout=0)
        for reply in ready:
            name = names[reply]
            del self._pending_pings[name]
            self._answered_at_s[name] = self._now_s
            # A dead actor is not silent: Ray reports the death and the driver restarts it.
            with contextlib.suppress(RayError):
                self._locations[name] = ray.get(reply, timeout=0)

    def find_pid(self, name: str) -> str:
        """Return the pid of an actor's process as text; empty if no ping was ever answered."""
        location = self._locations.get(name)
        return "" if location is None else str(location.pid)

    def kill_actor(self, name: str, actor: Any) -> None:
        """Kill the process of a silent actor; Ray then restarts the actor.

        Sends SIGKILL, since a stopped process handles no other signal and no Ray call.
        """
        self._pending_pings.pop(name, None)
        location = self._locations.pop(name, None)
        if location is None:
            ray.kill(actor, no_restart=False)
        elif location.node == ray.get_runtime_context().get_node_id():
            _kill_process(location.pid)
        else:
            affinity = NodeAffinitySchedulingStrategy(location.node, soft=False)
            ray.remote(_kill_process).options(num_cpus=0, scheduling_strategy=affinity).remote(
                location.pid
            )


def _kill_process(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)

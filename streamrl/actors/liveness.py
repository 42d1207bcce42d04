"""Which processes give no sign of life: stopped, wedged or out of reach.

All are asked all the time, and once more when a run fails of a wait. Who
waited knows only for whom, and that one may itself be waiting for a process that is stopped.
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
"""How long a process has to answer, s: it has nothing to do for it."""
WAIT_ERRORS = (DeadlineError, DropLimitError, GenerationError, WeightsError)
"""Errors that may come of a process that does nothing any more."""


@contextmanager
def name_unresponsive(processes: Callable[[], Mapping[str, Any]]) -> Iterator[None]:
    """What fails in here, and may have failed of a silent process, names it;

    see `find_unresponsive`.
    """
    try:
        yield
    except WAIT_ERRORS as error:
        names = find_unresponsive(processes())
        if not names:
            raise
        told = "; ".join(f"the process of {name} does not answer" for name in names)
        raise type(error)(f"{told}; {error}") from error


def find_unresponsive(processes: Mapping[str, Any], within_s: float = PING_TIMEOUT_S) -> list[str]:
    """The names of the processes that do not answer: stopped, or out of reach.

    Each value is an async actor in the process. One that waits for another answers, as its loop is
    free, and for one that has died Ray does.
    """
    replies = {actor.__ray_ready__.remote(): name for name, actor in processes.items()}
    _, late = ray.wait(list(replies), num_returns=len(replies), timeout=within_s)
    return sorted(replies[reply] for reply in late)


MAX_POLL_GAP_S = 1.0
"""A longer time between two looks counts as this: who looks may have been stopped itself, s."""
PINGS_PER_DEADLINE = 6
"""How often a process is asked within the time that it may be silent."""


@dataclass(frozen=True)
class ProcessLocation:
    """Where a process is: its node, and its number there."""

    node: str
    pid: int

    @classmethod
    def from_this_process(cls) -> "ProcessLocation":
        """Of the calling process."""
        return cls(ray.get_runtime_context().get_node_id(), os.getpid())


class PingableActor:
    """What every actor of a run is asked; no method of one that is async holds its loop up."""

    async def ping(self) -> ProcessLocation:
        """Answer at once, as long as this process does anything at all."""
        return ProcessLocation.from_this_process()


@dataclass(frozen=True)
class _PendingPing:
    reply: Any
    sent_at_s: float


class LivenessMonitor:
    """Asks actors, each a Living, for signs of life; says which have given none for `silent_s`.

    Nothing here waits.
    """

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
        """Ask whoever is due of these actors; the names of those that are silent.

        Each once, until it has answered again or was ended.
        """
        now = self._clock()
        self._now_s += min(now - self._polled_at_s, MAX_POLL_GAP_S)
        self._polled_at_s = now
        self._pending_pings = {
            name: asked for name, asked in self._pending_pings.items() if name in actors
        }
        self._collect_pings()
        late = [
            n
            for n, one in self._pending_pings.items()
            if self._now_s - one.sent_at_s >= self._timeout_s
        ]
        found = [name for name in late if name not in self._unresponsive]
        self._unresponsive = set(late)
        every_s = self._timeout_s / PINGS_PER_DEADLINE
        for name, actor in actors.items():
            due_s = self._answered_at_s.get(name, -every_s) + every_s
            if name not in self._pending_pings and self._now_s >= due_s:
                self._pending_pings[name] = _PendingPing(actor.ping.remote(), self._now_s)
        return found

    def _collect_pings(self) -> None:
        """Take in what has been answered."""
        if not self._pending_pings:
            return
        names = {one.reply: name for name, one in self._pending_pings.items()}
        ready, _ = ray.wait(list(names), num_returns=len(names), timeout=0)
        for reply in ready:
            name = names[reply]
            del self._pending_pings[name]
            self._answered_at_s[name] = self._now_s
            # Whoever died is not silent: Ray says so, and others see to it.
            with contextlib.suppress(RayError):
                self._locations[name] = ray.get(reply, timeout=0)

    def find_pid(self, name: str) -> str:
        """The number of an actor's process on its machine, as text; empty if it never answered."""
        sign = self._locations.get(name)
        return "" if sign is None else str(sign.pid)

    def kill_actor(self, name: str, actor: Any) -> None:
        """End the process of a silent actor; Ray starts it again as it does any that dies.

        By a signal: one that is stopped would not hear of anything else.
        """
        self._pending_pings.pop(name, None)
        sign = self._locations.pop(name, None)
        if sign is None:
            ray.kill(actor, no_restart=False)
        elif sign.node == ray.get_runtime_context().get_node_id():
            _kill_process(sign.pid)
        else:
            there = NodeAffinitySchedulingStrategy(sign.node, soft=False)
            ray.remote(_kill_process).options(num_cpus=0, scheduling_strategy=there).remote(
                sign.pid
            )


def _kill_process(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)

"""Replicas that join or leave a run that is under way, because somebody asked for it.

A change is a few replies that are waited for beside everything else, each with a deadline: one that
joins is given a place, starts, and serves a version; one that leaves ends its loops. Nothing here
waits, and what goes wrong with a newcomer, until it has served, is the answer to who asked and not
the end of the run.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from streamrl.actors.coordination.driver_events import EventReport, Report
from streamrl.actors.launch.actor_registry import RETURNING, Crew
from streamrl.actors.launch.startup import Starting
from streamrl.config import RunConfig
from streamrl.dataflow import GENERATE, POLICY
from streamrl.errors import ConfigError, StreamError
from streamrl.run_dir.control_requests import LEAVE_S, PLACE_S, Answer, Mailbox, Request

POLL_S = 0.2
ROLE_WORDS = {"generator": "generators", "reward": "scorers"}
"""What the replicas of a role are called where that is not its name."""

Handle = Callable[[Report], None]


@dataclass(frozen=True)
class Awaited:
    """A reply that is waited for: whose it is, what it says, and by when it must have come."""

    name: str
    role: str
    says: str
    deadline: float


@dataclass
class Change:
    """What became of a request, role by role."""

    request: Request
    before: Mapping[str, int]
    joined: dict[str, list[str]] = field(default_factory=dict)
    left: dict[str, list[str]] = field(default_factory=dict)
    failed: dict[str, list[str]] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)

    def line(self, role: str, now: int) -> str:
        """As in `generators: 2 -> 4 (generator-2, generator-3 joined, serving version 17)`."""
        parts = []
        if self.joined.get(role):
            version = self.versions.get(role, -1)
            serving = f", serving version {version}" if version >= 0 else ""
            parts.append(f"{', '.join(self.joined[role])} joined{serving}")
        if self.left.get(role):
            parts.append(f"{', '.join(self.left[role])} left")
        parts += self.failed.get(role, [])
        what = "; ".join(parts) or "nothing to do"
        return f"{ROLE_WORDS.get(role, role)}: {self.before[role]} -> {now} ({what})"


class Scaling:
    """Answers the requests of a run's mailbox, one after the other. Times are s of `clock`.

    `loops` are the replies of the actors' loops and `starting` the actors on their way back: those
    that join and leave are put in and taken out. Iterates over the replies it waits for.
    """

    def __init__(
        self,
        config: RunConfig,
        crew: Crew,
        mailbox: Mailbox,
        *,
        loops: dict[Any, str],
        starting: Starting,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._start_s = starting.timeout_s
        self._serve_s = config.pipeline.stall_s
        self._placement = config.placement
        self._crew = crew
        self._mailbox = mailbox
        self._loops = loops
        self._starting = starting
        self._clock = clock
        self._steps: dict[Any, Awaited] = {}
        self._requests: deque[Request] = deque()
        self._change: Change | None = None
        self._looked_at = -POLL_S
        self._next = {"has a place": self._placed, "started": self._started}

    def __iter__(self) -> Iterator[Any]:
        return iter(self._steps)

    def __contains__(self, reply: Any) -> bool:
        return reply in self._steps

    def look(self, handle: Handle) -> None:
        """See to new requests and to what takes too long; answer what is done."""
        now = self._clock()
        if now < self._looked_at + POLL_S:
            return
        self._looked_at = now
        self._requests += self._mailbox.take()
        for reply, step in list(self._steps.items()):
            if now > step.deadline:
                del self._steps[reply]
                self._give_up(step, handle)
        if self._change is None and self._requests:
            self._begin(self._requests.popleft(), handle)
        self._answer_if_done()

    def arrived(self, reply: Any, handle: Handle) -> None:
        """A reply that was waited for has come."""
        step = self._steps.pop(reply)
        if step.says == "left":
            self._gone(step, handle)
            return
        try:
            value = self._crew.answer(reply, step.name)
        except (StreamError, ConfigError) as error:
            self._fail(step, str(error))
            return
        if step.says == "serves":
            self._join(step, value, handle)
        else:
            self._next[step.says](step)

    def turns_down(self, name: str, reason: str) -> bool:
        """An actor's loops have ended so: if it is a newcomer that has not served yet, it goes.

        Whether it is.
        """
        for reply, step in self._steps.items():
            if step.name == name and step.says == "serves":
                del self._steps[reply]
                self._fail(step, reason)
                return True
        return False

    def close(self) -> None:
        """The run has ended, and nobody answers any more."""
        self._mailbox.close()

    def _begin(self, request: Request, handle: Handle) -> None:
        roles = self._crew.roles
        try:
            for role in request.counts:
                _check_role(role, roles)
                self._check_apart(role)
            self._crew.check_room(request.counts)
        except ConfigError as error:
            self._mailbox.answer(request.id, Answer([str(error)], False))
            return
        before = {role: len(roles[role].names) for role in request.counts}
        self._change = Change(request, before)
        for role, count in request.counts.items():
            for _ in range(count - before[role]):
                name, placed = self._crew.hire(role)
                self._await(placed, Awaited(name, role, "has a place", self._clock() + PLACE_S))
            for name in sorted(roles[role].names, key=_number)[count:]:
                self._send_off(name, role, handle)

    def _check_apart(self, role: str) -> None:
        """Raise ConfigError for a role whose replicas live in the processes of trainers."""
        if self._placement.is_hybrid and role == GENERATE.role:
            ranks = len(self._crew.roles[POLICY].names)
            raise ConfigError(
                f"placement.mode={self._placement.mode}: each of trainer.world_size={ranks} ranks"
                " has a generator in its process; generators cannot be scaled"
            )

    def _await(self, reply: Any, step: Awaited) -> None:
        self._steps[reply] = step

    # One that joins.

    def _placed(self, step: Awaited) -> None:
        deadline = self._clock() + self._start_s
        reply = self._crew.begin(step.name, step.role)
        self._await(reply, Awaited(step.name, step.role, "started", deadline))

    def _started(self, step: Awaited) -> None:
        """It works from here on, and is the run's once it serves a version."""
        loop, serving = self._crew.enlist(step.name, step.role)
        self._loops[loop] = step.name
        deadline = self._clock() + self._serve_s
        self._await(serving, Awaited(step.name, step.role, "serves", deadline))

    def _join(self, step: Awaited, version: int, handle: Handle) -> None:
        assert self._change is not None
        self._change.joined.setdefault(step.role, []).append(step.name)
        self._change.versions[step.role] = max(
            version, self._change.versions.get(step.role, version)
        )
        facts: dict[str, str | int] = {"actor": step.name}
        if version >= 0:
            facts["version"] = version
        handle(EventReport("joined", facts))

    def _fail(self, step: Awaited, reason: str) -> None:
        assert self._change is not None
        if step.says == "serves":
            self._drop_loop(step.name)
            self._crew.take_back(step.name, step.role)
        else:
            self._crew.dismiss(step.name)
        line = f"{step.name} cannot join: {reason.splitlines()[0]}"
        self._change.failed.setdefault(step.role, []).append(line)

    # One that leaves.

    def _send_off(self, name: str, role: str, handle: Handle) -> None:
        self._crew.send_off(name, role)
        step = Awaited(name, role, "left", self._clock() + LEAVE_S)
        if self._starting.drop(name):
            self._gone(step, handle)  # it holds nothing: it was on its way back
            return
        for loop in self._drop_loop(name):
            self._await(loop, step)

    def _drop_loop(self, name: str) -> list[Any]:
        """The reply of an actor's loops, which nobody else waits for any more."""
        found = [reply for reply, own in self._loops.items() if own == name]
        for reply in found:
            del self._loops[reply]
        return found

    def _gone(self, step: Awaited, handle: Handle) -> None:
        assert self._change is not None
        self._crew.part_with(step.name)
        self._change.left.setdefault(step.role, []).append(step.name)
        handle(EventReport("left", {"actor": step.name}))

    def _give_up(self, step: Awaited, handle: Handle) -> None:
        match step.says:
            case "left":
                self._gone(step, handle)
            case "serves":
                self._fail(step, f"it held no version of the weights after {self._serve_s:g} s")
            case "has a place":
                asks = self._crew.asks_for(step.role)
                self._fail(step, f"it has no place after {PLACE_S:g} s: it {asks}")
            case _:
                self._fail(step, f"it was not ready within {self._start_s:g} s")

    def _answer_if_done(self) -> None:
        change = self._change
        if change is None or self._steps:
            return
        self._change = None
        lines = [
            change.line(role, len(self._crew.roles[role].names)) for role in change.request.counts
        ]
        self._mailbox.answer(change.request.id, Answer(lines, not change.failed))


def _check_role(role: str, roles: Mapping[str, Any]) -> None:
    serving = [name for name, own in roles.items() if own.kind in RETURNING]
    if role not in serving:
        known = ", ".join(ROLE_WORDS.get(name, name) for name in serving)
        raise ConfigError(f"this run has no {ROLE_WORDS.get(role, role)} to scale, only {known}")


def _number(name: str) -> int:
    return int(name.rpartition("-")[2])

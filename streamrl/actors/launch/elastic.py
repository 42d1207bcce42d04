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

from streamrl.actors.coordination.driver_events import DriverReport, EventReport
from streamrl.actors.launch.actor_registry import RESTARTABLE_KINDS, ActorRegistry
from streamrl.actors.launch.startup import PendingStarts
from streamrl.config import RunConfig
from streamrl.dataflow import GENERATE_CALL, POLICY
from streamrl.errors import ConfigError, StreamError
from streamrl.run_dir.control_requests import (
    LEAVE_TIMEOUT_S,
    PLACE_TIMEOUT_S,
    ScaleAnswer,
    ScaleRequest,
    ScaleRequestInbox,
)

POLL_INTERVAL_S = 0.2
ROLE_LABELS = {"generator": "generators", "reward": "scorers"}
"""What the replicas of a role are called where that is not its name."""

ReportHandler = Callable[[DriverReport], None]


@dataclass(frozen=True)
class PendingReply:
    """A reply that is waited for: whose it is, what it says, and by when it must have come."""

    name: str
    role: str
    milestone: str
    deadline: float


@dataclass
class ScaleChange:
    """What became of a request, role by role."""

    request: ScaleRequest
    counts_before: Mapping[str, int]
    added_replicas: dict[str, list[str]] = field(default_factory=dict)
    removed_replicas: dict[str, list[str]] = field(default_factory=dict)
    failure_lines: dict[str, list[str]] = field(default_factory=dict)
    served_versions: dict[str, int] = field(default_factory=dict)

    def format_line(self, role: str, now: int) -> str:
        """As in `generators: 2 -> 4 (generator-2, generator-3 joined, serving version 17)`."""
        parts = []
        if self.added_replicas.get(role):
            version = self.served_versions.get(role, -1)
            serving = f", serving version {version}" if version >= 0 else ""
            parts.append(f"{', '.join(self.added_replicas[role])} joined{serving}")
        if self.removed_replicas.get(role):
            parts.append(f"{', '.join(self.removed_replicas[role])} left")
        parts += self.failure_lines.get(role, [])
        what = "; ".join(parts) or "nothing to do"
        return f"{ROLE_LABELS.get(role, role)}: {self.counts_before[role]} -> {now} ({what})"


class ReplicaScaler:
    """Answers the requests of a run's mailbox, one after the other. Times are s of `clock`.

    `loops` are the replies of the actors' loops and `starting` the actors on their way back: those
    that join and leave are put in and taken out. Iterates over the replies it waits for.
    """

    def __init__(
        self,
        config: RunConfig,
        crew: ActorRegistry,
        mailbox: ScaleRequestInbox,
        *,
        loops: dict[Any, str],
        starting: PendingStarts,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._start_timeout_s = starting.timeout_s
        self._serve_timeout_s = config.pipeline.stall_s
        self._placement = config.placement
        self._registry = crew
        self._request_inbox = mailbox
        self._loop_replies = loops
        self._pending_starts = starting
        self._clock = clock
        self._pending_replies: dict[Any, PendingReply] = {}
        self._requests: deque[ScaleRequest] = deque()
        self._change: ScaleChange | None = None
        self._polled_at_s = -POLL_INTERVAL_S
        self._milestone_handlers = {
            "has a place": self._start_replica,
            "started": self._register_replica,
        }

    def __iter__(self) -> Iterator[Any]:
        return iter(self._pending_replies)

    def __contains__(self, reply: Any) -> bool:
        return reply in self._pending_replies

    def poll_requests(self, handle: ReportHandler) -> None:
        """See to new requests and to what takes too long; answer what is done."""
        now = self._clock()
        if now < self._polled_at_s + POLL_INTERVAL_S:
            return
        self._polled_at_s = now
        self._requests += self._request_inbox.take_requests()
        for reply, step in list(self._pending_replies.items()):
            if now > step.deadline:
                del self._pending_replies[reply]
                self._handle_timeout(step, handle)
        if self._change is None and self._requests:
            self._start_change(self._requests.popleft(), handle)
        self._answer_if_done()

    def handle_reply(self, reply: Any, handle: ReportHandler) -> None:
        """A reply that was waited for has come."""
        step = self._pending_replies.pop(reply)
        if step.milestone == "left":
            self._finish_leave(step, handle)
            return
        try:
            value = self._registry.fetch_reply(reply, step.name)
        except (StreamError, ConfigError) as error:
            self._reject_replica(step, str(error))
            return
        if step.milestone == "serves":
            self._finish_join(step, value, handle)
        else:
            self._milestone_handlers[step.milestone](step)

    def reject_if_unserved(self, name: str, reason: str) -> bool:
        """An actor's loops have ended so: if it is a newcomer that has not served yet, it goes.

        Whether it is.
        """
        for reply, step in self._pending_replies.items():
            if step.name == name and step.milestone == "serves":
                del self._pending_replies[reply]
                self._reject_replica(step, reason)
                return True
        return False

    def close(self) -> None:
        """The run has ended, and nobody answers any more."""
        self._request_inbox.close()

    def _start_change(self, request: ScaleRequest, handle: ReportHandler) -> None:
        roles = self._registry.roles
        try:
            for role in request.counts:
                _check_role(role, roles)
                self._check_scalable(role)
            self._registry.check_capacity(request.counts)
        except ConfigError as error:
            self._request_inbox.write_answer(request.id, ScaleAnswer([str(error)], False))
            return
        before = {role: len(roles[role].names) for role in request.counts}
        self._change = ScaleChange(request, before)
        for role, count in request.counts.items():
            for _ in range(count - before[role]):
                name, placed = self._registry.spawn_replica(role)
                self._add_pending(
                    placed, PendingReply(name, role, "has a place", self._clock() + PLACE_TIMEOUT_S)
                )
            for name in sorted(roles[role].names, key=_parse_replica_index)[count:]:
                self._drain_replica(name, role, handle)

    def _check_scalable(self, role: str) -> None:
        """Raise ConfigError for a role whose replicas live in the processes of trainers."""
        if self._placement.is_hybrid and role == GENERATE_CALL.role:
            ranks = len(self._registry.roles[POLICY].names)
            raise ConfigError(
                f"placement.mode={self._placement.mode}: each of trainer.world_size={ranks} ranks"
                " has a generator in its process; generators cannot be scaled"
            )

    def _add_pending(self, reply: Any, step: PendingReply) -> None:
        self._pending_replies[reply] = step

    # One that joins.

    def _start_replica(self, step: PendingReply) -> None:
        deadline = self._clock() + self._start_timeout_s
        reply = self._registry.start_replica(step.name, step.role)
        self._add_pending(reply, PendingReply(step.name, step.role, "started", deadline))

    def _register_replica(self, step: PendingReply) -> None:
        """It works from here on, and is the run's once it serves a version."""
        loop, serving = self._registry.register_replica(step.name, step.role)
        self._loop_replies[loop] = step.name
        deadline = self._clock() + self._serve_timeout_s
        self._add_pending(serving, PendingReply(step.name, step.role, "serves", deadline))

    def _finish_join(self, step: PendingReply, version: int, handle: ReportHandler) -> None:
        assert self._change is not None
        self._change.added_replicas.setdefault(step.role, []).append(step.name)
        self._change.served_versions[step.role] = max(
            version, self._change.served_versions.get(step.role, version)
        )
        facts: dict[str, str | int] = {"actor": step.name}
        if version >= 0:
            facts["version"] = version
        handle(EventReport("joined", facts))

    def _reject_replica(self, step: PendingReply, reason: str) -> None:
        assert self._change is not None
        if step.milestone == "serves":
            self._pop_loops(step.name)
            self._registry.reject_replica(step.name, step.role)
        else:
            self._registry.kill_actor(step.name)
        line = f"{step.name} cannot join: {reason.splitlines()[0]}"
        self._change.failure_lines.setdefault(step.role, []).append(line)

    # One that leaves.

    def _drain_replica(self, name: str, role: str, handle: ReportHandler) -> None:
        self._registry.drain_replica(name, role)
        step = PendingReply(name, role, "left", self._clock() + LEAVE_TIMEOUT_S)
        if self._pending_starts.drop_actor(name):
            self._finish_leave(step, handle)  # it holds nothing: it was on its way back
            return
        for loop in self._pop_loops(name):
            self._add_pending(loop, step)

    def _pop_loops(self, name: str) -> list[Any]:
        """The reply of an actor's loops, which nobody else waits for any more."""
        found = [reply for reply, own in self._loop_replies.items() if own == name]
        for reply in found:
            del self._loop_replies[reply]
        return found

    def _finish_leave(self, step: PendingReply, handle: ReportHandler) -> None:
        assert self._change is not None
        self._registry.remove_replica(step.name)
        self._change.removed_replicas.setdefault(step.role, []).append(step.name)
        handle(EventReport("left", {"actor": step.name}))

    def _handle_timeout(self, step: PendingReply, handle: ReportHandler) -> None:
        match step.milestone:
            case "left":
                self._finish_leave(step, handle)
            case "serves":
                self._reject_replica(
                    step, f"it held no version of the weights after {self._serve_timeout_s:g} s"
                )
            case "has a place":
                asks = self._registry.describe_demand(step.role)
                self._reject_replica(
                    step, f"it has no place after {PLACE_TIMEOUT_S:g} s: it {asks}"
                )
            case _:
                self._reject_replica(step, f"it was not ready within {self._start_timeout_s:g} s")

    def _answer_if_done(self) -> None:
        change = self._change
        if change is None or self._pending_replies:
            return
        self._change = None
        lines = [
            change.format_line(role, len(self._registry.roles[role].names))
            for role in change.request.counts
        ]
        self._request_inbox.write_answer(
            change.request.id, ScaleAnswer(lines, not change.failure_lines)
        )


def _check_role(role: str, roles: Mapping[str, Any]) -> None:
    serving = [name for name, own in roles.items() if own.kind in RESTARTABLE_KINDS]
    if role not in serving:
        known = ", ".join(ROLE_LABELS.get(name, name) for name in serving)
        raise ConfigError(f"this run has no {ROLE_LABELS.get(role, role)} to scale, only {known}")


def _parse_replica_index(name: str) -> int:
    return int(name.rpartition("-")[2])

"""Elastic scaling: replicas join or leave a run on request.

A change is a series of replies with deadlines, awaited beside all others:

    join:   spawn -> "placed" -> start -> "started" -> register -> "serves"
    leave:  drain -> "left"

No method blocks. Until a joining replica has served, its failure is reported to the requester and
does not end the run.
"""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from streamrl.actors.coordination.driver_events import DriverReport, EventReport
from streamrl.actors.launch.actor_registry import RESTARTABLE_KINDS, ActorRegistry
from streamrl.actors.transport.ray_calls import fetch_reply
from streamrl.config.run_config import RunConfig
from streamrl.dataflow import GENERATE_CALL, POLICY, SERVING_ROLES
from streamrl.errors import ConfigError, DeadlineError, StreamError, get_first_line
from streamrl.run_dir.control_requests import (
    LEAVE_TIMEOUT_S,
    PLACE_TIMEOUT_S,
    ScaleAnswer,
    ScaleRequest,
    ScaleRequestInbox,
)
from streamrl.weights.transport import estimate_model_send_s

POLL_INTERVAL_S = 0.2
ReportHandler = Callable[[DriverReport], None]


@dataclass(frozen=True)
class PendingReply:
    """Next step of a replica that joins or leaves: the milestone that its reply marks.

    deadline: latest time of the reply.
    """

    name: str
    role: str
    milestone: str
    deadline: float


@dataclass
class ScaleChange:
    """Scale request in progress: replicas at its start, and by role what became of each replica."""

    request: ScaleRequest
    counts_before: Mapping[str, int]
    outcomes: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    has_failed: bool = False

    def format_line(self, role: str, now: int) -> str:
        """Format the answer for a role that now has `now` replicas.

        Example: `generators: 2 -> 3 (generator-2 joined, serving version 17)`.
        """
        details = "; ".join(self.outcomes[role]) or "nothing to do"
        return f"{SERVING_ROLES[role].label}: {self.counts_before[role]} -> {now} ({details})"


class PendingStarts:
    """Pending replies of actors' `start` calls, each with a deadline `timeout_s` after the call.

    Iteration yields the replies. Times are seconds of `clock`.
    """

    def __init__(self, timeout_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.timeout_s = timeout_s
        self._clock = clock
        self._deadlines: dict[Any, tuple[str, float]] = {}

    def __len__(self) -> int:
        return len(self._deadlines)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._deadlines)

    @property
    def actor_names(self) -> str:
        """Names of the actors that are starting, as text."""
        return ", ".join(sorted(name for name, _ in self._deadlines.values()))

    def add_actor(self, reply: Any, name: str) -> None:
        self._deadlines[reply] = name, self._clock() + self.timeout_s

    def pop_actor(self, reply: Any) -> str:
        """Remove a finished reply and return the name of its actor."""
        return self._deadlines.pop(reply)[0]

    def drop_actor(self, name: str) -> bool:
        """Stop waiting for an actor; return whether the actor was starting."""
        replies = [
            reply for reply, (pending_name, _) in self._deadlines.items() if pending_name == name
        ]
        for reply in replies:
            del self._deadlines[reply]
        return bool(replies)

    def raise_if_late(self) -> None:
        """Raise DeadlineError if an actor has not started by its deadline."""
        now = self._clock()
        late = sorted(name for name, deadline in self._deadlines.values() if now > deadline)
        if late:
            raise DeadlineError(f"{', '.join(late)}: not ready within {self.timeout_s:g} s")


class ReplicaScaler:
    """Carries out the scale requests of a run, in turn. Times are seconds of `clock`.

    loops: pending replies of all actors' loops. The scaler adds those of joining replicas and
    removes those of leaving ones.
    model_bytes: size of the largest model's weight files, which a joining replica loads.
    starting: pending restarts of actors, from which the scaler removes leaving replicas.

    Iteration yields the replies that the scaler waits for; pass finished ones to `handle_reply`.
    """

    def __init__(  # noqa: PLR0913
        self,
        config: RunConfig,
        registry: ActorRegistry,
        inbox: ScaleRequestInbox,
        *,
        loops: dict[Any, str],
        starting: PendingStarts,
        model_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._start_timeout_s = starting.timeout_s
        self._serve_timeout_s = config.pipeline.stall_s + estimate_model_send_s(model_bytes)
        self._placement = config.placement
        self._registry = registry
        self._request_inbox = inbox
        self._loop_replies = loops
        self._pending_starts = starting
        self._clock = clock
        self._pending_replies: dict[Any, PendingReply] = {}
        self._requests: deque[ScaleRequest] = deque()
        self._change: ScaleChange | None = None
        self._polled_at_s = -POLL_INTERVAL_S

    def __iter__(self) -> Iterator[Any]:
        return iter(self._pending_replies)

    def __contains__(self, reply: Any) -> bool:
        return reply in self._pending_replies

    def poll_requests(self, handle: ReportHandler) -> None:
        """Take new scale requests, handle late replicas, and answer a request that is finished.

        handle: receives events of replicas that join or leave.
        """
        now = self._clock()
        if now < self._polled_at_s + POLL_INTERVAL_S:
            return
        self._polled_at_s = now
        self._requests += self._request_inbox.take_requests()
        for reply, pending in list(self._pending_replies.items()):
            if now > pending.deadline:
                del self._pending_replies[reply]
                self._handle_timeout(pending, handle)
        if self._change is None and self._requests:
            self._start_change(self._requests.popleft(), handle)
        self._answer_if_done()

    def handle_reply(self, reply: Any, handle: ReportHandler) -> None:
        """Advance a joining or leaving replica to its next step after a reply has arrived."""
        pending = self._pending_replies.pop(reply)
        if pending.milestone == "left":
            self._finish_leave(pending, handle)
            return
        try:
            value = fetch_reply(reply, pending.name)
        except (StreamError, ConfigError) as error:
            self._reject_replica(pending, str(error))
            return
        if pending.milestone == "serves":
            self._finish_join(pending, value, handle)
        elif pending.milestone == "placed":
            started = self._registry.start_replica(pending.name, pending.role)
            self._await_milestone(started, pending, "started", self._start_timeout_s)
        else:
            loop, serving = self._registry.register_replica(pending.name, pending.role)
            self._loop_replies[loop] = pending.name
            self._await_milestone(serving, pending, "serves", self._serve_timeout_s)

    def reject_if_joining(self, name: str, reason: str) -> bool:
        """Return whether the failed actor is a replica that has not served yet, and remove it.

        The answer to the scale request then states `reason`. The failure of any other actor
        concerns the run.
        """
        for reply, pending in self._pending_replies.items():
            if pending.name == name and pending.milestone == "serves":
                del self._pending_replies[reply]
                self._reject_replica(pending, reason)
                return True
        return False

    def close(self) -> None:
        """Accept no more scale requests: clients that send or wait get an error at once."""
        self._request_inbox.close()

    def _start_change(self, request: ScaleRequest, handle: ReportHandler) -> None:
        """Begin a scale request: create the missing replicas, drain the superfluous ones.

        Answers an impossible request with its error.
        """
        roles = self._registry.roles
        try:
            for role in request.counts:
                self._check_scalable(role)
            self._registry.check_capacity(request.counts)
        except ConfigError as error:
            self._request_inbox.write_answer(request.id, ScaleAnswer([str(error)], False))
            return
        counts_before = {role: len(roles[role].names) for role in request.counts}
        self._change = ScaleChange(request, counts_before)
        for role, count in request.counts.items():
            for _ in range(count - counts_before[role]):
                name, placed_reply = self._registry.spawn_replica(role)
                deadline = self._clock() + PLACE_TIMEOUT_S
                self._pending_replies[placed_reply] = PendingReply(name, role, "placed", deadline)
            in_order = sorted(roles[role].names, key=lambda name: int(name.rpartition("-")[2]))
            for name in in_order[count:]:
                self._drain_replica(name, role, handle)

    def _check_scalable(self, role: str) -> None:
        """Raise ConfigError for a role without replicas, and for generators of hybrid workers."""
        serving = [
            SERVING_ROLES[name].label
            for name, role_actors in self._registry.roles.items()
            if role_actors.kind in RESTARTABLE_KINDS
        ]
        if role not in self._registry.roles or role not in SERVING_ROLES:
            raise ConfigError(f"this run has no {role} to scale; scalable: {', '.join(serving)}")
        if self._placement.is_hybrid and role == GENERATE_CALL.role:
            ranks = len(self._registry.roles[POLICY].names)
            raise ConfigError(
                f"placement.mode={self._placement.mode}: each of trainer.world_size={ranks} ranks"
                " has a generator in its process; generators cannot be scaled"
            )

    # Join.

    def _await_milestone(
        self, reply: Any, pending: PendingReply, milestone: str, timeout_s: float
    ) -> None:
        deadline = self._clock() + timeout_s
        self._pending_replies[reply] = replace(pending, milestone=milestone, deadline=deadline)

    def _finish_join(self, pending: PendingReply, version: int, handle: ReportHandler) -> None:
        """Record that a joining replica serves; from now on its failure concerns the run."""
        assert self._change is not None
        serving = f", serving version {version}" if version >= 0 else ""
        self._change.outcomes[pending.role].append(f"{pending.name} joined{serving}")
        fields: dict[str, str | int] = {"actor": pending.name}
        if version >= 0:
            fields["version"] = version
        handle(EventReport("joined", fields))

    def _reject_replica(self, pending: PendingReply, reason: str) -> None:
        """Remove a joining replica that failed, and note the reason for the answer."""
        assert self._change is not None
        if pending.milestone == "serves":
            self._pop_loops(pending.name)
            self._registry.reject_replica(pending.name, pending.role)
        else:
            self._registry.kill_actor(pending.name)
        line = f"{pending.name} cannot join: {get_first_line(reason)}"
        self._change.outcomes[pending.role].append(line)
        self._change.has_failed = True

    # Leave.

    def _drain_replica(self, name: str, role: str, handle: ReportHandler) -> None:
        """Make a replica leave: it returns its groups, and its loops then end."""
        self._registry.drain_replica(name, role)
        pending = PendingReply(name, role, "left", self._clock() + LEAVE_TIMEOUT_S)
        if self._pending_starts.drop_actor(name):
            self._finish_leave(pending, handle)  # a restarting replica holds no group
            return
        for loop in self._pop_loops(name):
            self._pending_replies[loop] = pending

    def _pop_loops(self, name: str) -> list[Any]:
        replies = [reply for reply, actor_name in self._loop_replies.items() if actor_name == name]
        for reply in replies:
            del self._loop_replies[reply]
        return replies

    def _finish_leave(self, pending: PendingReply, handle: ReportHandler) -> None:
        """Kill a leaving replica once its loops have ended or its time is up."""
        assert self._change is not None
        self._registry.remove_replica(pending.name)
        self._change.outcomes[pending.role].append(f"{pending.name} left")
        handle(EventReport("left", {"actor": pending.name}))

    def _handle_timeout(self, pending: PendingReply, handle: ReportHandler) -> None:
        """Give up a replica that missed its deadline."""
        match pending.milestone:
            case "left":
                self._finish_leave(pending, handle)
            case "serves":
                self._reject_replica(
                    pending, f"no version of the weights loaded within {self._serve_timeout_s:g} s"
                )
            case "placed":
                demand = self._registry.describe_demand(pending.role)
                self._reject_replica(
                    pending, f"not placed within {PLACE_TIMEOUT_S:g} s: it {demand}"
                )
            case _:
                self._reject_replica(pending, f"not ready within {self._start_timeout_s:g} s")

    def _answer_if_done(self) -> None:
        """Answer the scale request in progress once no replica of it is joining or leaving."""
        change = self._change
        if change is None or self._pending_replies:
            return
        self._change = None
        lines = [
            change.format_line(role, len(self._registry.roles[role].names))
            for role in change.request.counts
        ]
        self._request_inbox.write_answer(
            change.request.id, ScaleAnswer(lines, not change.has_failed)
        )

"""The leases of a shard: who may work on what, until when, and who gets a second try."""

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from streamrl.buffer.group import (
    TOKENS_PER_INCARNATION,
    ActiveLease,
    GroupState,
    ShardState,
    make_lease_record,
)
from streamrl.buffer.log.segment_file import JournalRecord
from streamrl.messages import GroupLease

MIN_COMPACT_SIZE = 1000
"""Leases that are looked after before those that have ended are sorted out."""


@dataclass(frozen=True)
class LeaseRequest:
    """What a holder asks for. The same `id` again is the same request, and gets the same leases.

    `max_tokens` bounds the tokens of the groups handed out together; one is always handed out.
    """

    stage: str
    holder: str
    max_groups: int
    columns: tuple[str, ...] = ()
    max_tokens: int | None = None
    request_id: str = ""


@dataclass(frozen=True)
class OverdueLease:
    """Work that one holder has had for long: a line of the stall watchdog. Age in s."""

    uid: str
    stage: str
    holder: str
    attempt: int
    age_s: float
    token: int = field(default=0, compare=False)

    @property
    def stall_key(self) -> tuple[str, str, int]:
        """What tells one stall from another."""
        return self.uid, self.stage, self.attempt


class LeaseTable:
    """Hands out the leases of a shard and knows when each ends. Times are s of the shard's clock.

    A lease ends when its time is up unless it is renewed; the token is what makes it good, and no
    token is given twice, whatever process has the shard.
    """

    def __init__(self, book: ShardState, *, lease_s: float, hedge_s: float | None) -> None:
        book.lease_s = lease_s
        self._state = book
        self._lease_s = lease_s
        self._hedge_s = hedge_s
        self._tokens = itertools.count(book.incarnation * TOKENS_PER_INCARNATION + 1)
        self._expiries: list[tuple[float, int, GroupLease]] = []
        self._compact_at = MIN_COMPACT_SIZE
        self._last_grants: dict[tuple[str, str], tuple[str, list[tuple[str, int]]]] = {}
        found = [held for stage in book.stages for _, held in self._active_leases(stage)]
        given: dict[tuple[str, str, str], list[ActiveLease]] = {}
        for held in sorted(found, key=lambda held: held.lease.token):
            self._restore_lease(held)
            given.setdefault((held.lease.stage, held.lease.holder, held.request_id), []).append(
                held
            )
        for leases in given.values():
            self.track_leases(leases)

    def _restore_lease(self, held: ActiveLease) -> None:
        """A lease that was out when the shard died: its holder has as long as a new one."""
        now = self._state.clock()
        if held.lease.stage != self._state.last_stage:
            held.expires_at = now + self._lease_s
        held.lease = replace(held.lease, granted_at=now, expires_at=held.expires_at)

    def track_leases(self, leases: Sequence[ActiveLease]) -> None:
        """Look after leases that one request was given just now."""
        first = leases[0]
        # Who asks has one request at a time: the last is the only one it may repeat.
        answer = first.request_id, [(held.lease.uid, held.lease.token) for held in leases]
        self._last_grants[first.lease.stage, first.lease.holder] = answer
        for held in leases:
            self._track_expiry(held)

    def _track_expiry(self, held: ActiveLease) -> None:
        if held.expires_at == math.inf:
            return
        heapq.heappush(self._expiries, (held.expires_at, held.lease.token, held.lease))
        if len(self._expiries) > self._compact_at:
            # Most have been settled long before their time.
            self._expiries = [one for one in self._expiries if self._is_active(one[2])]
            heapq.heapify(self._expiries)
            self._compact_at = MIN_COMPACT_SIZE + 2 * len(self._expiries)

    def _is_active(self, lease: GroupLease) -> bool:
        group = self._state.groups.get(lease.uid)
        return group is not None and group.find_lease(lease.stage, lease.token) is not None

    def make_lease_record(
        self, groups: Sequence[GroupState], request: LeaseRequest
    ) -> JournalRecord:
        """The record that leases `groups` to a request."""
        stage = request.stage
        grants = [(g.uid, next(self._tokens), g.failures[stage] + 1) for g in groups]
        return make_lease_record(stage, request.holder, request=request.request_id, grants=grants)

    def find_by_request(self, request: LeaseRequest) -> list[tuple[GroupState, ActiveLease]]:
        """The leases that this very request was given: its answer got lost."""
        answered, tokens = self._last_grants.get((request.stage, request.holder), ("", []))
        if not request.request_id or request.request_id != answered:
            return []
        found = ((self._state.groups.get(uid), token) for uid, token in tokens)
        held = ((group, group.find_lease(request.stage, token)) for group, token in found if group)
        return [(group, one) for group, one in held if one]

    def find_hedgeable(self, request: LeaseRequest) -> list[GroupState]:
        """Groups that one other holder has had for long enough to give them out once more."""
        if self._hedge_s is None:
            return []
        since = self._state.clock() - self._hedge_s
        slow = [
            (held.lease.granted_at, group)
            for group, held in self._active_leases(request.stage)
            if len(group.leases[request.stage]) == 1
            and held.lease.holder != request.holder
            and held.lease.granted_at <= since
        ]
        slow.sort(key=lambda pair: (pair[0], pair[1].admission_order))
        return [group for _, group in slow[: request.max_groups]]

    def renew_leases(self, leases: Sequence[GroupLease]) -> list[GroupLease]:
        """Give leases their full time again; returns those that are no longer good."""
        lost = []
        for lease in leases:
            group = self._state.groups.get(lease.uid)
            held = group.find_lease(lease.stage, lease.token) if group else None
            if held is None:
                lost.append(lease)
            elif lease.stage != self._state.last_stage:
                held.expires_at = self._state.clock() + self._lease_s
        return lost

    def pop_expired(self) -> Iterator[tuple[GroupState, GroupLease]]:
        """The leases whose time is up; they are no longer looked after."""
        now = self._state.clock()
        while self._expiries and self._expiries[0][0] <= now:
            _, token, lease = heapq.heappop(self._expiries)
            group = self._state.groups.get(lease.uid)
            held = group.find_lease(lease.stage, token) if group else None
            if group is None or held is None:
                continue
            if held.expires_at > now:
                self._track_expiry(held)
            else:
                yield group, lease

    def find_by_holder(self, holder: str) -> list[tuple[GroupState, GroupLease]]:
        """The leases of one holder, in every stage."""
        return [
            (group, held.lease)
            for stage in self._state.stages
            for group, held in self._active_leases(stage)
            if held.lease.holder == holder
        ]

    def find_overdue(self, age_s: float) -> list[OverdueLease]:
        """Work that was handed out longer than `age_s` ago, the last stage's apart."""
        now = self._state.clock()
        leases = (
            held.lease
            for stage in self._state.stages
            if stage != self._state.last_stage
            for _, held in self._active_leases(stage)
        )
        return [
            OverdueLease(
                one.uid, one.stage, one.holder, one.attempt, now - one.granted_at, one.token
            )
            for one in leases
            if one.granted_at <= now - age_s
        ]

    def select_active(
        self, found: Sequence[OverdueLease]
    ) -> Iterator[tuple[OverdueLease, GroupState, GroupLease]]:
        """Those of overdue work that are where they were, with their leases."""
        for one in found:
            group = self._state.groups.get(one.uid)
            held = group.find_lease(one.stage, one.token) if group else None
            if group and held:
                yield one, group, held.lease

    def next_change_time(self, stage: str) -> float:
        """When waiting for work of a stage is next worth another look."""
        expiry = self._expiries[0][0] if self._expiries else float("inf")
        if self._hedge_s is None:
            return expiry
        now = self._state.clock()
        hedges = (held.lease.granted_at + self._hedge_s for _, held in self._active_leases(stage))
        return min(expiry, min((at for at in hedges if at > now), default=float("inf")))

    def _active_leases(self, stage: str) -> list[tuple[GroupState, ActiveLease]]:
        """All leases of a stage, in the order of their groups."""
        return [
            (group, held)
            for group in self._state.groups.values()
            for held in group.leases.get(stage, ())
        ]

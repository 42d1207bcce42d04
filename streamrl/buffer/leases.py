"""Leases of a queue shard: granting, renewing and expiring."""

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
from streamrl.buffer.segment_file import JournalRecord
from streamrl.messages import GroupLease

MIN_COMPACT_SIZE = 1000
"""Size of the expiry heap below which it is not compacted."""


@dataclass(frozen=True)
class LeaseRequest:
    """Request of a process (`holder`) for at most `max_groups` groups that are ready for a stage.

    columns: columns to deliver with the groups.
    request_id: a request with the id of an earlier request is its retry and gets the same leases.
    """

    stage: str
    holder: str
    max_groups: int
    columns: tuple[str, ...] = ()
    request_id: str = ""


@dataclass(frozen=True)
class OverdueLease:
    """An active lease that makes no progress; `age_s` is the time since its grant or last progress.

    Progress is growth of its partial rollouts.
    """

    uid: str
    stage: str
    holder: str
    attempt: int
    age_s: float
    token: int = field(default=0, compare=False)

    @property
    def stall_key(self) -> tuple[str, str, int]:
        """Key of the stalled work, by which the watchdog reports a stall only once."""
        return self.uid, self.stage, self.attempt


class LeaseTable:
    """All leases of a queue shard and their expiry. Times: s of the shard's clock.

    A lease ends when it expires without renewal. A lease is valid if its token is active; a token
    is never reused, not even by a later incarnation of the shard.
    """

    def __init__(self, state: ShardState, *, lease_s: float) -> None:
        state.lease_s = lease_s
        self._state = state
        self._lease_s = lease_s
        self._tokens = itertools.count(state.incarnation * TOKENS_PER_INCARNATION + 1)
        self._expiries: list[tuple[float, int, GroupLease]] = []
        self._compact_at = MIN_COMPACT_SIZE
        #: Time at which a partial rollout has last grown, or the shard has started.
        self.grown_at = state.clock()
        self._last_grants: dict[tuple[str, str], tuple[str, list[tuple[str, int]]]] = {}
        recovered = [active for _, active in self._list_active_leases()]
        by_request: dict[tuple[str, str, str], list[ActiveLease]] = {}
        for active in sorted(recovered, key=lambda active: active.lease.token):
            self._restore_lease(active)
            request = active.lease.stage, active.lease.holder, active.request_id
            by_request.setdefault(request, []).append(active)
        for leases in by_request.values():
            self.track_leases(leases)

    def _restore_lease(self, active: ActiveLease) -> None:
        """Restart the term of a lease that was recovered from the journal."""
        now = self._state.clock()
        if active.lease.stage != self._state.last_stage:
            active.expires_at = now + self._lease_s
        active.lease = replace(active.lease, granted_at=now, expires_at=active.expires_at)

    def track_leases(self, leases: Sequence[ActiveLease]) -> None:
        """Remember the leases granted to a request, for their expiry and a retry of the request."""
        first = leases[0]
        # A holder has one request per stage at a time, so only the last can be retried.
        grants = [(active.lease.uid, active.lease.token) for active in leases]
        self._last_grants[first.lease.stage, first.lease.holder] = first.request_id, grants
        for active in leases:
            self._track_expiry(active)

    def _track_expiry(self, active: ActiveLease) -> None:
        """Add a lease to the heap of expiries, unless the lease never expires."""
        if active.expires_at == math.inf:
            return
        heapq.heappush(self._expiries, (active.expires_at, active.lease.token, active.lease))
        if len(self._expiries) > self._compact_at:
            # Most leases settle long before expiry, but stay in the heap until this compaction.
            self._expiries = [entry for entry in self._expiries if self._is_active(entry[2])]
            heapq.heapify(self._expiries)
            self._compact_at = MIN_COMPACT_SIZE + 2 * len(self._expiries)

    def _is_active(self, lease: GroupLease) -> bool:
        group = self._state.groups.get(lease.uid)
        return group is not None and group.find_lease(lease.stage, lease.token) is not None

    def make_lease_record(
        self, groups: Sequence[GroupState], request: LeaseRequest
    ) -> JournalRecord:
        """Build the journal record that leases `groups` to the requesting holder; draws tokens."""
        stage = request.stage
        grants = [(g.uid, next(self._tokens), g.failures[stage] + 1) for g in groups]
        return make_lease_record(stage, request.holder, request=request.request_id, grants=grants)

    def find_by_request(self, request: LeaseRequest) -> list[tuple[GroupState, ActiveLease]]:
        """Return the groups and leases that were granted to an earlier attempt of this request.

        A holder repeats a request if the reply was lost. Returns [] for a new request.
        """
        request_id, tokens = self._last_grants.get((request.stage, request.holder), ("", []))
        if not request.request_id or request.request_id != request_id:
            return []
        groups = ((self._state.groups.get(uid), token) for uid, token in tokens)
        pairs = (
            (group, group.find_lease(request.stage, token)) for group, token in groups if group
        )
        return [(group, active) for group, active in pairs if active]

    def renew_leases(self, leases: Sequence[GroupLease]) -> list[GroupLease]:
        """Extend each lease to `lease_s` from now; return the leases that are no longer active."""
        lost = []
        for lease in leases:
            group = self._state.groups.get(lease.uid)
            active = group.find_lease(lease.stage, lease.token) if group else None
            if active is None:
                lost.append(lease)
            elif lease.stage != self._state.last_stage:
                active.expires_at = self._state.clock() + self._lease_s
        return lost

    def pop_expired(self) -> Iterator[tuple[GroupState, GroupLease]]:
        """Yield (group, lease) for each lease that has expired, and stop tracking the lease."""
        now = self._state.clock()
        while self._expiries and self._expiries[0][0] <= now:
            _, token, lease = heapq.heappop(self._expiries)
            group = self._state.groups.get(lease.uid)
            active = group.find_lease(lease.stage, token) if group else None
            if group is None or active is None:
                continue
            if active.expires_at > now:  # renewed since this entry was pushed
                self._track_expiry(active)
            else:
                yield group, lease

    def find_by_holder(self, holder: str) -> list[tuple[GroupState, GroupLease]]:
        """Return (group, lease) for each active lease of a holder."""
        return [
            (group, active.lease)
            for group, active in self._list_active_leases()
            if active.lease.holder == holder
        ]

    def record_growth(self, group: GroupState, lease: GroupLease) -> None:
        """Record that the holder of a lease has saved longer partial rollouts."""
        self.grown_at = self._state.clock()
        if active := group.find_lease(lease.stage, lease.token):
            active.grown_at = self.grown_at

    def find_overdue(self, age_s: float) -> list[OverdueLease]:
        """Return active leases without progress for `age_s`, except those of the last stage."""
        now = self._state.clock()
        return [
            OverdueLease(
                lease.uid, lease.stage, lease.holder, lease.attempt, now - progress_at, lease.token
            )
            for lease, progress_at in (
                (active.lease, active.progress_at) for _, active in self._list_active_leases()
            )
            if lease.stage != self._state.last_stage and progress_at <= now - age_s
        ]

    def select_active(
        self, leases: Sequence[OverdueLease]
    ) -> Iterator[tuple[OverdueLease, GroupState, GroupLease]]:
        """Yield (overdue lease, group, lease) for each overdue lease that is still active."""
        for overdue in leases:
            group = self._state.groups.get(overdue.uid)
            active = group.find_lease(overdue.stage, overdue.token) if group else None
            if group and active:
                yield overdue, group, active.lease

    def find_next_expiry(self) -> float:
        """Return the next time at which a lease may expire; infinite without such a lease."""
        # Drop settled leases, so that no request wakes for one.
        while self._expiries and not self._is_active(self._expiries[0][2]):
            heapq.heappop(self._expiries)
        return self._expiries[0][0] if self._expiries else math.inf

    def _list_active_leases(self) -> list[tuple[GroupState, ActiveLease]]:
        """Return (group, lease) for each active lease, stage by stage."""
        return [
            (group, group.leases[stage])
            for stage in self._state.stages
            for group in self._state.groups.values()
            if stage in group.leases
        ]

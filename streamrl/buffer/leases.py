"""The leases of a shard: who may work on what, until when, and who gets a second try."""

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from streamrl.buffer.group import TOKENS_PER_INCARNATION, Group, GroupBook, Held, leased
from streamrl.buffer.log.segment_file import Record
from streamrl.messages import Lease

TIDY_AT = 1000
"""Leases that are looked after before those that have ended are sorted out."""


@dataclass(frozen=True)
class Request:
    """What a holder asks for. The same `id` again is the same request, and gets the same leases.

    `max_tokens` bounds the tokens of the groups handed out together; one is always handed out.
    """

    stage: str
    holder: str
    max_groups: int
    columns: tuple[str, ...] = ()
    max_tokens: int | None = None
    id: str = ""


@dataclass(frozen=True)
class Overdue:
    """Work that one holder has had for long: a line of the stall watchdog. Age in s."""

    uid: str
    stage: str
    holder: str
    attempt: int
    age_s: float
    token: int = field(default=0, compare=False)

    @property
    def key(self) -> tuple[str, str, int]:
        """What tells one stall from another."""
        return self.uid, self.stage, self.attempt


class LeaseDesk:
    """Hands out the leases of a shard and knows when each ends. Times are s of the shard's clock.

    A lease ends when its time is up unless it is renewed; the token is what makes it good, and no
    token is given twice, whatever process has the shard.
    """

    def __init__(self, book: GroupBook, *, lease_s: float, hedge_s: float | None) -> None:
        book.lease_s = lease_s
        self._book = book
        self._lease_s = lease_s
        self._hedge_s = hedge_s
        self._tokens = itertools.count(book.incarnation * TOKENS_PER_INCARNATION + 1)
        self._expiries: list[tuple[float, int, Lease]] = []
        self._tidy_at = TIDY_AT
        self._answers: dict[tuple[str, str], tuple[str, list[tuple[str, int]]]] = {}
        found = [held for stage in book.stages for _, held in self._out(stage)]
        given: dict[tuple[str, str, str], list[Held]] = {}
        for held in sorted(found, key=lambda held: held.lease.token):
            self._restart(held)
            given.setdefault((held.lease.stage, held.lease.holder, held.request), []).append(held)
        for leases in given.values():
            self.watch(leases)

    def _restart(self, held: Held) -> None:
        """A lease that was out when the shard died: its holder has as long as a new one."""
        now = self._book.now()
        if held.lease.stage != self._book.last_stage:
            held.expires_at = now + self._lease_s
        held.lease = replace(held.lease, taken_at=now, expires_at=held.expires_at)

    def watch(self, leases: Sequence[Held]) -> None:
        """Look after leases that one request was given just now."""
        first = leases[0]
        # Who asks has one request at a time: the last is the only one it may repeat.
        answer = first.request, [(held.lease.uid, held.lease.token) for held in leases]
        self._answers[first.lease.stage, first.lease.holder] = answer
        for held in leases:
            self._watch_time(held)

    def _watch_time(self, held: Held) -> None:
        if held.expires_at == math.inf:
            return
        heapq.heappush(self._expiries, (held.expires_at, held.lease.token, held.lease))
        if len(self._expiries) > self._tidy_at:
            # Most have been settled long before their time.
            self._expiries = [one for one in self._expiries if self._is_out(one[2])]
            heapq.heapify(self._expiries)
            self._tidy_at = TIDY_AT + 2 * len(self._expiries)

    def _is_out(self, lease: Lease) -> bool:
        group = self._book.groups.get(lease.uid)
        return group is not None and group.held(lease.stage, lease.token) is not None

    def draft(self, groups: Sequence[Group], request: Request) -> Record:
        """The record that leases `groups` to a request."""
        stage = request.stage
        grants = [(g.uid, next(self._tokens), g.failures[stage] + 1) for g in groups]
        return leased(stage, request.holder, request=request.id, grants=grants)

    def of_request(self, request: Request) -> list[tuple[Group, Held]]:
        """The leases that this very request was given: its answer got lost."""
        answered, tokens = self._answers.get((request.stage, request.holder), ("", []))
        if not request.id or request.id != answered:
            return []
        found = ((self._book.groups.get(uid), token) for uid, token in tokens)
        held = ((group, group.held(request.stage, token)) for group, token in found if group)
        return [(group, one) for group, one in held if one]

    def to_hedge(self, request: Request) -> list[Group]:
        """Groups that one other holder has had for long enough to give them out once more."""
        if self._hedge_s is None:
            return []
        since = self._book.now() - self._hedge_s
        slow = [
            (held.lease.taken_at, group)
            for group, held in self._out(request.stage)
            if len(group.leases[request.stage]) == 1
            and held.lease.holder != request.holder
            and held.lease.taken_at <= since
        ]
        slow.sort(key=lambda pair: (pair[0], pair[1].order))
        return [group for _, group in slow[: request.max_groups]]

    def renew(self, leases: Sequence[Lease]) -> list[Lease]:
        """Give leases their full time again; returns those that are no longer good."""
        lost = []
        for lease in leases:
            group = self._book.groups.get(lease.uid)
            held = group.held(lease.stage, lease.token) if group else None
            if held is None:
                lost.append(lease)
            elif lease.stage != self._book.last_stage:
                held.expires_at = self._book.now() + self._lease_s
        return lost

    def expired(self) -> Iterator[tuple[Group, Lease]]:
        """The leases whose time is up; they are no longer looked after."""
        now = self._book.now()
        while self._expiries and self._expiries[0][0] <= now:
            _, token, lease = heapq.heappop(self._expiries)
            group = self._book.groups.get(lease.uid)
            held = group.held(lease.stage, token) if group else None
            if group is None or held is None:
                continue
            if held.expires_at > now:
                self._watch_time(held)
            else:
                yield group, lease

    def of_holder(self, holder: str) -> list[tuple[Group, Lease]]:
        """The leases of one holder, in every stage."""
        return [
            (group, held.lease)
            for stage in self._book.stages
            for group, held in self._out(stage)
            if held.lease.holder == holder
        ]

    def overdue(self, age_s: float) -> list[Overdue]:
        """Work that was handed out longer than `age_s` ago, the last stage's apart."""
        now = self._book.now()
        leases = (
            held.lease
            for stage in self._book.stages
            if stage != self._book.last_stage
            for _, held in self._out(stage)
        )
        return [
            Overdue(one.uid, one.stage, one.holder, one.attempt, now - one.taken_at, one.token)
            for one in leases
            if one.taken_at <= now - age_s
        ]

    def still_out(self, found: Sequence[Overdue]) -> Iterator[tuple[Overdue, Group, Lease]]:
        """Those of overdue work that are where they were, with their leases."""
        for one in found:
            group = self._book.groups.get(one.uid)
            held = group.held(one.stage, one.token) if group else None
            if group and held:
                yield one, group, held.lease

    def next_change(self, stage: str) -> float:
        """When waiting for work of a stage is next worth another look."""
        expiry = self._expiries[0][0] if self._expiries else float("inf")
        if self._hedge_s is None:
            return expiry
        now = self._book.now()
        hedges = (held.lease.taken_at + self._hedge_s for _, held in self._out(stage))
        return min(expiry, min((at for at in hedges if at > now), default=float("inf")))

    def _out(self, stage: str) -> list[tuple[Group, Held]]:
        """All leases of a stage, in the order of their groups."""
        return [
            (group, held)
            for group in self._book.groups.values()
            for held in group.leases.get(stage, ())
        ]

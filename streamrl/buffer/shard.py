"""One shard of the experience queue: it owns its groups whole, hands out leases, takes commits.

A plain asyncio object on one event loop, told the stages and the columns they need; an actor hosts
it. Columns are opaque blobs here: `store` turns one into whatever readers can resolve. What a
transition does stands in group.py; here is decided which one comes next, and that it is in the
journal before it is done wherever losing it would lose a group.
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from streamrl.buffer import group as transitions
from streamrl.buffer.admission.capacity import Arrival, Entrance
from streamrl.buffer.codec import Blob, join, size_of
from streamrl.buffer.config import Bounds, QueueConfig
from streamrl.buffer.finished_groups import Farewells
from streamrl.buffer.group import Group, GroupBook, Part, ReadyLine
from streamrl.buffer.leases import LeaseDesk, Overdue, Request
from streamrl.buffer.log.journal import Log, NoLog
from streamrl.buffer.log.segment_file import Record
from streamrl.buffer.recovery import payload
from streamrl.buffer.schema import Contract
from streamrl.buffer.shard_stats import Figures
from streamrl.buffer.wire_types import Commit, Farewell, Grant, ShardStats
from streamrl.errors import StreamError
from streamrl.messages import Ended, Filtered, GroupInfo, Lease


class Shard:
    """Owner of some of the groups in flight. All methods run on one event loop.

    `book` holds the groups: none, or those a predecessor left. The stage that produces nothing is
    the last one; it is handed the ended groups too, so that the coordinator hears of each.
    `session` is the run: leases of another one are void.
    """

    def __init__(
        self,
        book: GroupBook,
        config: QueueConfig,
        *,
        bounds: Bounds,
        session: str = "",
        log: Log | None = None,
        store: Callable[[Blob], Any] = join,
    ) -> None:
        self._clock = book.now = asyncio.get_running_loop().time
        self._book = book
        self._contract = Contract(book.stages)
        self._config = config
        self._log = log or NoLog()
        self._store = store
        self._ready = {stage: ReadyLine() for stage in book.stages}
        self._wake = {stage: asyncio.Event() for stage in book.stages}
        self._farewells = Farewells()
        self._takers: Counter[str] = Counter()
        self._deaths: Counter[str] = Counter()
        self._asked: dict[tuple[str, str], object] = {}
        self._entrance = Entrance(book, bounds, clock=self._clock, enter=self._enter)
        self._figures = Figures(book, self._log, self._clock())
        opening = transitions.opened(session, book.incarnation + 1, forgets=book.is_damaged)
        self._is_opening_safe = False
        self._log.post([opening])
        book.apply(opening)
        self._desk = LeaseDesk(book, lease_s=config.lease_s, hedge_s=config.hedge_s)
        for group in book.groups.values():
            group.admitted_at = self._clock()
        self._refresh(book.groups.values())

    # What prompts, stages and ranks ask for.

    async def admit(self, entries: Sequence[tuple[str, bytes, int]], *, wait_s: float) -> list[str]:
        """Take in prompts: uid, encoded prompt, version. Returns the uids that are in.

        Those are as many as there is room for, and one at least: DeadlineError says that there was
        none within `wait_s`. A uid that was here before in this session is passed over.
        """
        arrivals = [Arrival(entry[0], [transitions.admitted(*entry)]) for entry in entries]
        return await self._entrance.admit(arrivals, self._clock() + wait_s)

    async def add(
        self, entries: Sequence[tuple[str, bytes, int]], commits: Sequence[Commit], *, wait_s: float
    ) -> list[str]:
        """Take in prompts with what one stage has made of them already; as `admit` and `put`."""
        groups = {commit.lease.uid: self._book.groups.get(commit.lease.uid) for commit in commits}
        for commit in commits:
            self._contract.check_commit(commit, _info(commit, groups[commit.lease.uid]))
        if any(groups.values()):
            # They came in by half when a predecessor was killed over it, or by an earlier call
            # whose answer got lost: what that one wrote must be safe before this one answers.
            half = [
                commit for commit in commits if _start(self._book, commit, groups[commit.lease.uid])
            ]
            await self._accept(half)
            await self._log.append([])
        arrivals = [
            Arrival(e[0], [transitions.admitted(*e), _record(self._book, commit)], commit.blob)
            for e, commit in zip(entries, commits, strict=True)
        ]
        return await self._entrance.admit(arrivals, self._clock() + wait_s)

    async def _enter(self, arrivals: Sequence[Arrival]) -> None:
        data: list[Any] = []
        for one in arrivals:
            data += [None, self._store(one.blob)] if one.blob else [None]
        await self._write([record for one in arrivals for record in one.records], data)

    async def take(self, request: Request, *, wait_s: float) -> list[Grant]:
        """Lease groups that are ready for a stage, the earliest admitted first.

        No more than an equal share if others of the stage wait too; none if there is none within
        `wait_s`.
        """
        self._contract.check_request(request.stage, request.columns)
        stage, deaths = request.stage, self._deaths[request.holder]
        if not self._is_opening_safe:
            # Or a successor could give the tokens of this process again.
            await self._log.append([])
            self._is_opening_safe = True
        wanted = set(request.columns)
        repeated = self._desk.of_request(request)
        if repeated:
            return [_grant(self._book, group, held.lease, wanted) for group, held in repeated]
        self._takers[stage] += 1
        try:
            chosen = await self._await_work(request, self._clock() + wait_s, deaths)
        finally:
            self._takers[stage] -= 1
        if not chosen:
            return []
        record = self._desk.draft(chosen, request)
        attempts = [attempt for *_, attempt in record.meta["grants"]]
        self._figures.counts["redelivered"] += sum(attempt > 1 for attempt in attempts)
        self._post(record)
        given = [(group, group.leases[stage][-1]) for group in chosen]
        self._desk.watch([held for _, held in given])
        return [_grant(self._book, group, held.lease, wanted) for group, held in given]

    async def _await_work(self, request: Request, deadline: float, deaths: int) -> list[Group]:
        stage = request.stage
        this = self._asked[stage, request.holder] = object()
        while True:
            is_last = not request.id or self._asked[stage, request.holder] is this
            if self._deaths[request.holder] != deaths or not is_last:
                return []  # nobody waits for the answer
            self._expire()
            ready = self._ready[stage]
            if ready:
                share = -(-len(ready) // self._takers[stage])
                first = ready.first(min(request.max_groups, share))
                return _within(first, request.max_tokens)
            hedged = self._desk.to_hedge(request)
            if hedged:
                chosen = _within(hedged, request.max_tokens)
                self._figures.counts["hedged"] += len(chosen)
                return chosen
            now = self._clock()
            if now >= deadline:
                return []
            self._wake[stage].clear()
            pause = min(deadline, self._desk.next_change(stage)) - now
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wake[stage].wait(), max(pause, 0.001))

    async def put(self, commits: Sequence[Commit]) -> list[str]:
        """Take finished work; returns the uids whose lease was no longer good.

        Returns once it is in the journal. Raises ContractError for columns that are not those the
        stage declared, or badly shaped.
        """
        self._expire()
        # All are checked before the first is started: an error must not leave one half done.
        for commit in commits:
            if group := self._book.leased(commit.lease):
                self._contract.check_commit(commit, _info(commit, group))
        good = [c for c in commits if _start(self._book, c, self._book.leased(c.lease))]
        await self._accept(good)
        accepted = {id(commit) for commit in good}
        refused = [commit.lease for commit in commits if id(commit) not in accepted]
        self._figures.counts["refused"] += sum(not self._book.excuses(one) for one in refused)
        return [lease.uid for lease in refused]

    async def _accept(self, commits: Sequence[Commit]) -> None:
        if not commits:
            return
        groups = [self._book.groups[commit.lease.uid] for commit in commits]
        try:
            data = [self._store(commit.blob) for commit in commits]
            await self._write([_record(self._book, commit) for commit in commits], data)
        finally:
            for commit, group in zip(commits, groups, strict=True):
                group.committing.discard(commit.lease.stage)

    def note(self, commits: Sequence[Commit]) -> None:
        """Keep what was begun of leased work beside its group: who gets it next goes on from there.

        Never in the journal: it is lost with the shard, and gone once the stage commits. What comes
        with a lease that is no longer good is passed over. Raises ContractError as `put` does.
        """
        self._expire()
        for commit in commits:
            if group := self._book.leased(commit.lease):
                self._contract.check_commit(commit, commit.info)
                _keep_begun(group, commit, self._store)
                self._entrance.charge(group)

    def fail(self, entries: Sequence[tuple[Lease, StreamError]]) -> None:
        """Take work back undone: the group is handed out again, or at last ended."""
        for lease, error in entries:
            if group := self._book.leased(lease):
                ended = Ended(error.cause, str(error))
                self._give_back(group, lease, ended, is_final=error.is_final)

    def filter(self, entries: Sequence[tuple[Lease, Filtered]]) -> None:
        """End groups that a predicate took out."""
        for lease, filtered in entries:
            if self._book.leased(lease) is not None:
                how = Ended("filtered", filtered.reason, filtered=True)
                self._post(transitions.ended(lease.uid, how))

    def renew(self, leases: Sequence[Lease]) -> list[Lease]:
        """Give leases their full time again; returns those that are no longer good."""
        self._expire()
        return self._desk.renew(leases)

    def read(self, uids: Sequence[str], columns: Sequence[str]) -> list[Sequence[Any]]:
        """Blobs with these columns of each group; those that have left come from the journal."""
        wanted = set(columns)
        return [_blobs(self._book, uid, wanted) for uid in uids]

    # What the coordinator asks for.

    def uids_with(self, column: str) -> list[str]:
        """The groups that have a column."""
        return [group.uid for group in self._book.groups.values() if column in group.columns]

    async def ended(self, *, wait_s: float) -> list[Farewell]:
        """The groups that have ended and not left; none if there is none within `wait_s`."""
        return await self._farewells.wait(self._book.groups.values(), wait_s)

    async def leave(self, uids: Sequence[str], version: int) -> None:
        """These groups leave the queue; `version` is trained from now on. May be repeated.

        Should a power cut bring one back, it is the coordinator's books that count.
        """
        record = transitions.left(uids, version)
        await self._log.append([record], sync=False)
        self._apply(record)

    async def end_step(self, uids: Sequence[str], version: int) -> ShardStats:
        """As `leave`; returns the figures of the step that has ended. May be repeated."""
        await self.leave(uids, version)
        return self._figures.end_step(version, self._clock())

    def stats(self) -> ShardStats:
        """The figures of the step under way, and what the shard holds."""
        return self._figures.stats(self._clock())

    def release(self, holder: str, *, died: bool = True) -> int:
        """Hand out again what a holder had that died, or left; returns how many groups."""
        self._deaths[holder] += 1
        for wake in self._wake.values():
            wake.set()
        lost, reason = self._desk.of_holder(holder), f"{holder} died over it"
        for group, lease in lost:
            if died:
                self._give_back(group, lease, Ended(f"{lease.stage}_died", reason))
            else:  # to leave is no attempt
                self._post(transitions.given_back(lease, failed=False))
        return len(lost)

    def overdue(self, age_s: float) -> list[Overdue]:
        """Work that one holder has had for over `age_s`."""
        return self._desk.overdue(age_s)

    def take_back(self, found: Sequence[Overdue]) -> None:
        """Work that is overdue is handed out anew."""
        for one, group, lease in self._desk.still_out(found):
            reason = f"{one.holder} had it for {one.age_s:.0f} s (pipeline.stall_s)"
            self._give_back(group, lease, Ended(f"{one.stage}_stalled", reason))

    def whereabouts(self, uids: Sequence[str]) -> dict[str, str]:
        """For each of `uids` held here, one phrase: which stages hold or await it, for how long."""
        found = {uid: self._book.groups[uid] for uid in uids if uid in self._book.groups}
        return {uid: _describe(self._book, group) for uid, group in found.items()}

    def forget_retired(self) -> None:
        """No step will be made again that trained a group of before a restart."""
        self._book.retired.clear()

    # How a change spreads.

    async def _write(self, records: Sequence[Record], data: Sequence[Any]) -> None:
        await self._log.append(records)
        self._apply(*records, data=data)

    def _post(self, *records: Record) -> None:
        self._log.post(records)
        self._apply(*records)

    def _apply(self, *records: Record, data: Sequence[Any] = ()) -> None:
        pairs = itertools.zip_longest(records, data)
        changed = [group for r, datum in pairs for group in self._book.apply(r, data=datum)]
        self._refresh(dict.fromkeys(changed))

    def _refresh(self, groups: Collection[Group]) -> None:
        """Bring the ready lines and the bytes in line with groups that have just changed."""
        for stage, ready in self._ready.items():
            if ready.update(groups, partial(self._book.is_ready, stage=stage)):
                self._figures.depth.observe(stage, len(ready), self._clock())
            if ready:
                self._wake[stage].set()
        for group in groups:
            self._entrance.charge(group)
            if group.ended is not None:
                self._farewells.notice()

    def _give_back(self, group: Group, lease: Lease, how: Ended, *, is_final: bool = False) -> None:
        self._post(transitions.given_back(lease, failed=True))
        is_held = lease.stage in group.leases or lease.stage in group.committing
        if not is_held and (is_final or group.failures[lease.stage] >= self._config.max_attempts):
            self._post(transitions.ended(lease.uid, how))

    def _expire(self) -> None:
        """Take back the leases whose time is up."""
        for group, lease in self._desk.expired():
            reason = f"{lease.holder} was silent for {self._config.lease_s:g} s (queue.lease_s)"
            self._give_back(group, lease, Ended(f"{lease.stage}_lease_expired", reason))


def _start(book: GroupBook, commit: Commit, group: Group | None) -> bool:
    """Whether this work is still wanted; from here on no other commit for it is taken."""
    stage = commit.lease.stage
    if group is None or group.ended or stage in group.parts or stage in group.committing:
        return False
    group.committing.add(stage)
    held = group.leases.pop(stage, [])
    # Whoever had it as well, by queue.hedge_s, is merely second.
    book.excuse(one for one in held if one.lease.token != commit.lease.token)
    return True


def _keep_begun(group: Group, commit: Commit, store: Callable[[Blob], Any]) -> None:
    """Of two holders of a hedged group the one that is further along is gone on from."""
    stage, num_bytes = commit.lease.stage, size_of(commit.blob)
    if stage not in group.begun or group.begun[stage].num_bytes <= num_bytes:
        group.keep_begun(stage, Part(tuple(commit.sizes), num_bytes, store(commit.blob)))


def _grant(book: GroupBook, group: Group, lease: Lease, wanted: set[str]) -> Grant:
    blobs = [part.data for part in group.parts.values() if not wanted.isdisjoint(part.names)]
    begun = group.begun.get(lease.stage)
    return Grant(
        lease=lease,
        admitted_version=group.admitted_version,
        info=group.info,
        ready_version=group.ready_version,
        ended=group.ended,
        prompt=None if lease.stage == book.last_stage else group.prompt,
        blobs=tuple(blobs),
        begun=() if begun is None else (begun.data,),
    )


def _info(commit: Commit, group: Group | None) -> GroupInfo | None:
    """The facts of a group: its own, or those that come with its rollouts."""
    return (group.info if group else None) or commit.info


def _record(book: GroupBook, commit: Commit) -> Record:
    info = _info(commit, book.groups.get(commit.lease.uid))
    return transitions.committed(
        commit.lease, commit.blob, names=commit.sizes, info=info, version=book.version
    )


def _describe(book: GroupBook, group: Group) -> str:
    now = book.now()
    held = [
        f"{one.lease.holder} for {now - one.lease.taken_at:.1f} s"
        f" ({one.lease.stage}, attempt {one.lease.attempt})"
        for one in itertools.chain.from_iterable(group.leases.values())
    ]
    waits = [stage for stage in book.stages if book.is_ready(group, stage)]
    state = f"held by {', '.join(held)}" if held else f"ready for {', '.join(waits) or 'none'}"
    return f"{state}, admitted {now - group.admitted_at:.1f} s ago"


def _blobs(book: GroupBook, uid: str, wanted: set[str]) -> Sequence[Any]:
    """The blobs of a group, also of one that has left: from memory, or from the journal."""
    group = book.groups.get(uid)
    parts = group.parts if group else book.retired.get(uid)
    if parts is None:
        raise StreamError(f"group {uid} is neither in the queue nor in its journal")
    if lost := wanted.difference(*(part.names for part in parts.values())):
        raise StreamError(f"group {uid}: no {sorted(lost)} are in the queue or in its journal")
    found = [part for part in parts.values() if not wanted.isdisjoint(part.names)]
    return tuple(join(payload(part)) if part.data is None else part.data for part in found)


def _within(groups: Sequence[Group], max_tokens: int | None) -> list[Group]:
    """The first groups that hold at most `max_tokens` together, but one at least."""
    chosen: list[Group] = []
    total = 0
    for group in groups:
        total += group.info.num_tokens if group.info else 0
        if chosen and max_tokens is not None and total > max_tokens:
            break
        chosen.append(group)
    return chosen

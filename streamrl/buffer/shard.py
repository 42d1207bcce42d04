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
from streamrl.buffer.admission.capacity import CapacityLimiter, PendingAdmission
from streamrl.buffer.codec import Blob, count_blob_bytes, join_pieces
from streamrl.buffer.config import QueueConfig, ShardCapacity
from streamrl.buffer.finished_groups import FinishedGroupNotifier
from streamrl.buffer.group import GroupState, ReadyQueue, ShardState, StageColumns
from streamrl.buffer.leases import LeaseRequest, LeaseTable, OverdueLease
from streamrl.buffer.log.journal import NullRecordLog, RecordLog
from streamrl.buffer.log.segment_file import JournalRecord
from streamrl.buffer.recovery import read_blob
from streamrl.buffer.schema import ColumnContract
from streamrl.buffer.shard_stats import ShardStatsRecorder
from streamrl.buffer.wire_types import ColumnCommit, FinishedGroup, LeaseGrant, ShardStats
from streamrl.errors import StreamError
from streamrl.messages import FilteredGroup, GroupInfo, GroupLease, GroupOutcome


class QueueShard:
    """Owner of some of the groups in flight. All methods run on one event loop.

    `book` holds the groups: none, or those a predecessor left. The stage that produces nothing is
    the last one; it is handed the ended groups too, so that the coordinator hears of each.
    `session` is the run: leases of another one are void.
    """

    def __init__(
        self,
        book: ShardState,
        config: QueueConfig,
        *,
        bounds: ShardCapacity,
        session: str = "",
        log: RecordLog | None = None,
        store: Callable[[Blob], Any] = join_pieces,
    ) -> None:
        self._clock = book.clock = asyncio.get_running_loop().time
        self._state = book
        self._contract = ColumnContract(book.stages)
        self._config = config
        self._log = log or NullRecordLog()
        self._store = store
        self._ready_queues = {stage: ReadyQueue() for stage in book.stages}
        self._wake_events = {stage: asyncio.Event() for stage in book.stages}
        self._finished_notifier = FinishedGroupNotifier()
        self._num_waiting: Counter[str] = Counter()
        self._release_counts: Counter[str] = Counter()
        self._latest_requests: dict[tuple[str, str], object] = {}
        self._capacity_limiter = CapacityLimiter(
            book, bounds, clock=self._clock, enter=self._insert_groups
        )
        self._stats_recorder = ShardStatsRecorder(book, self._log, self._clock())
        opening = transitions.make_open_record(
            session, book.incarnation + 1, forgets=book.is_damaged
        )
        self._is_open_durable = False
        self._log.append_nowait([opening])
        book.apply_record(opening)
        self._lease_table = LeaseTable(book, lease_s=config.lease_s, hedge_s=config.hedge_s)
        for group in book.groups.values():
            group.admitted_at = self._clock()
        self._refresh_groups(book.groups.values())

    # What prompts, stages and ranks ask for.

    async def admit_prompts(
        self, entries: Sequence[tuple[str, bytes, int]], *, wait_s: float
    ) -> list[str]:
        """Take in prompts: uid, encoded prompt, version. Returns the uids that are in.

        Those are as many as there is room for, and one at least: DeadlineError says that there was
        none within `wait_s`. A uid that was here before in this session is passed over.
        """
        arrivals = [
            PendingAdmission(entry[0], [transitions.make_admit_record(*entry)]) for entry in entries
        ]
        return await self._capacity_limiter.admit_groups(arrivals, self._clock() + wait_s)

    async def add_groups(
        self,
        entries: Sequence[tuple[str, bytes, int]],
        commits: Sequence[ColumnCommit],
        *,
        wait_s: float,
    ) -> list[str]:
        """Take in prompts with what one stage has made of them already; as `admit` and `put`."""
        groups = {commit.lease.uid: self._state.groups.get(commit.lease.uid) for commit in commits}
        for commit in commits:
            self._contract.check_commit(commit, _get_group_info(commit, groups[commit.lease.uid]))
        if any(groups.values()):
            # They came in by half when a predecessor was killed over it, or by an earlier call
            # whose answer got lost: what that one wrote must be safe before this one answers.
            half = [
                commit
                for commit in commits
                if _start_commit(self._state, commit, groups[commit.lease.uid])
            ]
            await self._accept_commits(half)
            await self._log.append([])
        arrivals = [
            PendingAdmission(
                e[0],
                [transitions.make_admit_record(*e), _to_commit_record(self._state, commit)],
                commit.blob,
            )
            for e, commit in zip(entries, commits, strict=True)
        ]
        return await self._capacity_limiter.admit_groups(arrivals, self._clock() + wait_s)

    async def _insert_groups(self, arrivals: Sequence[PendingAdmission]) -> None:
        data: list[Any] = []
        for one in arrivals:
            data += [None, self._store(one.blob)] if one.blob else [None]
        await self._write_records([record for one in arrivals for record in one.records], data)

    async def lease_groups(self, request: LeaseRequest, *, wait_s: float) -> list[LeaseGrant]:
        """Lease groups that are ready for a stage, the earliest admitted first.

        No more than an equal share if others of the stage wait too; none if there is none within
        `wait_s`.
        """
        self._contract.check_request(request.stage, request.columns)
        stage, deaths = request.stage, self._release_counts[request.holder]
        if not self._is_open_durable:
            # Or a successor could give the tokens of this process again.
            await self._log.append([])
            self._is_open_durable = True
        wanted = set(request.columns)
        repeated = self._lease_table.find_by_request(request)
        if repeated:
            return [_make_grant(self._state, group, held.lease, wanted) for group, held in repeated]
        self._num_waiting[stage] += 1
        try:
            chosen = await self._wait_for_groups(request, self._clock() + wait_s, deaths)
        finally:
            self._num_waiting[stage] -= 1
        if not chosen:
            return []
        record = self._lease_table.make_lease_record(chosen, request)
        attempts = [attempt for *_, attempt in record.meta["grants"]]
        self._stats_recorder.counts["redelivered"] += sum(attempt > 1 for attempt in attempts)
        self._post_records(record)
        given = [(group, group.leases[stage][-1]) for group in chosen]
        self._lease_table.track_leases([held for _, held in given])
        return [_make_grant(self._state, group, held.lease, wanted) for group, held in given]

    async def _wait_for_groups(
        self, request: LeaseRequest, deadline: float, deaths: int
    ) -> list[GroupState]:
        stage = request.stage
        this = self._latest_requests[stage, request.holder] = object()
        while True:
            is_last = not request.request_id or self._latest_requests[stage, request.holder] is this
            if self._release_counts[request.holder] != deaths or not is_last:
                return []  # nobody waits for the answer
            self._expire_leases()
            ready = self._ready_queues[stage]
            if ready:
                share = -(-len(ready) // self._num_waiting[stage])
                first = ready.peek_groups(min(request.max_groups, share))
                return _limit_tokens(first, request.max_tokens)
            hedged = self._lease_table.find_hedgeable(request)
            if hedged:
                chosen = _limit_tokens(hedged, request.max_tokens)
                self._stats_recorder.counts["hedged"] += len(chosen)
                return chosen
            now = self._clock()
            if now >= deadline:
                return []
            self._wake_events[stage].clear()
            pause = min(deadline, self._lease_table.next_change_time(stage)) - now
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wake_events[stage].wait(), max(pause, 0.001))

    async def commit_columns(self, commits: Sequence[ColumnCommit]) -> list[str]:
        """Take finished work; returns the uids whose lease was no longer good.

        Returns once it is in the journal. Raises ContractError for columns that are not those the
        stage declared, or badly shaped.
        """
        self._expire_leases()
        # All are checked before the first is started: an error must not leave one half done.
        for commit in commits:
            if group := self._state.find_leased_group(commit.lease):
                self._contract.check_commit(commit, _get_group_info(commit, group))
        good = [
            c
            for c in commits
            if _start_commit(self._state, c, self._state.find_leased_group(c.lease))
        ]
        await self._accept_commits(good)
        accepted = {id(commit) for commit in good}
        refused = [commit.lease for commit in commits if id(commit) not in accepted]
        self._stats_recorder.counts["refused"] += sum(
            not self._state.pop_excuse(one) for one in refused
        )
        return [lease.uid for lease in refused]

    async def _accept_commits(self, commits: Sequence[ColumnCommit]) -> None:
        if not commits:
            return
        groups = [self._state.groups[commit.lease.uid] for commit in commits]
        try:
            data = [self._store(commit.blob) for commit in commits]
            await self._write_records(
                [_to_commit_record(self._state, commit) for commit in commits], data
            )
        finally:
            for commit, group in zip(commits, groups, strict=True):
                group.committing_stages.discard(commit.lease.stage)

    def save_partials(self, commits: Sequence[ColumnCommit]) -> None:
        """Keep what was begun of leased work beside its group: who gets it next goes on from there.

        Never in the journal: it is lost with the shard, and gone once the stage commits. What comes
        with a lease that is no longer good is passed over. Raises ContractError as `put` does.
        """
        self._expire_leases()
        for commit in commits:
            if group := self._state.find_leased_group(commit.lease):
                self._contract.check_commit(commit, commit.info)
                _save_partial(group, commit, self._store)
                self._capacity_limiter.update_reservation(group)

    def fail_groups(self, entries: Sequence[tuple[GroupLease, StreamError]]) -> None:
        """Take work back undone: the group is handed out again, or at last ended."""
        for lease, error in entries:
            if group := self._state.find_leased_group(lease):
                ended = GroupOutcome(error.cause, str(error))
                self._nack_lease(group, lease, ended, is_final=error.is_final)

    def filter_groups(self, entries: Sequence[tuple[GroupLease, FilteredGroup]]) -> None:
        """End groups that a predicate took out."""
        for lease, filtered in entries:
            if self._state.find_leased_group(lease) is not None:
                how = GroupOutcome("filtered", filtered.reason, filtered=True)
                self._post_records(transitions.make_finish_record(lease.uid, how))

    def renew_leases(self, leases: Sequence[GroupLease]) -> list[GroupLease]:
        """Give leases their full time again; returns those that are no longer good."""
        self._expire_leases()
        return self._lease_table.renew_leases(leases)

    def read_columns(self, uids: Sequence[str], columns: Sequence[str]) -> list[Sequence[Any]]:
        """Blobs with these columns of each group; those that have left come from the journal."""
        wanted = set(columns)
        return [_read_blobs(self._state, uid, wanted) for uid in uids]

    # What the coordinator asks for.

    def find_uids_with(self, column: str) -> list[str]:
        """The groups that have a column."""
        return [group.uid for group in self._state.groups.values() if column in group.column_names]

    async def wait_for_finished(self, *, wait_s: float) -> list[FinishedGroup]:
        """The groups that have ended and not left; none if there is none within `wait_s`."""
        return await self._finished_notifier.wait_for_finished(self._state.groups.values(), wait_s)

    async def remove_groups(self, uids: Sequence[str], version: int) -> None:
        """These groups leave the queue; `version` is trained from now on. May be repeated.

        Should a power cut bring one back, it is the coordinator's books that count.
        """
        record = transitions.make_remove_record(uids, version)
        await self._log.append([record], sync=False)
        self._apply_records(record)

    async def end_step(self, uids: Sequence[str], version: int) -> ShardStats:
        """As `leave`; returns the figures of the step that has ended. May be repeated."""
        await self.remove_groups(uids, version)
        return self._stats_recorder.end_step(version, self._clock())

    def get_stats(self) -> ShardStats:
        """The figures of the step under way, and what the shard holds."""
        return self._stats_recorder.compute_stats(self._clock())

    def release_holder(self, holder: str, *, died: bool = True) -> int:
        """Hand out again what a holder had that died, or left; returns how many groups."""
        self._release_counts[holder] += 1
        for wake in self._wake_events.values():
            wake.set()
        lost, reason = self._lease_table.find_by_holder(holder), f"{holder} died over it"
        for group, lease in lost:
            if died:
                self._nack_lease(group, lease, GroupOutcome(f"{lease.stage}_died", reason))
            else:  # to leave is no attempt
                self._post_records(transitions.make_nack_record(lease, failed=False))
        return len(lost)

    def find_overdue(self, age_s: float) -> list[OverdueLease]:
        """Work that one holder has had for over `age_s`."""
        return self._lease_table.find_overdue(age_s)

    def requeue_overdue(self, found: Sequence[OverdueLease]) -> None:
        """Work that is overdue is handed out anew."""
        for one, group, lease in self._lease_table.select_active(found):
            reason = f"{one.holder} had it for {one.age_s:.0f} s (pipeline.stall_s)"
            self._nack_lease(group, lease, GroupOutcome(f"{one.stage}_stalled", reason))

    def locate_groups(self, uids: Sequence[str]) -> dict[str, str]:
        """For each of `uids` held here, one phrase: which stages hold or await it, for how long."""
        found = {uid: self._state.groups[uid] for uid in uids if uid in self._state.groups}
        return {uid: _describe_group(self._state, group) for uid, group in found.items()}

    def forget_retired(self) -> None:
        """No step will be made again that trained a group of before a restart."""
        self._state.retired_groups.clear()

    # How a change spreads.

    async def _write_records(self, records: Sequence[JournalRecord], data: Sequence[Any]) -> None:
        await self._log.append(records)
        self._apply_records(*records, data=data)

    def _post_records(self, *records: JournalRecord) -> None:
        self._log.append_nowait(records)
        self._apply_records(*records)

    def _apply_records(self, *records: JournalRecord, data: Sequence[Any] = ()) -> None:
        pairs = itertools.zip_longest(records, data)
        changed = [group for r, datum in pairs for group in self._state.apply_record(r, data=datum)]
        self._refresh_groups(dict.fromkeys(changed))

    def _refresh_groups(self, groups: Collection[GroupState]) -> None:
        """Bring the ready lines and the bytes in line with groups that have just changed."""
        for stage, ready in self._ready_queues.items():
            if ready.update_groups(groups, partial(self._state.is_ready, stage=stage)):
                self._stats_recorder.depth_meter.observe_depth(stage, len(ready), self._clock())
            if ready:
                self._wake_events[stage].set()
        for group in groups:
            self._capacity_limiter.update_reservation(group)
            if group.outcome is not None:
                self._finished_notifier.notify_waiters()

    def _nack_lease(
        self, group: GroupState, lease: GroupLease, how: GroupOutcome, *, is_final: bool = False
    ) -> None:
        self._post_records(transitions.make_nack_record(lease, failed=True))
        is_held = lease.stage in group.leases or lease.stage in group.committing_stages
        if not is_held and (is_final or group.failures[lease.stage] >= self._config.max_attempts):
            self._post_records(transitions.make_finish_record(lease.uid, how))

    def _expire_leases(self) -> None:
        """Take back the leases whose time is up."""
        for group, lease in self._lease_table.pop_expired():
            reason = f"{lease.holder} was silent for {self._config.lease_s:g} s (queue.lease_s)"
            self._nack_lease(group, lease, GroupOutcome(f"{lease.stage}_lease_expired", reason))


def _start_commit(book: ShardState, commit: ColumnCommit, group: GroupState | None) -> bool:
    """Whether this work is still wanted; from here on no other commit for it is taken."""
    stage = commit.lease.stage
    if (
        group is None
        or group.outcome
        or stage in group.stage_columns
        or stage in group.committing_stages
    ):
        return False
    group.committing_stages.add(stage)
    held = group.leases.pop(stage, [])
    # Whoever had it as well, by queue.hedge_s, is merely second.
    book.excuse_leases(one for one in held if one.lease.token != commit.lease.token)
    return True


def _save_partial(group: GroupState, commit: ColumnCommit, store: Callable[[Blob], Any]) -> None:
    """Of two holders of a hedged group the one that is further along is gone on from."""
    stage, num_bytes = commit.lease.stage, count_blob_bytes(commit.blob)
    if stage not in group.partial_rollouts or group.partial_rollouts[stage].num_bytes <= num_bytes:
        group.save_partial(
            stage, StageColumns(tuple(commit.column_sizes), num_bytes, store(commit.blob))
        )


def _make_grant(
    book: ShardState, group: GroupState, lease: GroupLease, wanted: set[str]
) -> LeaseGrant:
    blobs = [
        part.data
        for part in group.stage_columns.values()
        if not wanted.isdisjoint(part.column_names)
    ]
    begun = group.partial_rollouts.get(lease.stage)
    return LeaseGrant(
        lease=lease,
        admitted_version=group.admitted_version,
        info=group.info,
        ready_version=group.ready_version,
        outcome=group.outcome,
        prompt=None if lease.stage == book.last_stage else group.prompt,
        blobs=tuple(blobs),
        partial_rollouts=() if begun is None else (begun.data,),
    )


def _get_group_info(commit: ColumnCommit, group: GroupState | None) -> GroupInfo | None:
    """The facts of a group: its own, or those that come with its rollouts."""
    return (group.info if group else None) or commit.info


def _to_commit_record(book: ShardState, commit: ColumnCommit) -> JournalRecord:
    info = _get_group_info(commit, book.groups.get(commit.lease.uid))
    return transitions.make_commit_record(
        commit.lease, commit.blob, names=commit.column_sizes, info=info, version=book.version
    )


def _describe_group(book: ShardState, group: GroupState) -> str:
    now = book.clock()
    held = [
        f"{one.lease.holder} for {now - one.lease.granted_at:.1f} s"
        f" ({one.lease.stage}, attempt {one.lease.attempt})"
        for one in itertools.chain.from_iterable(group.leases.values())
    ]
    waits = [stage for stage in book.stages if book.is_ready(group, stage)]
    state = f"held by {', '.join(held)}" if held else f"ready for {', '.join(waits) or 'none'}"
    return f"{state}, admitted {now - group.admitted_at:.1f} s ago"


def _read_blobs(book: ShardState, uid: str, wanted: set[str]) -> Sequence[Any]:
    """The blobs of a group, also of one that has left: from memory, or from the journal."""
    group = book.groups.get(uid)
    parts = group.stage_columns if group else book.retired_groups.get(uid)
    if parts is None:
        raise StreamError(f"group {uid} is neither in the queue nor in its journal")
    if lost := wanted.difference(*(part.column_names for part in parts.values())):
        raise StreamError(f"group {uid}: no {sorted(lost)} are in the queue or in its journal")
    found = [part for part in parts.values() if not wanted.isdisjoint(part.column_names)]
    return tuple(join_pieces(read_blob(part)) if part.data is None else part.data for part in found)


def _limit_tokens(groups: Sequence[GroupState], max_tokens: int | None) -> list[GroupState]:
    """The first groups that hold at most `max_tokens` together, but one at least."""
    chosen: list[GroupState] = []
    total = 0
    for group in groups:
        total += group.info.num_tokens if group.info else 0
        if chosen and max_tokens is not None and total > max_tokens:
            break
        chosen.append(group)
    return chosen

"""One shard of the experience queue: owns its groups, grants leases, accepts commits.

`QueueShard` is a plain asyncio object on one event loop, hosted by an actor. A shard knows stages
and column names, but no contents: columns are opaque blobs, which `store` turns into references
that readers can resolve. group.py defines the effect of each transition. This module decides which
transition comes next, and journals the transition first wherever a loss would lose a group.
"""

import asyncio
import heapq
import itertools
import math
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from msgspec import structs

from streamrl.buffer import group as transitions
from streamrl.buffer.config import QueueConfig, ShardCapacity, StageSchema
from streamrl.buffer.encoding import (
    Blob,
    ColumnBlobs,
    ColumnCommit,
    FinishedGroup,
    LeaseGrant,
    count_blob_bytes,
    join_pieces,
)
from streamrl.buffer.group import (
    TOKENS_PER_INCARNATION,
    ActiveLease,
    GroupState,
    ReadyQueue,
    ShardState,
    StageColumns,
    make_lease_record,
    read_blob,
)
from streamrl.buffer.journal import CorruptRecord, JournalRecord, RecordLog
from streamrl.errors import ContractError, DeadlineError, StreamError
from streamrl.messages import (
    OPTIONAL_COLUMNS,
    ColumnAxis,
    FilteredGroup,
    GroupInfo,
    GroupLease,
    GroupOutcome,
    check_column_sizes,
    get_column_spec,
)

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

    lease: GroupLease
    age_s: float

    @property
    def uid(self) -> str:
        return self.lease.uid

    @property
    def stall_key(self) -> tuple[str, str, int]:
        """Key of the stalled work, by which the watchdog reports a stall only once."""
        return self.lease.uid, self.lease.stage, self.lease.attempt


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
        active.lease = structs.replace(active.lease, granted_at=now, expires_at=active.expires_at)

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
        return self._state.find_leased_group(lease) is not None

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
        request_id, grants = self._last_grants.get((request.stage, request.holder), ("", []))
        if not request.request_id or request.request_id != request_id:
            return []
        groups = ((self._state.groups.get(uid), token) for uid, token in grants)
        return [
            (group, active)
            for group, token in groups
            if group and (active := group.find_lease(request.stage, token))
        ]

    def renew_leases(self, leases: Sequence[GroupLease]) -> list[GroupLease]:
        """Extend each lease to `lease_s` from now; return the leases that are no longer active."""
        lost = []
        for lease in leases:
            found = self._state.find_active(lease)
            if found is None:
                lost.append(lease)
            elif lease.stage != self._state.last_stage:
                found[1].expires_at = self._state.clock() + self._lease_s
        return lost

    def pop_expired(self) -> Iterator[tuple[GroupState, GroupLease]]:
        """Yield (group, lease) for each lease that has expired, and stop tracking the lease."""
        now = self._state.clock()
        while self._expiries and self._expiries[0][0] <= now:
            lease = heapq.heappop(self._expiries)[2]
            found = self._state.find_active(lease)
            if found is None:
                continue
            group, active = found
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
            OverdueLease(active.lease, now - active.progress_at)
            for _, active in self._list_active_leases()
            if active.lease.stage != self._state.last_stage and active.progress_at <= now - age_s
        ]

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


LEASE_COUNTERS = ("redelivered", "refused")


@dataclass(frozen=True)
class ShardStats:
    """Statistics of one queue shard, or of all shards together.

    `depth`: time-weighted mean of ready groups per stage since the last training step ended.
    `num_bytes`, `uids`: size and uids of the groups in the shard now; bytes of kept ones count.
    `oldest_age_s`: time since the earliest admission among these groups.
    `counts`: redelivered leases, and refused commits for groups that have not ended, since the last
    step.
    `fsync_s`: time spent in fsync since the last step.
    """

    depth: Mapping[str, float]
    num_bytes: int
    oldest_age_s: float
    uids: tuple[str, ...]
    counts: Mapping[str, int]
    journal_bytes: int = 0
    fsync_s: float = 0.0


def merge_stats(shard_stats: Sequence[ShardStats]) -> ShardStats:
    return ShardStats(
        depth={s: sum(stats.depth[s] for stats in shard_stats) for s in shard_stats[0].depth},
        num_bytes=sum(stats.num_bytes for stats in shard_stats),
        oldest_age_s=max(stats.oldest_age_s for stats in shard_stats),
        uids=tuple(uid for stats in shard_stats for uid in stats.uids),
        counts={
            name: sum(stats.counts[name] for stats in shard_stats) for name in shard_stats[0].counts
        },
        journal_bytes=sum(stats.journal_bytes for stats in shard_stats),
        fsync_s=sum(stats.fsync_s for stats in shard_stats),
    )


class DepthMeter:
    """Computes the time-weighted mean of the number of groups ready for each stage.

    The mean covers a window, usually one training step. Times in s.
    """

    def __init__(self, stages: Iterable[str], now: float) -> None:
        self._depths = dict.fromkeys(stages, 0)
        self._depth_seconds = dict.fromkeys(self._depths, 0.0)
        self._since = dict.fromkeys(self._depths, now)
        self._window_start = now

    def observe_depth(self, stage: str, level: int, now: float) -> None:
        """Record that `level` groups are ready for a stage from `now` on."""
        self._depth_seconds[stage] += self._depths[stage] * (now - self._since[stage])
        self._depths[stage] = level
        self._since[stage] = now

    def compute_means(self, now: float) -> dict[str, float]:
        """Return the mean number of ready groups per stage since the window began.

        In a window of no length, return the current number.
        """
        window = now - self._window_start
        means = {}
        for stage, level in list(self._depths.items()):
            self.observe_depth(stage, level, now)
            means[stage] = self._depth_seconds[stage] / window if window > 0 else float(level)
        return means

    def restart_window(self, now: float) -> None:
        """Begin a new averaging window at `now`."""
        for stage, level in list(self._depths.items()):
            self.observe_depth(stage, level, now)
            self._depth_seconds[stage] = 0.0
        self._window_start = now


class ShardStatsRecorder:
    """Counts leases and measures queue depths of a shard within a training step. Times in s."""

    def __init__(self, state: ShardState, log: RecordLog, now: float) -> None:
        self._state = state
        self._log = log
        self._version = state.version
        self._fsync_s = 0.0
        self._last_step_stats: ShardStats | None = None
        self.counts: Counter[str] = Counter()
        self.depth_meter = DepthMeter(state.stages, now)

    def compute_stats(self, now: float) -> ShardStats:
        """Return the statistics since the last `end_step`."""
        groups = self._state.groups.values()
        self._fsync_s += self._log.drain_fsync_s()
        return ShardStats(
            depth=self.depth_meter.compute_means(now),
            num_bytes=sum(group.num_bytes for group in groups) + self._state.kept_bytes,
            oldest_age_s=max((now - group.admitted_at for group in groups), default=0.0),
            uids=tuple(self._state.groups),
            counts={name: self.counts[name] for name in LEASE_COUNTERS},
            journal_bytes=self._log.num_bytes,
            fsync_s=self._fsync_s,
        )

    def end_step(self, version: int, now: float) -> ShardStats:
        """Return the statistics of the training step that ends with `version`; reset the counts.

        A repeated call for the same version returns the same statistics.
        """
        if version > self._version:
            self._last_step_stats = self.compute_stats(now)
            self._version, self._fsync_s = version, 0.0
            self.counts.clear()
            self.depth_meter.restart_window(now)
        return replace(
            self._last_step_stats or self.compute_stats(now), uids=tuple(self._state.groups)
        )


PromptEntry = tuple[str, bytes, int]
"""A prompt to be admitted: uid, encoded prompt, version."""


class CapacityLimiter:
    """Keeps a shard within its capacity. Times: s of the event loop.

    A group reserves at least `reserved_group_bytes` until its columns are complete, and its actual
    size after that. So admission is the only operation that waits for capacity. `insert` inserts
    prompts into the shard.
    """

    def __init__(
        self,
        state: ShardState,
        capacity: ShardCapacity,
        *,
        insert: Callable[[Sequence[PromptEntry]], Awaitable[None]],
    ) -> None:
        self._state = state
        self._capacity = capacity
        self._write_admissions = insert
        self._pending_uids: set[str] = set()
        self._group_bytes = 0
        """Bytes reserved for the groups in the shard."""
        self._num_inserts = 0
        self._capacity_freed = asyncio.Event()

    async def insert_within_capacity(
        self, entries: Sequence[PromptEntry], deadline: float
    ) -> list[str]:
        """Insert as many prompts as fit, at least one; return the uids that are admitted by now.

        Uids of a retried call count as admitted, also if they are removed by now. Returns as soon
        as some prompts are admitted. Raises DeadlineError if no prompt fits by `deadline`.
        """
        while not (admitted := [uid for uid, *_ in entries if self._state.has_seen(uid)]):
            batch = self._reserve_capacity(entries)
            if batch:
                try:
                    await self._write_admissions(batch)
                finally:
                    self._pending_uids.difference_update(uid for uid, *_ in batch)
                    self._num_inserts += 1
                    self._capacity_freed.set()
            else:
                await self._wait_for_capacity(deadline, entries[0][0])
        return admitted

    def _reserve_capacity(self, entries: Sequence[PromptEntry]) -> list[PromptEntry]:
        """Reserve capacity for as many prompts as fit now; return these prompts."""
        batch = []
        for entry in entries:
            if entry[0] not in self._pending_uids and self._has_capacity():
                self._pending_uids.add(entry[0])
                batch.append(entry)
        return batch

    def update_reservation(self, group: GroupState) -> None:
        """Adjust the bytes reserved for a group after its columns changed or it was removed."""
        self._group_bytes -= group.reserved_bytes
        group.reserved_bytes = group.num_bytes if group.uid in self._state.groups else 0
        if group.uid in self._state.groups and not self._state.is_complete(group):
            group.reserved_bytes = max(group.num_bytes, self._capacity.reserved_group_bytes)
        self._group_bytes += group.reserved_bytes
        self._capacity_freed.set()

    def notify_freed(self) -> None:
        """Wake waiting admissions: the shard keeps fewer groups for replays."""
        self._capacity_freed.set()

    @property
    def _reserved_bytes(self) -> int:
        pending_bytes = len(self._pending_uids) * self._capacity.reserved_group_bytes
        return self._group_bytes + self._state.kept_bytes + pending_bytes

    def _has_capacity(self) -> bool:
        num_groups = len(self._state.groups) + len(self._pending_uids)
        # At least a byte, so that a shard with max_bytes is full at some time.
        needed = max(self._capacity.reserved_group_bytes, 1)
        has_bytes = self._reserved_bytes + needed <= self._capacity.max_bytes
        return has_bytes and num_groups < self._capacity.max_groups

    async def _wait_for_capacity(self, deadline: float, uid: str) -> None:
        """Wait until a prompt may fit, or until the prompts of another call are in."""
        num_inserts = self._num_inserts
        try:
            async with asyncio.timeout_at(deadline):
                while True:
                    self._capacity_freed.clear()
                    await self._capacity_freed.wait()
                    # After an insert, the prompts of a repeated call may be in the shard.
                    if self._num_inserts != num_inserts or self._has_capacity():
                        return
        except TimeoutError:
            uids, capacity = list(self._state.groups), self._capacity
            raise DeadlineError(
                f"prompt {uid} waited for capacity in a full shard: it holds {len(uids)} of"
                f" {capacity.max_groups} groups and {self._reserved_bytes} of"
                f" {capacity.max_bytes:g} bytes;"
                f" the first are {uids[:5]}"
            ) from None


class ColumnContract:
    """Checks that each stage requests and commits only columns that it declares.

    All methods raise ContractError.
    """

    def __init__(self, stages: Mapping[str, StageSchema]) -> None:
        self._stages = stages
        self._produced_columns = {name for schema in stages.values() for name in schema.produces}

    def check_request(self, stage: str, columns: Sequence[str]) -> None:
        """Check that a stage requests only columns that it declares as needed."""
        if stage not in self._stages:
            raise ContractError(f"unknown stage {stage}: this queue has {', '.join(self._stages)}")
        if undeclared := set(columns) - set(self._stages[stage].needs):
            raise ContractError(
                f"stage {stage} requests {sorted(undeclared)}: not among the columns it needs"
            )

    def check_commit(self, commit: ColumnCommit, info: GroupInfo | None) -> None:
        """Check that a commit has all columns its stage declares, no others', in the right sizes.

        info: sizes of the group; None before its rollouts exist.
        """
        stage, uid, names = commit.lease.stage, commit.lease.uid, commit.column_sizes.keys()
        declared = set(self._stages[stage].produces)
        if missing := sorted(declared - names):
            raise ContractError(f"stage {stage} committed {uid} without {missing}")
        if foreign := sorted(names & self._produced_columns - declared):
            raise ContractError(
                f"stage {stage} committed {foreign} for {uid}: another stage produces them"
            )
        if info is None:
            if early := sorted(n for n in names if get_column_spec(n).axis is not ColumnAxis.GROUP):
                raise ContractError(
                    f"stage {stage} committed {early} for {uid} before its rollouts exist"
                )
            return
        if not info.version_tokens:
            raise ContractError(f"group {uid}: no token of it was sampled (loss_mask)")
        if info.min_version < 0:
            raise ContractError(f"group {uid}: a sampled token has no policy_version")
        if (shortest := min(info.lengths, default=0)) < 1:
            raise ContractError(f"group {uid}: a rollout of {shortest} tokens (lengths)")
        check_column_sizes(commit.column_sizes, info)


class ColumnHistory:
    """Uids of the groups with a column since a position; a reader passes the last one it got."""

    def __init__(self, column: str, groups: Iterable[GroupState], start: int) -> None:
        """Begin at position `start` with the groups that have the column already."""
        self._column = column
        self._start = start
        self._uids: list[str] = []
        self._recorded_uids: set[str] = set()
        self.record_groups(groups)

    @property
    def end(self) -> int:
        """Position after the last recorded group."""
        return self._start + len(self._uids)

    def has_position(self, position: int) -> bool:
        """Return True if the history has all groups recorded after a position."""
        return self._start <= position <= self.end

    def record_groups(self, groups: Iterable[GroupState]) -> None:
        """Record those of the groups that have the column now."""
        for group in groups:
            if self._column in group.column_names and group.uid not in self._recorded_uids:
                self._recorded_uids.add(group.uid)
                self._uids.append(group.uid)

    def forget_group(self, uid: str) -> None:
        """Forget a group that left the shard."""
        self._recorded_uids.discard(uid)

    def read_after(self, position: int) -> list[str]:
        """Return the uids recorded after a position; discard those before, which the reader has.

        A repeated call returns the same.
        """
        del self._uids[: position - self._start]
        self._start = position
        return list(self._uids)


class WaitingRequests:
    """Lease requests of a stage, in the order in which they began to wait.

    For n ready groups at most n requests wake, not all: with hundreds of idle generators, a group
    would otherwise cost a look by each. A woken request that takes nothing must pass the wake on by
    `wake_requests`.

    num_requests: requests that wait or are about to take groups.
    """

    def __init__(self) -> None:
        self._futures: OrderedDict[asyncio.Future[None], None] = OrderedDict()
        self._num_woken = 0
        self.num_requests = 0

    @contextmanager
    def count_request(self) -> Iterator[None]:
        self.num_requests += 1
        try:
            yield
        finally:
            self.num_requests -= 1

    async def wait_for_wake(self, timeout_s: float) -> None:
        """Wait until woken, or for `timeout_s`."""
        future = asyncio.get_running_loop().create_future()
        self._futures[future] = None
        try:
            await asyncio.wait([future], timeout=timeout_s)
        finally:
            self._futures.pop(future, None)
            self._num_woken -= future.done()

    def wake_requests(self, num_groups: int) -> None:
        """Wake a request for each ready group; requests that are awake already count."""
        while self._futures and self._num_woken < num_groups:
            self._wake_first()

    def wake_all(self) -> None:
        while self._futures:
            self._wake_first()

    def _wake_first(self) -> None:
        future, _ = self._futures.popitem(last=False)
        future.set_result(None)
        self._num_woken += 1


MIN_WAIT_S = 0.001
"""Shortest timeout passed to asyncio; a shorter timeout may not advance a coarse clock."""


class QueueShard:
    """Owner of a part of the groups in flight. All methods run on the same event loop.

    Every public method is a coroutine function that clients in any process run by
    `ShardProxy.call`. The call transports arguments and results, with these rules:

    - A method that waits takes the longest wait as `wait_s`, keyword-only and without a default:
      the call adds it to its deadline.
    - A method that works for longer than the deadline of a call has an entry in METHOD_TIMEOUTS_S
      (durable_shard.py).
    - Large blobs travel through the object store in ColumnCommits as arguments, and in a list of
      LeaseGrants or ColumnBlobs as result; anywhere else they are copied into the message.
    - A call may arrive twice; applying it again must change nothing.

    state: empty, or recovered from the journal of a predecessor.
    session: identifies the run; leases of another session are void.
    log: journal of the shard.
    store: puts a blob of columns into the object store and returns its reference.
    corrupt_records: damaged records of the journal, without which the shard was recovered.

    The last stage is the stage that produces no columns. It also receives filtered and dropped
    groups, so that the coordinator can account for each.
    """

    corrupt_records: Sequence[CorruptRecord] = ()

    def __init__(
        self,
        state: ShardState,
        config: QueueConfig,
        *,
        capacity: ShardCapacity,
        session: str = "",
        log: RecordLog | None = None,
        store: Callable[[Blob], Any] = join_pieces,
    ) -> None:
        self._clock = state.clock = asyncio.get_running_loop().time
        self._state = state
        self._contract = ColumnContract(state.stages)
        self._config = config
        self._log = log or RecordLog()
        self._store = store
        self._ready_queues = {stage: ReadyQueue() for stage in state.stages}
        self._waiters = {stage: WaitingRequests() for stage in state.stages}
        self._finished_groups: dict[str, GroupState] = {}
        self._group_finished = asyncio.Event()
        self._column_histories: dict[str, ColumnHistory] = {}
        self._release_counts: Counter[str] = Counter()
        self._latest_requests: dict[tuple[str, str], object] = {}
        self._capacity_limiter = CapacityLimiter(state, capacity, insert=self._write_admissions)
        self._stats_recorder = ShardStatsRecorder(state, self._log, self._clock())
        number, forgets = state.incarnation + 1, state.is_damaged
        opening = transitions.make_open_record(session, number, forgets=forgets)
        self._is_open_durable = False
        self._log.append_nowait([opening])
        state.apply_record(opening)
        self._lease_table = LeaseTable(state, lease_s=config.lease_s)
        for group in state.groups.values():
            group.admitted_at = self._clock()
        self._refresh_groups(state.groups.values())

    # Calls of the stages and ranks.

    async def admit_entries(self, entries: Sequence[PromptEntry], *, wait_s: float) -> list[str]:
        """Admit entries (uid, encoded prompt, version); return the uids that are in the shard.

        Admits as many entries as fit, at least one. Raises DeadlineError if no entry fits within
        `wait_s`. Uids admitted earlier in this session count as admitted and are not inserted
        again.
        """
        return await self._capacity_limiter.insert_within_capacity(entries, self._clock() + wait_s)

    async def _write_admissions(self, entries: Sequence[PromptEntry]) -> None:
        await self._write_records([transitions.make_admit_record(*entry) for entry in entries])

    async def lease_groups(self, request: LeaseRequest, *, wait_s: float) -> list[LeaseGrant]:
        """Lease groups that are ready for a stage, earliest admission first.

        If several requests for the stage wait, each gets at most an equal share of the ready
        groups. Returns [] if no group becomes ready within `wait_s`.
        """
        self._contract.check_request(request.stage, request.columns)
        stage, releases = request.stage, self._release_counts[request.holder]
        if not self._is_open_durable:
            # The incarnation must be durable before the first grant; otherwise a successor would
            # draw the same tokens.
            await self._log.append([])
            self._is_open_durable = True
        wanted = set(request.columns)
        repeated = self._lease_table.find_by_request(request)
        if repeated:
            return [
                _make_grant(self._state, group, active.lease, wanted) for group, active in repeated
            ]
        waiters, ready = self._waiters[stage], self._ready_queues[stage]
        chosen: list[GroupState] = []
        try:
            with waiters.count_request():
                chosen = await self._wait_for_groups(request, self._clock() + wait_s, releases)
        finally:
            if not chosen:
                waiters.wake_requests(len(ready))  # one may have been woken for these groups
        if not chosen:
            return []
        record = self._lease_table.make_lease_record(chosen, request)
        attempts = [attempt for *_, attempt in record.meta["grants"]]
        self._stats_recorder.counts["redelivered"] += sum(attempt > 1 for attempt in attempts)
        self._post_records(record)
        granted = [(group, group.leases[stage]) for group in chosen]
        self._lease_table.track_leases([active for _, active in granted])
        return [_make_grant(self._state, group, active.lease, wanted) for group, active in granted]

    async def _wait_for_groups(
        self, request: LeaseRequest, deadline: float, releases: int
    ) -> list[GroupState]:
        """Wait for groups that a lease request can get; return [] at the deadline.

        Returns [] also if the holder is released (more often than `releases` times by now) or has
        sent a newer request.
        """
        stage, waiters = request.stage, self._waiters[request.stage]
        this_request = self._latest_requests[stage, request.holder] = object()
        while True:
            is_latest = (
                not request.request_id
                or self._latest_requests[stage, request.holder] is this_request
            )
            if self._release_counts[request.holder] != releases or not is_latest:
                return []  # the requester is gone or has sent a newer request
            self._expire_leases()
            ready = self._ready_queues[stage]
            if ready:
                share = -(-len(ready) // waiters.num_requests)
                return ready.peek_groups(min(request.max_groups, share))
            now = self._clock()
            if now >= deadline:
                return []
            pause = min(deadline, self._lease_table.find_next_expiry()) - now
            await waiters.wait_for_wake(max(pause, MIN_WAIT_S))

    async def commit_columns(self, commits: Sequence[ColumnCommit]) -> list[str]:
        """Commit the columns computed for leased groups; return the uids without an active lease.

        Returns once the commits are in the journal; the columns of the returned uids are discarded.
        Raises ContractError for columns that differ from the declaration of the stage.
        """
        self._expire_leases()
        # Check all commits before starting the first: an error must not leave a commit half done.
        for commit in commits:
            if group := self._state.find_leased_group(commit.lease):
                self._contract.check_commit(commit, _get_group_info(commit, group))
        accepted = [
            commit
            for commit in commits
            if _start_commit(self._state, commit, self._state.find_leased_group(commit.lease))
        ]
        await self._accept_commits(accepted)
        accepted_ids = {id(commit) for commit in accepted}
        refused = [commit.lease for commit in commits if id(commit) not in accepted_ids]
        # Holders of groups that have ended have made no mistake.
        self._stats_recorder.counts["refused"] += sum(map(self._state.is_unfinished, refused))
        return [lease.uid for lease in refused]

    async def _accept_commits(self, commits: Sequence[ColumnCommit]) -> None:
        """Store the columns of valid commits, then journal and apply the commits."""
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

    async def save_partials(self, commits: Sequence[ColumnCommit]) -> None:
        """Save partial rollouts of leased groups; the next holder of a group resumes them.

        Kept in memory only: lost if the shard dies, discarded once the stage commits. Ignores
        inactive leases. Raises ContractError like `commit_columns`.
        """
        self._expire_leases()
        for commit in commits:
            if group := self._state.find_leased_group(commit.lease):
                self._contract.check_commit(commit, commit.info)
                if _save_partial(group, commit, self._store):
                    self._lease_table.record_growth(group, commit.lease)
                self._capacity_limiter.update_reservation(group)

    async def fail_groups(self, entries: Sequence[tuple[GroupLease, StreamError]]) -> None:
        """End leases after failed work; requeue each group, or drop it after its last attempt."""
        for lease, error in entries:
            if group := self._state.find_leased_group(lease):
                outcome = GroupOutcome(error.cause, str(error))
                self._nack_lease(group, lease, outcome, is_final=error.is_final)

    async def filter_groups(self, entries: Sequence[tuple[GroupLease, FilteredGroup]]) -> None:
        """End leased groups that the group filter rejected, and ignore inactive leases."""
        for lease, filtered in entries:
            if self._state.find_leased_group(lease) is not None:
                outcome = GroupOutcome(
                    "filtered", filtered.reason, filtered=True, pass_rate=filtered.pass_rate
                )
                self._post_records(transitions.make_finish_record(lease.uid, outcome))

    async def renew_leases(self, leases: Sequence[GroupLease]) -> list[GroupLease]:
        self._expire_leases()
        return self._lease_table.renew_leases(leases)

    async def read_columns(self, uids: Sequence[str], columns: Sequence[str]) -> list[ColumnBlobs]:
        """Return, per uid, the blobs that contain `columns`.

        Reads the blobs of removed groups from the journal.
        """
        wanted = set(columns)
        return [_read_blobs(self._state, uid, wanted) for uid in uids]

    async def read_leased(
        self, leases: Sequence[GroupLease], columns: Sequence[str]
    ) -> list[ColumnBlobs]:
        """Return, per lease, the blobs that contain `columns`; empty if the lease is not active."""
        wanted = set(columns)
        return [
            _read_blobs(self._state, lease.uid, wanted)
            if self._state.find_leased_group(lease)
            else ColumnBlobs()
            for lease in leases
        ]

    # Calls of the coordinator.

    async def find_uids_with(self, column: str, after: int = 0) -> tuple[list[str], int]:
        """Return the uids of groups that got a column after a position, and the next position.

        after: position that the caller's last call returned; 0 for all groups in the shard. Also
        returns all if this shard has restarted since, or another client has read on.
        """
        history = self._column_histories.get(column)
        if history is None or not history.has_position(after):
            # Above all positions of earlier incarnations, and of an earlier history of this one.
            first = self._state.incarnation * transitions.TOKENS_PER_INCARNATION + 1
            start = history.end + 1 if history else first
            history = ColumnHistory(column, self._state.groups.values(), start)
            self._column_histories[column] = history
            after = start
        return history.read_after(after), history.end

    async def wait_for_finished(self, *, wait_s: float) -> list[FinishedGroup]:
        """Wait for filtered or dropped groups that are still in the shard; [] after `wait_s`."""
        deadline = self._clock() + wait_s
        while True:
            self._group_finished.clear()
            finished = [
                FinishedGroup(group.uid, group.outcome, group.info)
                for group in self._finished_groups.values()
                if group.outcome is not None
            ]
            remaining_s = deadline - self._clock()
            if finished or remaining_s <= 0:
                return finished
            await _wait_for_event(self._group_finished, remaining_s)

    async def remove_groups(
        self, uids: Sequence[str], version: int, keep: Sequence[str] | None = None
    ) -> None:
        """Remove trained, filtered or dropped groups from the shard. Idempotent.

        version: policy version that is in training from now on. keep: all groups whose columns the
        shard keeps for replays from now on; None: as before.

        The journal record is not fsynced: if a power cut brings a group back, the coordinator
        removes the group again, because the run log has its end.
        """
        record = transitions.make_remove_record(uids, version, keep)
        await self._log.append([record], sync=False)
        self._apply_records(record)
        self._capacity_limiter.notify_freed()

    async def end_step(
        self, uids: Sequence[str], version: int, keep: Sequence[str] | None = None
    ) -> ShardStats:
        """Remove the groups of a finished training step; return this shard's statistics of it."""
        await self.remove_groups(uids, version, keep)
        return self._stats_recorder.end_step(version, self._clock())

    async def get_stats(self) -> ShardStats:
        return self._stats_recorder.compute_stats(self._clock())

    async def release_holder(self, holder: str, *, died: bool = True) -> int:
        """Requeue all groups leased by a process that died or left; return their number."""
        self._release_counts[holder] += 1
        for waiters in self._waiters.values():
            waiters.wake_all()
        leases = self._lease_table.find_by_holder(holder)
        reason = f"{holder} died while holding the lease"
        for group, lease in leases:
            if died:
                self._nack_lease(group, lease, GroupOutcome(f"{lease.stage}_died", reason))
            else:  # leaving in good order does not count as an attempt
                self._post_records(transitions.make_nack_record(lease, failed=False))
        return len(leases)

    async def find_overdue(self, age_s: float) -> list[OverdueLease]:
        return self._lease_table.find_overdue(age_s)

    async def measure_growth_age(self) -> float:
        return self._clock() - self._lease_table.grown_at

    async def requeue_overdue(self, overdue: Sequence[OverdueLease]) -> None:
        for stall in overdue:
            lease = stall.lease
            if group := self._state.find_leased_group(lease):
                reason = (
                    f"{lease.holder} made no progress for {stall.age_s:.0f} s (pipeline.stall_s)"
                )
                self._nack_lease(group, lease, GroupOutcome(f"{lease.stage}_stalled", reason))

    async def locate_groups(self, uids: Sequence[str]) -> dict[str, str]:
        groups = {uid: self._state.groups[uid] for uid in uids if uid in self._state.groups}
        return {uid: _describe_group(self._state, group) for uid, group in groups.items()}

    # Transitions: journal a record and apply its effect.

    async def _write_records(
        self, records: Sequence[JournalRecord], data: Sequence[Any] = ()
    ) -> None:
        """Journal records, then apply them. data: stored blob of each record, if any."""
        await self._log.append(records)
        self._apply_records(*records, data=data)

    def _post_records(self, *records: JournalRecord) -> None:
        """Apply records at once and journal them without waiting for the disk."""
        self._log.append_nowait(records)
        self._apply_records(*records)

    def _apply_records(self, *records: JournalRecord, data: Sequence[Any] = ()) -> None:
        pairs = itertools.zip_longest(records, data)
        changed = [group for r, datum in pairs for group in self._state.apply_record(r, data=datum)]
        self._refresh_groups(dict.fromkeys(changed))

    def _refresh_groups(self, groups: Collection[GroupState]) -> None:
        """Update ready queues, reservations and waiting requests after a change of groups."""
        for stage, ready in self._ready_queues.items():
            if ready.update_groups(groups, partial(self._state.is_ready, stage=stage)):
                self._stats_recorder.depth_meter.observe_depth(stage, len(ready), self._clock())
            self._waiters[stage].wake_requests(len(ready))
        for history in self._column_histories.values():
            history.record_groups(groups)
        for group in groups:
            self._capacity_limiter.update_reservation(group)
            if group.uid not in self._state.groups:
                self._finished_groups.pop(group.uid, None)
                for history in self._column_histories.values():
                    history.forget_group(group.uid)
            elif group.outcome is not None:
                self._finished_groups[group.uid] = group
                self._group_finished.set()

    def _nack_lease(
        self, group: GroupState, lease: GroupLease, outcome: GroupOutcome, *, is_final: bool = False
    ) -> None:
        """End a lease as a failed attempt; after the last attempt, drop the group with `outcome`.

        is_final: drop the group without further attempts.
        """
        self._post_records(transitions.make_nack_record(lease, failed=True))
        is_held = lease.stage in group.leases or lease.stage in group.committing_stages
        if not is_held and (is_final or group.failures[lease.stage] >= self._config.max_attempts):
            self._post_records(transitions.make_finish_record(lease.uid, outcome))

    def _expire_leases(self) -> None:
        for group, lease in self._lease_table.pop_expired():
            reason = f"{lease.holder} was silent for {self._config.lease_s:g} s (queue.lease_s)"
            self._nack_lease(group, lease, GroupOutcome(f"{lease.stage}_lease_expired", reason))


async def _wait_for_event(event: asyncio.Event, timeout_s: float) -> None:
    with suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), max(timeout_s, MIN_WAIT_S))


def _start_commit(state: ShardState, commit: ColumnCommit, group: GroupState | None) -> bool:
    """Reserve a group's stage for this commit; return False if the group does not need the commit.

    After True, every later commit of the stage for this group is refused.
    """
    stage = commit.lease.stage
    if (
        group is None
        or group.outcome
        or stage in group.stage_columns
        or stage in group.committing_stages
    ):
        return False
    group.committing_stages.add(stage)
    group.leases.pop(stage, None)
    return True


def _save_partial(group: GroupState, commit: ColumnCommit, store: Callable[[Blob], Any]) -> bool:
    """Save partial rollouts in a group, unless longer ones are saved; return whether they grew."""
    stage, num_bytes = commit.lease.stage, count_blob_bytes(commit.blob)
    saved_bytes = group.count_partial_bytes(stage)
    if saved_bytes <= num_bytes:
        columns = StageColumns(tuple(commit.column_sizes), num_bytes, store(commit.blob))
        group.save_partial(stage, columns)
    return saved_bytes < num_bytes


def _make_grant(
    state: ShardState, group: GroupState, lease: GroupLease, wanted: set[str]
) -> LeaseGrant:
    """Build the reply that delivers a leased group, with the blobs of the `wanted` columns."""
    partial_rollouts = group.partial_rollouts.get(lease.stage)
    return LeaseGrant(
        lease=lease,
        admitted_version=group.admitted_version,
        info=group.info,
        ready_version=group.ready_version,
        outcome=group.outcome,
        prompt=None if lease.stage == state.last_stage else group.prompt,
        blobs=tuple(columns.data for columns in _select_columns(group.stage_columns, wanted)),
        partial_rollouts=() if partial_rollouts is None else (partial_rollouts.data,),
    )


def _select_columns(
    stage_columns: Mapping[str, StageColumns], wanted: set[str]
) -> list[StageColumns]:
    """Return the commits that contain some of the `wanted` columns."""
    return [c for c in stage_columns.values() if not wanted.isdisjoint(c.column_names)]


def _get_group_info(commit: ColumnCommit, group: GroupState | None) -> GroupInfo | None:
    return (group.info if group else None) or commit.info


def _to_commit_record(state: ShardState, commit: ColumnCommit) -> JournalRecord:
    info = _get_group_info(commit, state.groups.get(commit.lease.uid))
    if info is not None and commit.pass_rate is not None:
        info = structs.replace(info, pass_rate=commit.pass_rate)
    return transitions.make_commit_record(
        commit.uid,
        commit.lease.stage,
        commit.blob,
        names=commit.column_sizes,
        info=info,
        version=state.version,
    )


def _describe_group(state: ShardState, group: GroupState) -> str:
    """Describe the holders of a group, or the stages that may lease it, for a stall message."""
    now = state.clock()
    holders = [
        f"{active.lease.holder} for {now - active.lease.granted_at:.1f} s"
        f" ({active.lease.stage}, attempt {active.lease.attempt})"
        for active in group.leases.values()
    ]
    stages = [stage for stage in state.stages if state.is_ready(group, stage)]
    status = (
        f"held by {', '.join(holders)}" if holders else f"ready for {', '.join(stages) or 'none'}"
    )
    return f"{status}, admitted {now - group.admitted_at:.1f} s ago"


def _read_blobs(state: ShardState, uid: str, wanted: set[str]) -> ColumnBlobs:
    """Return the blobs that contain the `wanted` columns of a group, from memory or the journal.

    The group may be removed already. Raises StreamError if a column is lost.
    """
    group = state.groups.get(uid)
    stage_columns = group.stage_columns if group else state.retired_groups.get(uid)
    if stage_columns is None:
        raise StreamError(f"group {uid} is neither in the queue nor in its journal")
    names = (columns.column_names for columns in stage_columns.values())
    if lost := wanted.difference(OPTIONAL_COLUMNS, *names):
        raise StreamError(f"group {uid}: no {sorted(lost)} are in the queue or in its journal")
    return ColumnBlobs(
        join_pieces(read_blob(columns)) if columns.data is None else columns.data
        for columns in _select_columns(stage_columns, wanted)
    )

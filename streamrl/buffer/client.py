"""Client of the experience queue: routes calls to the shard that owns a uid."""

import asyncio
import itertools
import math
import uuid
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

from streamrl.buffer.encoding import (
    Blob,
    ColumnCommit,
    FinishedGroup,
    LeaseGrant,
    decode_columns,
    decode_prompt,
    encode_columns,
    encode_prompt,
    get_shard_index,
)
from streamrl.buffer.shard import LeaseRequest, OverdueLease, QueueShard, ShardStats, merge_stats
from streamrl.errors import ContractError, DeadlineError, StreamError
from streamrl.messages import (
    OPTIONAL_COLUMNS,
    ROLLOUT_COLUMNS,
    Array,
    Columns,
    Experience,
    FilteredGroup,
    GroupInfo,
    GroupLease,
    Prompt,
    check_loss_mask,
    check_samples,
    measure_columns,
)

P = ParamSpec("P")
E = TypeVar("E")
T = TypeVar("T")
CAPACITY_WAIT_S = 600.0
"""Longest wait for capacity, of a prompt in total and of a single request to a shard, s."""
LEASE_REQUEST_WAIT_S = 20.0
"""Time that a lease request waits at a shard before the client repeats it, s."""
_ROLLOUT_COLUMN_NAMES = set(ROLLOUT_COLUMNS)


class ShardProxy(Protocol):
    """Handle of a queue shard, through which clients call the shard's methods."""

    async def call(
        self,
        method: Callable[Concatenate[QueueShard, P], Coroutine[Any, Any, T]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Run a method of the shard and return its result; column blobs in it arrive as bytes."""
        ...


class ExperienceQueue:
    """Client of the experience queue. A group lives in the shard that its uid hashes to.

    A client leases groups for a single process (`holder`) on a single event loop; any number of
    clients share the shards. The holder keeps a group until it commits, fails or filters the group.
    Meanwhile the holder must renew leases, at least every `max_renew_interval_s`: renewals report
    lost leases, so that useless work can be cancelled. Guarantees: docs/queue.md.
    """

    def __init__(
        self, shards: Sequence[ShardProxy], holder: str, *, max_renew_interval_s: float = math.inf
    ) -> None:
        self.shards = shards
        self._holder = holder
        self._max_renew_interval_s = max_renew_interval_s
        self._requests: dict[tuple[str, int], asyncio.Future[list[LeaseGrant]]] = {}
        # Request ids must differ from those of a restarted process with the same name.
        client = f"{holder}/{uuid.uuid4().hex[:8]}"
        self._request_ids = (f"{client}/{n}" for n in itertools.count())
        self._read_positions: dict[str, list[int]] = {}
        """Of each column and shard, what `find_uids_with` has read."""
        self._pending_grants: dict[str, deque[LeaseGrant]] = {}
        self._held_leases: dict[GroupLease, None] = {}
        """Active leases. The coordinator holds those of all groups that are ready to train."""
        self._shortest_lease_s = math.inf
        """Shortest duration of a lease granted since the client last held none."""
        self._renewed_at = 0.0
        self._renewal: asyncio.Future[list[GroupLease]] | None = None
        self._lost_leases: dict[GroupLease, None] = {}

    def get_shard_index(self, uid: str) -> int:
        return get_shard_index(uid, len(self.shards))

    async def insert_prompts(
        self,
        prompts: Sequence[Prompt],
        version: int,
        *,
        wait_s: float = CAPACITY_WAIT_S,
        on_entered: Callable[[Collection[str]], None] = lambda uids: None,
    ) -> None:
        """Insert prompts into the queue; wait while their shard is full.

        version: policy version at which the prompts are admitted.
        on_entered: called with the uids of each inserted batch.

        Raises DeadlineError if a shard admits no prompt within `wait_s`; some prompts may be in the
        queue then. Pass an infinite `wait_s` only if the consumer of these groups has a deadline.
        """
        entries = [(prompt.uid, encode_prompt(prompt), version) for prompt in prompts]
        await _gather_all(
            _send_entries(shard, batch, wait_s, on_entered)
            for shard, batch in self._select_owners(entries)
        )

    async def lease_groups(
        self,
        stage: str,
        *,
        max_groups: int,
        columns: Sequence[str],
        wait_s: float,
    ) -> list[Experience]:
        """Lease groups that are ready for `stage`: at least one, or [] after `wait_s`.

        Columns are read-only views of a whole reply or object-store buffer, which stays alive as
        long as any view: copy columns that you keep. Also renews active leases when renewal is
        due. All calls for a stage want the same `columns`. Raises ContractError for columns outside
        the stage's `needs`.

        One request per shard stays pending across calls, so that repeated calls never lease twice;
        grants from several shards wait in `_pending_grants` for the next call.
        """
        if max_groups < 1:
            raise ContractError(
                f"stage {stage} requests max_groups={max_groups}: must be at least 1"
            )
        pending = self._pending_grants.setdefault(stage, deque())
        deadline = _read_loop_time() + wait_s
        if not await self._renew_if_due(wait_s):
            return []
        if not pending:
            request = LeaseRequest(stage, self._holder, max_groups, tuple(columns))
            await self._await_grants(request, deadline - _read_loop_time())
        grants = list(islice(pending, max_groups))
        experiences = [_make_experience(grant, columns) for grant in grants]
        for _ in grants:  # only after decoding: leases are active, do not lose them
            pending.popleft()
        return experiences

    async def _renew_if_due(self, wait_s: float) -> bool:
        """Renew the active leases if that is due; return False if it takes longer than `wait_s`."""
        if self._renewal is None and _read_loop_time() - self._renewed_at >= self.renew_interval_s:
            self._renewal = asyncio.ensure_future(self._renew_active())
        if self._renewal is not None:
            await asyncio.wait([self._renewal], timeout=wait_s)
            if not self._renewal.done():
                return False
            renewal, self._renewal = self._renewal, None
            self._lost_leases |= dict.fromkeys(renewal.result())
        return True

    async def _await_grants(self, wanted: LeaseRequest, wait_s: float) -> None:
        """Send a lease request to every shard; wait until the first shard replies, or for `wait_s`.

        Appends the granted groups to the stage's pending grants. Other requests stay open at their
        shards for the next call.
        """
        stage = wanted.stage
        share = -(-wanted.max_groups // len(self.shards))
        for i, shard in enumerate(self.shards):
            if (stage, i) not in self._requests:
                request = replace(wanted, max_groups=share, request_id=next(self._request_ids))
                self._requests[stage, i] = asyncio.ensure_future(
                    self._request_grants(shard, request)
                )
        pending = {i: self._requests[stage, i] for i in range(len(self.shards))}
        done, _ = await asyncio.wait(
            pending.values(), timeout=wait_s, return_when=asyncio.FIRST_COMPLETED
        )
        # Iterate by shard index, not over the unordered set: the order of grants is reproducible.
        for i, future in pending.items():
            if future in done:
                del self._requests[stage, i]
                self._pending_grants[stage] += self._select_active(future.result())

    def cancel_requests(self) -> None:
        """Cancel all lease requests that wait at the shards.

        A shard may still grant a cancelled request; `release_holder` requeues such groups.
        """
        for future in self._requests.values():
            future.cancel()
        self._requests.clear()

    async def _request_grants(self, shard: ShardProxy, request: LeaseRequest) -> list[LeaseGrant]:
        """Request leases from one shard; count the granted leases as active."""
        # Pending grants count as active leases: renewals must include them.
        grants = await shard.call(QueueShard.lease_groups, request, wait_s=LEASE_REQUEST_WAIT_S)
        if not self._held_leases:
            self._renewed_at = _read_loop_time()
            self._shortest_lease_s = math.inf
        for lease in (grant.lease for grant in grants):
            self._held_leases[lease] = None
            duration_s = lease.expires_at - lease.granted_at
            self._shortest_lease_s = min(self._shortest_lease_s, duration_s)
        return grants

    async def commit_columns(self, entries: Sequence[tuple[GroupLease, Columns]]) -> list[str]:
        """Commit the columns computed for leased groups; return the uids whose lease was lost.

        The columns of the returned uids are discarded. After the return, all other columns survive
        the death of this process and, with a journal, of the shard; until then they must not
        change. If a shard dies during the call, the commit is repeated: groups that the first
        attempt had written are returned, too, but keep their columns. Raises ContractError for
        columns that differ from the stage's declaration in name, shape or dtype.
        """
        commits = [_make_commit(lease, columns) for lease, columns in entries]
        refused = await self._call_owners(QueueShard.commit_columns, commits)
        self.forget_leases(lease for lease, _ in entries)
        return list(chain.from_iterable(refused))

    async def save_partials(self, entries: Sequence[tuple[GroupLease, Columns]]) -> None:
        """Save partial rollouts of leased groups, so that the next holder can resume them.

        A save replaces the previous save of the group, unless that is longer. The next holder gets
        the columns as `Experience.partial_rollouts`, unless the shard dies first.
        """
        commits = [_make_commit(lease, columns) for lease, columns in entries]
        await self._call_owners(QueueShard.save_partials, commits)

    async def fail_groups(self, entries: Sequence[tuple[GroupLease, StreamError]]) -> None:
        await self._call_owners(QueueShard.fail_groups, entries)
        self.forget_leases(lease for lease, _ in entries)

    async def filter_groups(self, entries: Sequence[tuple[GroupLease, FilteredGroup]]) -> None:
        await self._call_owners(QueueShard.filter_groups, entries)
        self.forget_leases(lease for lease, _ in entries)

    async def renew_leases(self) -> list[GroupLease]:
        """Renew all active leases of this client; return the leases lost since the last call."""
        newly_lost = await self._renew_active()
        lost, self._lost_leases = self._lost_leases, {}
        return [*lost, *newly_lost]

    async def _renew_active(self) -> list[GroupLease]:
        self._renewed_at = _read_loop_time()
        lost = await self._call_owners(QueueShard.renew_leases, list(self._held_leases))
        newly_lost = list(chain.from_iterable(lost))
        self.forget_leases(newly_lost)
        for pending in self._pending_grants.values():
            active = self._select_active(pending)
            pending.clear()
            pending.extend(active)
        return newly_lost

    @property
    def renew_interval_s(self) -> float:
        """Interval at which this client must renew its leases, s; infinite without active leases.

        A third of the shortest lease's duration, at most `max_renew_interval_s`.
        """
        if not self._held_leases:
            return math.inf
        return min(self._shortest_lease_s / 3, self._max_renew_interval_s)

    async def read_columns(self, uids: Iterable[str], columns: Sequence[str]) -> dict[str, Columns]:
        """Read columns of groups by uid, without a lease.

        The ranks of a trainer read groups this way that the coordinator has leased.
        """
        groups = await self._read_blobs(QueueShard.read_columns, uids, columns)
        return {uid: _select_columns(blobs, columns) for uid, blobs in groups.items()}

    async def read_leased(
        self, leases: Sequence[GroupLease], columns: Sequence[str]
    ) -> dict[GroupLease, Columns]:
        """Read columns of leased groups, of any holder; omit groups whose lease was lost.

        The ranks of a model read groups this way that their leader has leased.
        """
        groups = await self._read_blobs(QueueShard.read_leased, leases, columns)
        return {lease: _select_columns(blobs, columns) for lease, blobs in groups.items() if blobs}

    async def _read_blobs(
        self, method: Callable[..., Any], keys: Iterable[E], columns: Sequence[str]
    ) -> dict[E, Sequence[Blob]]:
        """Read, by uid or lease, the blobs with columns of groups from the shards that own them."""
        routed = self._select_owners(keys)
        replies = await _gather_all(shard.call(method, batch, columns) for shard, batch in routed)
        batches = (batch for _, batch in routed)
        return dict(zip(chain(*batches), chain(*replies), strict=True))

    async def find_uids_with(self, column: str) -> list[str]:
        """Return the uids of the groups that got a column since the last call of this client."""
        positions = self._read_positions.setdefault(column, [0] * len(self.shards))
        replies = await _gather_all(
            shard.call(QueueShard.find_uids_with, column, position)
            for shard, position in zip(self.shards, positions, strict=True)
        )
        self._read_positions[column] = [position for _, position in replies]
        return [uid for uids, _ in replies for uid in uids]

    async def wait_for_finished(self, *, wait_s: float) -> list[FinishedGroup]:
        """Wait for filtered or dropped groups that are still in the queue; [] after `wait_s`."""
        return await _gather_first(
            shard.call(QueueShard.wait_for_finished, wait_s=wait_s) for shard in self.shards
        )

    async def remove_groups(self, uids: Sequence[str], version: int) -> None:
        """Remove trained, filtered or dropped groups from the queue.

        version: policy version that is in training from now on.
        """
        await self._call_owners(QueueShard.remove_groups, uids, version)
        self._forget_groups(uids)

    async def end_step(
        self, uids: Sequence[str], version: int, keep: Sequence[str] | None = None
    ) -> ShardStats:
        """Remove the groups of a finished training step; return statistics of the step, all shards.

        version: policy version that is in training from now on. keep: all groups whose columns stay
        for replays; None: as before.
        """
        # Also the shards without groups of this step learn the version.
        batches, kept = self._route_entries(uids), self._route_entries(keep or ())
        stats = await _gather_all(
            shard.call(QueueShard.end_step, batch, version, None if keep is None else share)
            for shard, batch, share in zip(self.shards, batches, kept, strict=True)
        )
        self._forget_groups(uids)
        return merge_stats(stats)

    async def get_stats(self) -> ShardStats:
        return merge_stats(await self._call_all(QueueShard.get_stats))

    async def release_holder(self, holder: str, *, died: bool = True) -> int:
        """Requeue all groups leased by a process (`holder`) that died or left; return their number.

        died: count a failed attempt for each group.
        """
        return sum(await self._call_all(QueueShard.release_holder, holder, died=died))

    async def find_overdue(self, age_s: float) -> list[OverdueLease]:
        return list(chain.from_iterable(await self._call_all(QueueShard.find_overdue, age_s)))

    async def measure_growth_age(self) -> float:
        """Return the seconds since a partial rollout of a leased group has last grown."""
        return min(await self._call_all(QueueShard.measure_growth_age))

    async def requeue_overdue(self, overdue: Sequence[OverdueLease]) -> None:
        """End overdue leases that are still active, and requeue their groups."""
        await self._call_owners(QueueShard.requeue_overdue, overdue)

    async def locate_groups(self, uids: Sequence[str]) -> dict[str, str]:
        """Describe the holders of each group, by uid, for a stall message.

        For a group without a holder, the text names the stages that may lease the group.
        """
        replies = await self._call_owners(QueueShard.locate_groups, uids)
        return {uid: phrase for phrases in replies for uid, phrase in phrases.items()}

    def _select_active(self, grants: Iterable[LeaseGrant]) -> list[LeaseGrant]:
        """Return the grants with a lease that is still active."""
        return [grant for grant in grants if grant.lease in self._held_leases]

    def forget_leases(self, leases: Iterable[GroupLease]) -> None:
        """Stop renewing leases, whose groups were committed, failed or filtered."""
        for lease in leases:
            self._held_leases.pop(lease, None)
            self._lost_leases.pop(lease, None)

    def _forget_groups(self, uids: Iterable[str]) -> None:
        removed = set(uids)
        self.forget_leases([lease for lease in self._held_leases if lease.uid in removed])

    async def _call_owners(
        self,
        method: Callable[Concatenate[QueueShard, Sequence[E], P], Coroutine[Any, Any, T]],
        entries: Iterable[E],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[T]:
        """Run a method on the shards that own the entries, each with its own entries."""
        return await _gather_all(
            shard.call(method, batch, *args, **kwargs)
            for shard, batch in self._select_owners(entries)
        )

    async def _call_all(
        self,
        method: Callable[Concatenate[QueueShard, P], Coroutine[Any, Any, T]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[T]:
        return await _gather_all(shard.call(method, *args, **kwargs) for shard in self.shards)

    def _select_owners(self, entries: Iterable[E]) -> list[tuple[ShardProxy, list[E]]]:
        """Return the shards that own groups of the entries, each with its entries."""
        pairs = zip(self.shards, self._route_entries(entries), strict=True)
        return [(shard, batch) for shard, batch in pairs if batch]

    def _route_entries(self, entries: Iterable[E]) -> list[list[E]]:
        """Return for each shard the entries about groups that it owns."""
        batches: list[list[E]] = [[] for _ in self.shards]
        for entry in entries:
            batches[self.get_shard_index(_get_uid(entry))].append(entry)
        return batches


def _get_uid(entry: Any) -> str:
    """Return the uid of the group that an entry of a call is about.

    A tuple begins with what has the uid: a uid itself, a lease, or another tuple.
    """
    if isinstance(entry, tuple):
        return _get_uid(entry[0])
    return entry if isinstance(entry, str) else str(entry.uid)


async def _gather_all(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Await all calls and return their results; raise the first error once all calls have ended."""
    # Wait for all calls before raising: a call left running could still deliver a grant or commit
    # that the caller repeats after the error.
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return cast(list[T], results)


async def _gather_first(calls: Iterable[Coroutine[Any, Any, list[T]]]) -> list[T]:
    """Return the results of the calls that finish first, and cancel the rest."""
    futures = [asyncio.ensure_future(call) for call in calls]
    try:
        done, _ = await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        return [item for future in futures if future in done for item in future.result()]
    finally:
        for future in futures:
            future.cancel()


async def _send_entries(
    shard: ShardProxy,
    entries: Sequence[tuple[str, bytes, int]],
    wait_s: float,
    on_entered: Callable[[Collection[str]], None],
) -> None:
    """Send entries to their shard, as many at a time as it has capacity for, until all are in.

    Raises DeadlineError if nothing gets in for `wait_s`.
    """
    waiting, limit = deque(entries), len(entries)
    deadline = _read_loop_time() + wait_s
    while waiting:
        remaining_s = deadline - _read_loop_time()
        batch = [waiting.popleft() for _ in range(min(limit, len(waiting)))]
        request_s = min(remaining_s, CAPACITY_WAIT_S)
        try:
            entered = set(await shard.call(QueueShard.admit_entries, batch, wait_s=request_s))
        except DeadlineError:
            if remaining_s <= CAPACITY_WAIT_S:
                raise
            entered = set()
        else:
            deadline = _read_loop_time() + wait_s
        on_entered(entered)
        waiting.extendleft(reversed([entry for entry in batch if entry[0] not in entered]))
        # A nearly full shard admits few at a time: do not send it all others again and again.
        limit = max(1, 2 * len(entered))


def _read_loop_time() -> float:
    return asyncio.get_running_loop().time()


def _make_commit(lease: GroupLease, columns: Columns) -> ColumnCommit:
    sizes = measure_columns(columns)
    info = None
    if columns.keys() >= _ROLLOUT_COLUMN_NAMES:
        check_samples(columns)
        info = GroupInfo.from_columns(columns)
        check_loss_mask(columns)
    rate = float(columns["pass_rate"][0]) if "pass_rate" in columns else None
    return ColumnCommit(lease, encode_columns(columns), sizes, info, rate)


def _make_experience(grant: LeaseGrant, columns: Sequence[str]) -> Experience:
    return Experience(
        lease=grant.lease,
        admitted_version=grant.admitted_version,
        prompt=None if grant.prompt is None else decode_prompt(grant.prompt),
        columns={} if grant.outcome else _select_columns(grant.blobs, columns),
        info=grant.info,
        ready_version=grant.ready_version,
        outcome=grant.outcome,
        partial_rollouts=_decode_blobs(grant.partial_rollouts) if grant.partial_rollouts else None,
    )


def _decode_blobs(blobs: Sequence[Blob]) -> dict[str, Array]:
    columns: dict[str, Array] = {}
    for blob in blobs:
        columns |= decode_columns(blob)
    return columns


def _select_columns(blobs: Sequence[Blob], names: Sequence[str]) -> Columns:
    columns = _decode_blobs(blobs)
    if missing := {*names} - columns.keys() - {*OPTIONAL_COLUMNS}:
        raise ContractError(f"columns {sorted(missing)} do not exist yet, only {sorted(columns)}")
    return {name: columns[name] for name in names if name in columns}

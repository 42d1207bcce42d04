"""The queue as its users see it: one object that routes to the shards, in each process."""

import asyncio
import itertools
import math
import uuid
from collections import deque
from collections.abc import (
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeVar, cast

from streamrl.buffer.codec import Blob, decode_columns, encode_columns
from streamrl.buffer.leases import LeaseRequest, OverdueLease
from streamrl.buffer.prompt_codec import decode_prompt, encode_prompt
from streamrl.buffer.wire_types import (
    ColumnCommit,
    FinishedGroup,
    LeaseGrant,
    ShardStats,
    get_shard_index,
    merge_stats,
)
from streamrl.errors import ContractError, DeadlineError, StreamError
from streamrl.messages import (
    ROLLOUT_COLUMNS,
    Array,
    Columns,
    Experience,
    FilteredGroup,
    GroupInfo,
    GroupLease,
    Prompt,
    measure_columns,
)

T = TypeVar("T")
CAPACITY_WAIT_S = 600.0
"""Longest that an admitted prompt waits for room in its shard, and one request for it, s."""
LEASE_REQUEST_WAIT_S = 20.0
"""How long a request for groups waits at a shard before it is made anew, s."""
_ROLLOUT_COLUMN_NAMES = set(ROLLOUT_COLUMNS)
"""Who puts these columns has generated the group, and says its facts."""


class ShardProtocol(Protocol):
    """What the client calls on a shard, wherever it lives. Blobs arrive as bytes."""

    async def admit_prompts(
        self, entries: Sequence[tuple[str, bytes, int]], *, wait_s: float
    ) -> list[str]: ...

    async def add_groups(
        self,
        entries: Sequence[tuple[str, bytes, int]],
        commits: Sequence[ColumnCommit],
        *,
        wait_s: float,
    ) -> list[str]: ...

    async def lease_groups(self, request: LeaseRequest, *, wait_s: float) -> list[LeaseGrant]: ...

    async def commit_columns(self, commits: Sequence[ColumnCommit]) -> list[str]: ...

    async def save_partials(self, commits: Sequence[ColumnCommit]) -> None: ...

    async def fail_groups(self, entries: Sequence[tuple[GroupLease, StreamError]]) -> None: ...

    async def filter_groups(self, entries: Sequence[tuple[GroupLease, FilteredGroup]]) -> None: ...

    async def renew_leases(self, leases: Sequence[GroupLease]) -> list[GroupLease]: ...

    async def read_columns(
        self, uids: Sequence[str], columns: Sequence[str]
    ) -> list[Sequence[Blob]]: ...

    async def find_uids_with(self, column: str) -> list[str]: ...

    async def wait_for_finished(self, *, wait_s: float) -> list[FinishedGroup]: ...

    async def remove_groups(self, uids: Sequence[str], version: int) -> None: ...

    async def end_step(self, uids: Sequence[str], version: int) -> ShardStats: ...

    async def get_stats(self) -> ShardStats: ...

    async def release_holder(self, holder: str, *, died: bool = True) -> int: ...

    async def find_overdue(self, age_s: float) -> list[OverdueLease]: ...

    async def requeue_overdue(self, found: Sequence[OverdueLease]) -> None: ...

    async def locate_groups(self, uids: Sequence[str]) -> dict[str, str]: ...


class ExperienceQueue:
    """Sharded queue of experiences. A group lives in the shard its uid hashes to.

    A client belongs to one user, its leases' `holder`, on one event loop; any number of clients
    share the shards. What a user takes it holds until it puts, fails or filters it, and should
    renew meanwhile, every `hears_s` at least: by that it hears of work that is in vain. Guarantees:
    docs/queue.md.
    """

    def __init__(
        self, shards: Sequence[ShardProtocol], holder: str, *, hears_s: float = math.inf
    ) -> None:
        self.shards = shards
        self._holder = holder
        self._max_renew_interval_s = hears_s
        self._requests: dict[tuple[str, int], asyncio.Future[list[LeaseGrant]]] = {}
        # A successor of the same name must not be taken for this one.
        client = f"{holder}/{uuid.uuid4().hex[:8]}"
        self._request_ids = (f"{client}/{n}" for n in itertools.count())
        self._pending_grants: dict[str, deque[LeaseGrant]] = {}
        self._active_leases: dict[tuple[str, int], GroupLease] = {}
        self._renewed_at = 0.0
        self._renewal: asyncio.Future[list[GroupLease]] | None = None
        self._lost_leases: dict[tuple[str, int], GroupLease] = {}

    def get_shard_index(self, uid: str) -> int:
        """Index of the shard that owns `uid`; the same in every process."""
        return get_shard_index(uid, len(self.shards))

    async def admit_prompts(
        self,
        prompts: Sequence[Prompt],
        version: int,
        *,
        wait_s: float = CAPACITY_WAIT_S,
        on_entered: Callable[[Collection[str]], None] = lambda uids: None,
    ) -> None:
        """Put prompts in, admitted at `version`. Blocks while a shard is full.

        `on_entered` is told of those that are in, as they come in. Raises DeadlineError if a shard
        lets none in for `wait_s`; some may be in then. It may be infinite where somebody else's
        wait for these groups has an end.
        """
        entries = [_encode_entry(prompt, version) for prompt in prompts]
        parts = self._route_entries([(entry[0], entry) for entry in entries])
        await _gather_all(
            _admit_entries(self.shards[i], p, wait_s, on_entered) for i, p in parts.items()
        )

    async def add_groups(
        self,
        groups: Sequence[tuple[Prompt, Columns]],
        version: int,
        *,
        stage: str,
        wait_s: float = CAPACITY_WAIT_S,
    ) -> None:
        """Put prompts in together with the columns that `stage` makes; blocks as `admit` does.

        For groups that are made elsewhere. Once it returns they survive their maker and the shard;
        until then the columns must not change. Raises ContractError for columns that are not those
        the stage declared, or badly shaped.
        """
        entries = [
            (
                _encode_entry(prompt, version),
                _make_commit(GroupLease(0, prompt.uid, stage, 0, 0.0), columns),
            )
            for prompt, columns in groups
        ]
        parts = self._route_entries([(entry[0], (entry, commit)) for entry, commit in entries])
        await _gather_all(_add_entries(self.shards[i], part, wait_s) for i, part in parts.items())

    async def lease_groups(
        self,
        stage: str,
        *,
        max_groups: int,
        columns: Sequence[str],
        wait_s: float,
        max_tokens: int | None = None,
    ) -> list[Experience]:
        """Lease groups that are ready for `stage`: at least one, or none after `wait_s`.

        They come with the named columns; together they hold at most `max_tokens`, a single larger
        group apart. Columns are read-only views of a whole answer or of an object in the store,
        which stay as long as one of their columns does: copy what is to be kept. One request waits
        at each shard and outlives the call, so that nobody asks twice for the same; what several
        have answered is kept here for the next call. So each call renews what is held, if it is
        time to. Raises ContractError for columns that are not among what the stage needs.
        """
        for name, most in (("max_groups", max_groups), ("max_tokens", max_tokens)):
            if most is not None and most < 1:
                raise ContractError(f"stage {stage} takes {name}={most}: must be at least 1")
        pending = self._pending_grants.setdefault(stage, deque())
        deadline = _loop_time() + wait_s
        if not await self._renew_if_due(wait_s):
            return []
        if not pending:
            wanted = LeaseRequest(stage, self._holder, max_groups, tuple(columns), max_tokens)
            await self._await_grants(wanted, deadline - _loop_time())
        taken: list[LeaseGrant] = []
        tokens = 0
        while pending and len(taken) < max_groups:
            info = pending[0].info
            tokens += info.num_tokens if info else 0
            if taken and max_tokens is not None and tokens > max_tokens:
                break
            taken.append(pending.popleft())
        try:
            return await self._open_grants(taken, columns)
        except BaseException:
            pending.extendleft(reversed(taken))  # they are held, and must not be lost
            raise

    async def _renew_if_due(self, wait_s: float) -> bool:
        """Renew what is held, if it is time to; whether that was done within `wait_s`."""
        if self._renewal is None and _loop_time() - self._renewed_at >= self.renew_interval_s:
            self._renewal = asyncio.ensure_future(self._renew_active())
        if self._renewal is not None:
            await asyncio.wait([self._renewal], timeout=wait_s)
            if not self._renewal.done():
                return False
            renewal, self._renewal = self._renewal, None
            self._lost_leases.update((_lease_key(lease), lease) for lease in renewal.result())
        return True

    async def _open_grants(
        self, grants: Sequence[LeaseGrant], columns: Sequence[str]
    ) -> list[Experience]:
        """What was granted as the user sees it."""
        found = [_decode_blobs(grant.blobs) for grant in grants]
        # What an earlier call for other columns has asked for may have been answered since.
        short = [
            grant.lease.uid
            for grant, own in zip(grants, found, strict=True)
            if not (grant.outcome or all(name in own for name in columns))
        ]
        more = await self.read_columns(short, columns) if short else {}
        return [
            _make_experience(grant, more.get(grant.lease.uid, own), columns)
            for grant, own in zip(grants, found, strict=True)
        ]

    async def _await_grants(self, wanted: LeaseRequest, wait_s: float) -> None:
        """Wait until a shard has answered; put what came into the stage's pending groups."""
        stage = wanted.stage
        share = -(-wanted.max_groups // len(self.shards))
        for i, shard in enumerate(self.shards):
            if (stage, i) not in self._requests:
                request = replace(wanted, max_groups=share, request_id=next(self._request_ids))
                self._requests[stage, i] = asyncio.ensure_future(
                    self._request_grants(shard, request)
                )
        mine = {i: self._requests[stage, i] for i in range(len(self.shards))}
        done, _ = await asyncio.wait(
            mine.values(), timeout=wait_s, return_when=asyncio.FIRST_COMPLETED
        )
        # In the order of the shards, not of the set: what is taken follows from the schedule.
        for i, asked in mine.items():
            if asked in done:
                del self._requests[stage, i]
                self._pending_grants[stage] += self._select_active(asked.result())

    def cancel_requests(self) -> None:
        """Ask for nothing any more: what a shard still grants is its to take back by `release`."""
        for asked in self._requests.values():
            asked.cancel()
        self._requests.clear()

    async def _request_grants(
        self, shard: ShardProtocol, request: LeaseRequest
    ) -> list[LeaseGrant]:
        """What is granted is held from here on, also while nobody has come to fetch it."""
        grants = await shard.lease_groups(request, wait_s=LEASE_REQUEST_WAIT_S)
        if not self._active_leases:
            self._renewed_at = _loop_time()
        self._active_leases.update((_lease_key(grant.lease), grant.lease) for grant in grants)
        return grants

    async def commit_columns(self, entries: Sequence[tuple[GroupLease, Columns]]) -> list[str]:
        """Commit finished work; returns uids refused because their lease was no longer good.

        Once it returns, what was not refused survives the death of this process and of the shard;
        until then the columns must not change. If a shard dies over the call, a commit it has
        written is refused when it is repeated: it was accepted the first time. Raises ContractError
        for columns that are not those the stage declared, or badly shaped.
        """
        commits = [_make_commit(lease, columns) for lease, columns in entries]
        parts = self._route_entries([(commit.lease.uid, commit) for commit in commits])
        refused = await _gather_all(
            self.shards[i].commit_columns(part) for i, part in parts.items()
        )
        self._forget_leases(lease for lease, _ in entries)
        return [uid for part in refused for uid in part]

    async def save_partials(self, entries: Sequence[tuple[GroupLease, Columns]]) -> None:
        """Leave what was begun of leased work with the queue, in the place of what it had of it.

        It is in `Experience.begun` of who is handed the group next, unless the shard died over it.
        """
        parts = self._route_entries(
            [(lease.uid, _make_commit(lease, columns)) for lease, columns in entries]
        )
        await _gather_all(self.shards[i].save_partials(part) for i, part in parts.items())

    async def fail_groups(self, entries: Sequence[tuple[GroupLease, StreamError]]) -> None:
        """Give groups back that could not be worked on, each with the error."""
        parts = self._route_entries([(lease.uid, (lease, error)) for lease, error in entries])
        await _gather_all(self.shards[i].fail_groups(part) for i, part in parts.items())
        self._forget_leases(lease for lease, _ in entries)

    async def filter_groups(self, entries: Sequence[tuple[GroupLease, FilteredGroup]]) -> None:
        """Take scored groups out of the stream, each for a reason."""
        parts = self._route_entries([(lease.uid, (lease, why)) for lease, why in entries])
        await _gather_all(self.shards[i].filter_groups(part) for i, part in parts.items())
        self._forget_leases(lease for lease, _ in entries)

    async def renew_leases(self) -> list[GroupLease]:
        """Keep all that is held; returns the leases that were lost, whose work is in vain."""
        gone = await self._renew_active()
        lost, self._lost_leases = self._lost_leases, {}
        return [*lost.values(), *gone]

    async def _renew_active(self) -> list[GroupLease]:
        self._renewed_at = _loop_time()
        parts = self._route_entries([(lease.uid, lease) for lease in self._active_leases.values()])
        lost = await _gather_all(self.shards[i].renew_leases(part) for i, part in parts.items())
        gone = [lease for part in lost for lease in part]
        self._forget_leases(gone)
        for pending in self._pending_grants.values():
            kept = self._select_active(pending)
            pending.clear()
            pending.extend(kept)
        return gone

    @property
    def renew_interval_s(self) -> float:
        """How often to renew what is held, s; infinite if nothing that can expire is."""
        terms = (lease.expires_at - lease.granted_at for lease in self._active_leases.values())
        return min(
            min(terms, default=math.inf) / 3,
            self._max_renew_interval_s if self._active_leases else math.inf,
        )

    async def read_columns(self, uids: Iterable[str], columns: Sequence[str]) -> dict[str, Columns]:
        """Columns of groups by uid, without a lease: for the ranks that train a leased group."""
        parts = self._route_entries([(uid, uid) for uid in uids])
        found = await _gather_all(
            self.shards[i].read_columns(part, columns) for i, part in parts.items()
        )
        return {
            uid: _select_columns(blobs, columns)
            for part, groups in zip(parts.values(), found, strict=True)
            for uid, blobs in zip(part, groups, strict=True)
        }

    async def find_uids_with(self, column: str) -> list[str]:
        """The groups that have a column."""
        parts = await _gather_all(shard.find_uids_with(column) for shard in self.shards)
        return [uid for part in parts for uid in part]

    async def wait_for_finished(self, *, wait_s: float) -> list[FinishedGroup]:
        """Groups that have ended and not left yet; none if there is none within `wait_s`."""
        return await _gather_first(shard.wait_for_finished(wait_s=wait_s) for shard in self.shards)

    async def remove_groups(self, uids: Sequence[str], version: int) -> None:
        """These groups are trained or ended, and leave; `version` is trained from now on."""
        parts = self._route_entries([(uid, uid) for uid in uids])
        await _gather_all(self.shards[i].remove_groups(part, version) for i, part in parts.items())
        self._forget_groups(uids)

    async def end_step(self, uids: Sequence[str], version: int) -> ShardStats:
        """As `leave`, at the end of a step; returns its figures over all shards."""
        parts = self._route_entries([(uid, uid) for uid in uids])
        steps = (shard.end_step(parts.get(i, []), version) for i, shard in enumerate(self.shards))
        figures = merge_stats(await _gather_all(steps))
        self._forget_groups(uids)
        return figures

    async def get_stats(self) -> ShardStats:
        """The figures of the step under way over all shards, and what they hold."""
        return merge_stats(await _gather_all(shard.get_stats() for shard in self.shards))

    async def release_holder(self, holder: str, *, died: bool = True) -> int:
        """A holder has died, or left: hand its work out again. Returns how many groups it had."""
        return sum(
            await _gather_all(shard.release_holder(holder, died=died) for shard in self.shards)
        )

    async def find_overdue(self, age_s: float) -> list[OverdueLease]:
        """Work that one holder has had for over `age_s`."""
        parts = await _gather_all(shard.find_overdue(age_s) for shard in self.shards)
        return [one for part in parts for one in part]

    async def requeue_overdue(self, found: Sequence[OverdueLease]) -> None:
        """Work that is overdue is handed out anew, if it is where it was."""
        parts = self._route_entries([(one.uid, one) for one in found])
        await _gather_all(self.shards[i].requeue_overdue(part) for i, part in parts.items())

    async def locate_groups(self, uids: Sequence[str]) -> dict[str, str]:
        """Who holds these groups and for how long, for the message of a stall."""
        parts = await _gather_all(shard.locate_groups(uids) for shard in self.shards)
        return {uid: phrase for part in parts for uid, phrase in part.items()}

    def _select_active(self, grants: Iterable[LeaseGrant]) -> list[LeaseGrant]:
        return [grant for grant in grants if _lease_key(grant.lease) in self._active_leases]

    def _forget_leases(self, leases: Iterable[GroupLease]) -> None:
        for lease in leases:
            self._active_leases.pop(_lease_key(lease), None)
            self._lost_leases.pop(_lease_key(lease), None)

    def _forget_groups(self, uids: Sequence[str]) -> None:
        gone = set(uids)
        self._forget_leases([lease for lease in self._active_leases.values() if lease.uid in gone])

    def _route_entries(self, entries: Sequence[tuple[str, T]]) -> Mapping[int, list[T]]:
        parts: dict[int, list[T]] = {}
        for uid, entry in entries:
            parts.setdefault(self.get_shard_index(uid), []).append(entry)
        return parts


async def _gather_all(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """What several calls return. If one fails its error is raised, but not before all have ended:
    a call that goes on alone would send what the caller believes to be its own again."""
    answers = await asyncio.gather(*calls, return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return cast(list[T], answers)


async def _gather_first(calls: Iterable[Coroutine[Any, Any, list[T]]]) -> list[T]:
    """What those of several calls return that are the first to do so; the others are given up."""
    asked = [asyncio.ensure_future(call) for call in calls]
    try:
        done, _ = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        return [item for reply in asked if reply in done for item in reply.result()]
    finally:
        for reply in asked:
            reply.cancel()


async def _admit_entries(
    shard: ShardProtocol,
    entries: list[tuple[str, bytes, int]],
    wait_s: float,
    on_entered: Callable[[Collection[str]], None],
) -> None:
    while entries:
        enter = partial(shard.admit_prompts, entries)
        entered = set(await _retry_until_capacity(wait_s, enter))
        on_entered(entered)
        entries = [entry for entry in entries if entry[0] not in entered]


async def _add_entries(
    shard: ShardProtocol, pairs: list[tuple[tuple[str, bytes, int], ColumnCommit]], wait_s: float
) -> None:
    while pairs:
        entries, commits = [e for e, _ in pairs], [c for _, c in pairs]
        entered = set(
            await _retry_until_capacity(wait_s, partial(shard.add_groups, entries, commits))
        )
        pairs = [pair for pair in pairs if pair[0][0] not in entered]


async def _retry_until_capacity(
    wait_s: float, enter: Callable[..., Awaitable[list[str]]]
) -> list[str]:
    """Ask for room again and again, as long as that may take."""
    deadline = asyncio.get_running_loop().time() + wait_s
    while True:
        left_s = deadline - asyncio.get_running_loop().time()
        try:
            return await enter(wait_s=min(left_s, CAPACITY_WAIT_S))
        except DeadlineError:
            if left_s <= CAPACITY_WAIT_S:
                raise


def _loop_time() -> float:
    return asyncio.get_running_loop().time()


def _lease_key(lease: GroupLease) -> tuple[str, int]:
    return lease.uid, lease.token


def _encode_entry(prompt: Prompt, version: int) -> tuple[str, bytes, int]:
    return prompt.uid, encode_prompt(prompt), version


def _make_commit(lease: GroupLease, columns: Columns) -> ColumnCommit:
    sizes = measure_columns(columns)
    info = GroupInfo.from_columns(columns) if columns.keys() >= _ROLLOUT_COLUMN_NAMES else None
    return ColumnCommit(lease, encode_columns(columns), sizes, info)


def _make_experience(grant: LeaseGrant, found: Columns, columns: Sequence[str]) -> Experience:
    return Experience(
        lease=grant.lease,
        admitted_version=grant.admitted_version,
        prompt=None if grant.prompt is None else decode_prompt(grant.prompt),
        columns={} if grant.outcome else {name: found[name] for name in columns},
        info=grant.info,
        ready_version=grant.ready_version,
        outcome=grant.outcome,
        partial_rollouts=_decode_blobs(grant.partial_rollouts) if grant.partial_rollouts else None,
    )


def _decode_blobs(blobs: Sequence[Blob]) -> dict[str, Array]:
    """The columns of some blobs."""
    found: dict[str, Array] = {}
    for blob in blobs:
        found |= decode_columns(blob)
    return found


def _select_columns(blobs: Sequence[Blob], columns: Sequence[str]) -> Columns:
    """The named columns among those of some blobs."""
    found = _decode_blobs(blobs)
    if missing := [name for name in columns if name not in found]:
        raise ContractError(f"columns {missing} are not there, only {sorted(found)}")
    return {name: found[name] for name in columns}

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

from streamrl.buffer.codec import Blob, decode, encode
from streamrl.buffer.leases import Overdue, Request
from streamrl.buffer.prompt_codec import decode_prompt, encode_prompt
from streamrl.buffer.wire_types import (
    Commit,
    Farewell,
    Grant,
    ShardStats,
    merge_stats,
    shard_of,
)
from streamrl.errors import ContractError, DeadlineError, StreamError
from streamrl.messages import (
    ROLLOUT_COLUMNS,
    Array,
    Columns,
    Experience,
    Filtered,
    GroupInfo,
    Lease,
    Prompt,
    column_sizes,
)

T = TypeVar("T")
ROOM_WAIT_S = 600.0
"""Longest that an admitted prompt waits for room in its shard, and one request for it, s."""
REQUEST_WAIT_S = 20.0
"""How long a request for groups waits at a shard before it is made anew, s."""
_ROLLOUTS = set(ROLLOUT_COLUMNS)
"""Who puts these columns has generated the group, and says its facts."""


class ShardFace(Protocol):
    """What the client calls on a shard, wherever it lives. Blobs arrive as bytes."""

    async def admit(
        self, entries: Sequence[tuple[str, bytes, int]], *, wait_s: float
    ) -> list[str]: ...

    async def add(
        self, entries: Sequence[tuple[str, bytes, int]], commits: Sequence[Commit], *, wait_s: float
    ) -> list[str]: ...

    async def take(self, request: Request, *, wait_s: float) -> list[Grant]: ...

    async def put(self, commits: Sequence[Commit]) -> list[str]: ...

    async def note(self, commits: Sequence[Commit]) -> None: ...

    async def fail(self, entries: Sequence[tuple[Lease, StreamError]]) -> None: ...

    async def filter(self, entries: Sequence[tuple[Lease, Filtered]]) -> None: ...

    async def renew(self, leases: Sequence[Lease]) -> list[Lease]: ...

    async def read(self, uids: Sequence[str], columns: Sequence[str]) -> list[Sequence[Blob]]: ...

    async def uids_with(self, column: str) -> list[str]: ...

    async def ended(self, *, wait_s: float) -> list[Farewell]: ...

    async def leave(self, uids: Sequence[str], version: int) -> None: ...

    async def end_step(self, uids: Sequence[str], version: int) -> ShardStats: ...

    async def stats(self) -> ShardStats: ...

    async def release(self, holder: str, *, died: bool = True) -> int: ...

    async def overdue(self, age_s: float) -> list[Overdue]: ...

    async def take_back(self, found: Sequence[Overdue]) -> None: ...

    async def whereabouts(self, uids: Sequence[str]) -> dict[str, str]: ...


class ExperienceQueue:
    """Sharded queue of experiences. A group lives in the shard its uid hashes to.

    A client belongs to one user, its leases' `holder`, on one event loop; any number of clients
    share the shards. What a user takes it holds until it puts, fails or filters it, and should
    renew meanwhile, every `hears_s` at least: by that it hears of work that is in vain. Guarantees:
    docs/queue.md.
    """

    def __init__(
        self, shards: Sequence[ShardFace], holder: str, *, hears_s: float = math.inf
    ) -> None:
        self.shards = shards
        self._holder = holder
        self._hears_s = hears_s
        self._requests: dict[tuple[str, int], asyncio.Future[list[Grant]]] = {}
        # A successor of the same name must not be taken for this one.
        client = f"{holder}/{uuid.uuid4().hex[:8]}"
        self._ids = (f"{client}/{n}" for n in itertools.count())
        self._pending: dict[str, deque[Grant]] = {}
        self._held: dict[tuple[str, int], Lease] = {}
        self._renewed_at = 0.0
        self._renewal: asyncio.Future[list[Lease]] | None = None
        self._lost: dict[tuple[str, int], Lease] = {}

    def shard_of(self, uid: str) -> int:
        """Index of the shard that owns `uid`; the same in every process."""
        return shard_of(uid, len(self.shards))

    async def admit(
        self,
        prompts: Sequence[Prompt],
        version: int,
        *,
        wait_s: float = ROOM_WAIT_S,
        on_entered: Callable[[Collection[str]], None] = lambda uids: None,
    ) -> None:
        """Put prompts in, admitted at `version`. Blocks while a shard is full.

        `on_entered` is told of those that are in, as they come in. Raises DeadlineError if a shard
        lets none in for `wait_s`; some may be in then. It may be infinite where somebody else's
        wait for these groups has an end.
        """
        entries = [_entry(prompt, version) for prompt in prompts]
        parts = self._route([(entry[0], entry) for entry in entries])
        await _all(_admit(self.shards[i], p, wait_s, on_entered) for i, p in parts.items())

    async def add(
        self,
        groups: Sequence[tuple[Prompt, Columns]],
        version: int,
        *,
        stage: str,
        wait_s: float = ROOM_WAIT_S,
    ) -> None:
        """Put prompts in together with the columns that `stage` makes; blocks as `admit` does.

        For groups that are made elsewhere. Once it returns they survive their maker and the shard;
        until then the columns must not change. Raises ContractError for columns that are not those
        the stage declared, or badly shaped.
        """
        entries = [
            (_entry(prompt, version), _commit(Lease(0, prompt.uid, stage, 0, 0.0), columns))
            for prompt, columns in groups
        ]
        parts = self._route([(entry[0], (entry, commit)) for entry, commit in entries])
        await _all(_add(self.shards[i], part, wait_s) for i, part in parts.items())

    async def take(
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
        pending = self._pending.setdefault(stage, deque())
        deadline = _now() + wait_s
        if not await self._keep_held(wait_s):
            return []
        if not pending:
            wanted = Request(stage, self._holder, max_groups, tuple(columns), max_tokens)
            await self._await_any(wanted, deadline - _now())
        taken: list[Grant] = []
        tokens = 0
        while pending and len(taken) < max_groups:
            info = pending[0].info
            tokens += info.num_tokens if info else 0
            if taken and max_tokens is not None and tokens > max_tokens:
                break
            taken.append(pending.popleft())
        try:
            return await self._open(taken, columns)
        except BaseException:
            pending.extendleft(reversed(taken))  # they are held, and must not be lost
            raise

    async def _keep_held(self, wait_s: float) -> bool:
        """Renew what is held, if it is time to; whether that was done within `wait_s`."""
        if self._renewal is None and _now() - self._renewed_at >= self.renew_every_s:
            self._renewal = asyncio.ensure_future(self._renew())
        if self._renewal is not None:
            await asyncio.wait([self._renewal], timeout=wait_s)
            if not self._renewal.done():
                return False
            renewal, self._renewal = self._renewal, None
            self._lost.update((_key(lease), lease) for lease in renewal.result())
        return True

    async def _open(self, grants: Sequence[Grant], columns: Sequence[str]) -> list[Experience]:
        """What was granted as the user sees it."""
        found = [_decode(grant.blobs) for grant in grants]
        # What an earlier call for other columns has asked for may have been answered since.
        short = [
            grant.lease.uid
            for grant, own in zip(grants, found, strict=True)
            if not (grant.ended or all(name in own for name in columns))
        ]
        more = await self.read(short, columns) if short else {}
        return [
            _experience(grant, more.get(grant.lease.uid, own), columns)
            for grant, own in zip(grants, found, strict=True)
        ]

    async def _await_any(self, wanted: Request, wait_s: float) -> None:
        """Wait until a shard has answered; put what came into the stage's pending groups."""
        stage = wanted.stage
        share = -(-wanted.max_groups // len(self.shards))
        for i, shard in enumerate(self.shards):
            if (stage, i) not in self._requests:
                request = replace(wanted, max_groups=share, id=next(self._ids))
                self._requests[stage, i] = asyncio.ensure_future(self._ask(shard, request))
        mine = {i: self._requests[stage, i] for i in range(len(self.shards))}
        done, _ = await asyncio.wait(
            mine.values(), timeout=wait_s, return_when=asyncio.FIRST_COMPLETED
        )
        # In the order of the shards, not of the set: what is taken follows from the schedule.
        for i, asked in mine.items():
            if asked in done:
                del self._requests[stage, i]
                self._pending[stage] += self._still_held(asked.result())

    def withdraw(self) -> None:
        """Ask for nothing any more: what a shard still grants is its to take back by `release`."""
        for asked in self._requests.values():
            asked.cancel()
        self._requests.clear()

    async def _ask(self, shard: ShardFace, request: Request) -> list[Grant]:
        """What is granted is held from here on, also while nobody has come to fetch it."""
        grants = await shard.take(request, wait_s=REQUEST_WAIT_S)
        if not self._held:
            self._renewed_at = _now()
        self._held.update((_key(grant.lease), grant.lease) for grant in grants)
        return grants

    async def put(self, entries: Sequence[tuple[Lease, Columns]]) -> list[str]:
        """Commit finished work; returns uids refused because their lease was no longer good.

        Once it returns, what was not refused survives the death of this process and of the shard;
        until then the columns must not change. If a shard dies over the call, a commit it has
        written is refused when it is repeated: it was accepted the first time. Raises ContractError
        for columns that are not those the stage declared, or badly shaped.
        """
        commits = [_commit(lease, columns) for lease, columns in entries]
        parts = self._route([(commit.lease.uid, commit) for commit in commits])
        refused = await _all(self.shards[i].put(part) for i, part in parts.items())
        self._forget(lease for lease, _ in entries)
        return [uid for part in refused for uid in part]

    async def note(self, entries: Sequence[tuple[Lease, Columns]]) -> None:
        """Leave what was begun of leased work with the queue, in the place of what it had of it.

        It is in `Experience.begun` of who is handed the group next, unless the shard died over it.
        """
        parts = self._route([(lease.uid, _commit(lease, columns)) for lease, columns in entries])
        await _all(self.shards[i].note(part) for i, part in parts.items())

    async def fail(self, entries: Sequence[tuple[Lease, StreamError]]) -> None:
        """Give groups back that could not be worked on, each with the error."""
        parts = self._route([(lease.uid, (lease, error)) for lease, error in entries])
        await _all(self.shards[i].fail(part) for i, part in parts.items())
        self._forget(lease for lease, _ in entries)

    async def filter(self, entries: Sequence[tuple[Lease, Filtered]]) -> None:
        """Take scored groups out of the stream, each for a reason."""
        parts = self._route([(lease.uid, (lease, why)) for lease, why in entries])
        await _all(self.shards[i].filter(part) for i, part in parts.items())
        self._forget(lease for lease, _ in entries)

    async def renew(self) -> list[Lease]:
        """Keep all that is held; returns the leases that were lost, whose work is in vain."""
        gone = await self._renew()
        lost, self._lost = self._lost, {}
        return [*lost.values(), *gone]

    async def _renew(self) -> list[Lease]:
        self._renewed_at = _now()
        parts = self._route([(lease.uid, lease) for lease in self._held.values()])
        lost = await _all(self.shards[i].renew(part) for i, part in parts.items())
        gone = [lease for part in lost for lease in part]
        self._forget(gone)
        for pending in self._pending.values():
            kept = self._still_held(pending)
            pending.clear()
            pending.extend(kept)
        return gone

    @property
    def renew_every_s(self) -> float:
        """How often to renew what is held, s; infinite if nothing that can expire is."""
        terms = (lease.expires_at - lease.taken_at for lease in self._held.values())
        return min(min(terms, default=math.inf) / 3, self._hears_s if self._held else math.inf)

    async def read(self, uids: Iterable[str], columns: Sequence[str]) -> dict[str, Columns]:
        """Columns of groups by uid, without a lease: for the ranks that train a leased group."""
        parts = self._route([(uid, uid) for uid in uids])
        found = await _all(self.shards[i].read(part, columns) for i, part in parts.items())
        return {
            uid: _select(blobs, columns)
            for part, groups in zip(parts.values(), found, strict=True)
            for uid, blobs in zip(part, groups, strict=True)
        }

    async def uids_with(self, column: str) -> list[str]:
        """The groups that have a column."""
        parts = await _all(shard.uids_with(column) for shard in self.shards)
        return [uid for part in parts for uid in part]

    async def ended(self, *, wait_s: float) -> list[Farewell]:
        """Groups that have ended and not left yet; none if there is none within `wait_s`."""
        return await _first(shard.ended(wait_s=wait_s) for shard in self.shards)

    async def leave(self, uids: Sequence[str], version: int) -> None:
        """These groups are trained or ended, and leave; `version` is trained from now on."""
        parts = self._route([(uid, uid) for uid in uids])
        await _all(self.shards[i].leave(part, version) for i, part in parts.items())
        self._forget_groups(uids)

    async def end_step(self, uids: Sequence[str], version: int) -> ShardStats:
        """As `leave`, at the end of a step; returns its figures over all shards."""
        parts = self._route([(uid, uid) for uid in uids])
        steps = (shard.end_step(parts.get(i, []), version) for i, shard in enumerate(self.shards))
        figures = merge_stats(await _all(steps))
        self._forget_groups(uids)
        return figures

    async def stats(self) -> ShardStats:
        """The figures of the step under way over all shards, and what they hold."""
        return merge_stats(await _all(shard.stats() for shard in self.shards))

    async def release(self, holder: str, *, died: bool = True) -> int:
        """A holder has died, or left: hand its work out again. Returns how many groups it had."""
        return sum(await _all(shard.release(holder, died=died) for shard in self.shards))

    async def overdue(self, age_s: float) -> list[Overdue]:
        """Work that one holder has had for over `age_s`."""
        parts = await _all(shard.overdue(age_s) for shard in self.shards)
        return [one for part in parts for one in part]

    async def take_back(self, found: Sequence[Overdue]) -> None:
        """Work that is overdue is handed out anew, if it is where it was."""
        parts = self._route([(one.uid, one) for one in found])
        await _all(self.shards[i].take_back(part) for i, part in parts.items())

    async def whereabouts(self, uids: Sequence[str]) -> dict[str, str]:
        """Who holds these groups and for how long, for the message of a stall."""
        parts = await _all(shard.whereabouts(uids) for shard in self.shards)
        return {uid: phrase for part in parts for uid, phrase in part.items()}

    def _still_held(self, grants: Iterable[Grant]) -> list[Grant]:
        return [grant for grant in grants if _key(grant.lease) in self._held]

    def _forget(self, leases: Iterable[Lease]) -> None:
        for lease in leases:
            self._held.pop(_key(lease), None)
            self._lost.pop(_key(lease), None)

    def _forget_groups(self, uids: Sequence[str]) -> None:
        gone = set(uids)
        self._forget([lease for lease in self._held.values() if lease.uid in gone])

    def _route(self, entries: Sequence[tuple[str, T]]) -> Mapping[int, list[T]]:
        parts: dict[int, list[T]] = {}
        for uid, entry in entries:
            parts.setdefault(self.shard_of(uid), []).append(entry)
        return parts


async def _all(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """What several calls return. If one fails its error is raised, but not before all have ended:
    a call that goes on alone would send what the caller believes to be its own again."""
    answers = await asyncio.gather(*calls, return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return cast(list[T], answers)


async def _first(calls: Iterable[Coroutine[Any, Any, list[T]]]) -> list[T]:
    """What those of several calls return that are the first to do so; the others are given up."""
    asked = [asyncio.ensure_future(call) for call in calls]
    try:
        done, _ = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        return [item for reply in asked if reply in done for item in reply.result()]
    finally:
        for reply in asked:
            reply.cancel()


async def _admit(
    shard: ShardFace,
    entries: list[tuple[str, bytes, int]],
    wait_s: float,
    on_entered: Callable[[Collection[str]], None],
) -> None:
    while entries:
        enter = partial(shard.admit, entries)
        entered = set(await _for_room(wait_s, enter))
        on_entered(entered)
        entries = [entry for entry in entries if entry[0] not in entered]


async def _add(
    shard: ShardFace, pairs: list[tuple[tuple[str, bytes, int], Commit]], wait_s: float
) -> None:
    while pairs:
        entries, commits = [e for e, _ in pairs], [c for _, c in pairs]
        entered = set(await _for_room(wait_s, partial(shard.add, entries, commits)))
        pairs = [pair for pair in pairs if pair[0][0] not in entered]


async def _for_room(wait_s: float, enter: Callable[..., Awaitable[list[str]]]) -> list[str]:
    """Ask for room again and again, as long as that may take."""
    deadline = asyncio.get_running_loop().time() + wait_s
    while True:
        left_s = deadline - asyncio.get_running_loop().time()
        try:
            return await enter(wait_s=min(left_s, ROOM_WAIT_S))
        except DeadlineError:
            if left_s <= ROOM_WAIT_S:
                raise


def _now() -> float:
    return asyncio.get_running_loop().time()


def _key(lease: Lease) -> tuple[str, int]:
    return lease.uid, lease.token


def _entry(prompt: Prompt, version: int) -> tuple[str, bytes, int]:
    return prompt.uid, encode_prompt(prompt), version


def _commit(lease: Lease, columns: Columns) -> Commit:
    sizes = column_sizes(columns)
    info = GroupInfo.of(columns) if columns.keys() >= _ROLLOUTS else None
    return Commit(lease, encode(columns), sizes, info)


def _experience(grant: Grant, found: Columns, columns: Sequence[str]) -> Experience:
    return Experience(
        lease=grant.lease,
        admitted_version=grant.admitted_version,
        prompt=None if grant.prompt is None else decode_prompt(grant.prompt),
        columns={} if grant.ended else {name: found[name] for name in columns},
        info=grant.info,
        ready_version=grant.ready_version,
        ended=grant.ended,
        begun=_decode(grant.begun) if grant.begun else None,
    )


def _decode(blobs: Sequence[Blob]) -> dict[str, Array]:
    """The columns of some blobs."""
    found: dict[str, Array] = {}
    for blob in blobs:
        found |= decode(blob)
    return found


def _select(blobs: Sequence[Blob], columns: Sequence[str]) -> Columns:
    """The named columns among those of some blobs."""
    found = _decode(blobs)
    if missing := [name for name in columns if name not in found]:
        raise ContractError(f"columns {missing} are not there, only {sorted(found)}")
    return {name: found[name] for name in columns}

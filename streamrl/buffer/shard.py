"""One shard of the experience queue: it owns its groups whole, hands out leases, takes commits.

A plain asyncio object on one event loop, told the stages and the columns they need; an actor hosts
it. Values of columns are opaque here: `store` turns arrays into whatever readers can resolve.
"""

import asyncio
import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from streamrl.buffer.depth import DepthMeter
from streamrl.errors import ConfigError, DeadlineError, StreamError
from streamrl.messages import (
    Columns,
    Experience,
    GroupInfo,
    Lease,
    Prompt,
    check_columns,
)


@dataclass
class QueueConfig:
    """The experience queue.

    shards: number of shard actors.
    capacity_groups: most groups in flight over all shards; null takes what the staleness bound
        needs, (max_staleness + 1) * groups_per_step.
    lease_s: how long a stage may work on a group before it is handed out again, s.
    max_attempts: times a group is handed to one stage before it is dropped.
    """

    shards: int = 2
    capacity_groups: int | None = None
    lease_s: float = 900.0
    max_attempts: int = 3

    def __post_init__(self) -> None:
        if self.shards < 1:
            raise ConfigError(f"queue.shards={self.shards}: must be at least 1")
        if self.lease_s <= 0:
            raise ConfigError(f"queue.lease_s={self.lease_s}: must be above 0 s")
        if self.max_attempts < 1:
            raise ConfigError(f"queue.max_attempts={self.max_attempts}: must be at least 1")


@dataclass(frozen=True)
class Ports:
    """Columns a stage needs to see a group and columns it puts."""

    needs: tuple[str, ...]
    produces: tuple[str, ...]


@dataclass(frozen=True)
class ShardStats:
    """What a shard reports: mean groups waiting per stage since the last report, and sizes."""

    depth: Mapping[str, float]
    num_bytes: int
    oldest_age_s: float
    uids: tuple[str, ...]


@dataclass(eq=False)
class _Group:
    """One group as the shard holds it."""

    prompt: Prompt
    admitted_version: int
    admitted_at: float
    order: int
    ready_version: int | None = None
    columns: dict[str, Any] = field(default_factory=dict)
    num_bytes: int = 0
    info: GroupInfo | None = None
    leases: dict[str, Lease] = field(default_factory=dict)
    attempts: dict[str, int] = field(default_factory=dict)
    done: set[str] = field(default_factory=set)
    dropped: str | None = None
    reason: str = ""


class Shard:
    """Owner of some of the groups in flight. All methods run on one event loop.

    `stages` maps a stage to its ports; the stage that produces nothing is the last one, and it is
    handed the dropped groups too, so that the coordinator hears of each exactly once.
    `capacity_groups` bounds the groups held here. The version being trained is learnt from
    admissions and ends of steps.
    """

    def __init__(
        self,
        stages: Mapping[str, Ports],
        config: QueueConfig,
        *,
        capacity_groups: int,
        store: Callable[[Columns], Mapping[str, Any]] = dict,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._stages = stages
        self._config = config
        self._capacity_groups = capacity_groups
        self._store = store
        self._clock = clock or asyncio.get_running_loop().time
        self._last_stage = next(s for s, ports in stages.items() if not ports.produces)
        self._version = 0
        self._groups: dict[str, _Group] = {}
        self._ready: dict[str, dict[str, _Group]] = {stage: {} for stage in stages}
        self._wake = {stage: asyncio.Event() for stage in stages}
        self._takers: Counter[str] = Counter()
        self._space = asyncio.Event()
        self._lease_tokens = itertools.count(1)
        self._orders = itertools.count()
        self._expiries: list[tuple[float, int, Lease]] = []
        self._depth = DepthMeter(stages, self._clock())

    async def admit(self, entries: Sequence[tuple[Prompt, int]], *, wait_s: float) -> None:
        """Take in prompts with the version they are admitted at; blocks while the shard is full.

        Raises DeadlineError if there is no room within `wait_s`.
        """
        deadline = self._clock() + wait_s
        for prompt, version in entries:
            while len(self._groups) >= self._capacity_groups:
                await self._wait_space(deadline, prompt.uid)
            self._version = max(self._version, version)
            group = _Group(prompt, version, self._clock(), next(self._orders))
            self._groups[prompt.uid] = group
            self._refresh(group)

    async def _wait_space(self, deadline: float, uid: str) -> None:
        self._space.clear()
        try:
            await asyncio.wait_for(self._space.wait(), deadline - self._clock())
        except TimeoutError:
            raise DeadlineError(
                f"prompt {uid} waited for room in a full shard of {self._capacity_groups} groups;"
                f" it holds {list(self._groups)[:5]}..."
            ) from None

    async def take(
        self, stage: str, *, max_groups: int, columns: Sequence[str], wait_s: float, holder: str
    ) -> list[Experience]:
        """Lease groups that are ready for a stage to `holder`, the earliest admitted first.

        At most `max_groups`, and no more than an equal share if others of the stage wait too;
        none if there is none within `wait_s`.
        """
        self._takers[stage] += 1
        try:
            await self._await_ready(stage, self._clock() + wait_s)
            share = -(-len(self._ready[stage]) // self._takers[stage])
        finally:
            self._takers[stage] -= 1
        chosen = heapq.nsmallest(
            min(max_groups, share), self._ready[stage].values(), key=lambda g: g.order
        )
        return [self._lease(group, stage, columns, holder) for group in chosen]

    async def _await_ready(self, stage: str, deadline: float) -> None:
        while True:
            self._expire()
            now = self._clock()
            if self._ready[stage] or now >= deadline:
                return
            self._wake[stage].clear()
            pause = min(deadline, self._next_expiry()) - now
            try:
                await asyncio.wait_for(self._wake[stage].wait(), max(pause, 0.001))
            except TimeoutError:
                continue

    def _lease(self, group: _Group, stage: str, columns: Sequence[str], holder: str) -> Experience:
        last, now = stage == self._last_stage, self._clock()
        attempt = group.attempts[stage] = group.attempts.get(stage, 0) + 1
        lease = Lease(
            token=next(self._lease_tokens),
            uid=group.prompt.uid,
            stage=stage,
            attempt=attempt,
            expires_at=float("inf") if last else now + self._config.lease_s,
            holder=holder,
            taken_at=now,
        )
        group.leases[stage] = lease
        if not last:
            heapq.heappush(self._expiries, (lease.expires_at, lease.token, lease))
        self._refresh(group)
        return Experience(
            lease=lease,
            admitted_version=group.admitted_version,
            prompt=None if last else group.prompt,
            columns={} if group.dropped else {name: group.columns[name] for name in columns},
            info=group.info,
            ready_version=group.ready_version,
            dropped=group.dropped,
            reason=group.reason,
        )

    def put(self, entries: Sequence[tuple[Lease, Columns]]) -> list[str]:
        """Commit the columns of finished work; returns the uids whose lease was no longer good.

        Raises ValueError for columns that are not those the stage declared, or badly shaped.
        """
        self._expire()
        refused = []
        for lease, columns in entries:
            group = self._groups.get(lease.uid)
            if group is None or group.leases.get(lease.stage) != lease:
                refused.append(lease.uid)
                continue
            self._commit(group, lease, columns)
        return refused

    def _commit(self, group: _Group, lease: Lease, columns: Columns) -> None:
        missing = set(self._stages[lease.stage].produces) - columns.keys()
        if missing:
            raise ValueError(f"stage {lease.stage} put no {sorted(missing)} for {lease.uid}")
        info = group.info or GroupInfo.of(columns)
        check_columns(columns, num_tokens=info.num_tokens, num_rollouts=len(info.lengths))
        group.info = info
        group.num_bytes += sum(column.nbytes for column in columns.values())
        group.columns.update(self._store(columns))
        group.done.add(lease.stage)
        del group.leases[lease.stage]
        self._refresh(group)

    def fail(self, entries: Sequence[tuple[Lease, StreamError]]) -> None:
        """Give work back undone: the group is handed out again, or at last dropped."""
        for lease, error in entries:
            group = self._groups.get(lease.uid)
            if group is not None and group.leases.get(lease.stage) == lease:
                self._give_back(group, lease.stage, error.cause, str(error))

    def read(self, uids: Sequence[str], columns: Iterable[str]) -> list[Mapping[str, Any]]:
        """Columns of groups held here, in the order of `uids`."""
        columns = tuple(columns)
        return [{name: self._groups[uid].columns[name] for name in columns} for uid in uids]

    def settle(self, leases: Sequence[Lease]) -> None:
        """The last stage is done with these groups: they leave the queue."""
        for lease in leases:
            group = self._groups.pop(lease.uid)
            assert group.leases.get(lease.stage) == lease, lease
        self._space.set()

    def end_step(self, leases: Sequence[Lease], version: int) -> ShardStats:
        """Settle the groups of the step that made `version`; depths are means since the last."""
        self.settle(leases)
        self._version = version
        now = self._clock()
        groups = self._groups.values()
        return ShardStats(
            depth=self._depth.means(now),
            num_bytes=sum(group.num_bytes for group in groups),
            oldest_age_s=max((now - group.admitted_at for group in groups), default=0.0),
            uids=tuple(self._groups),
        )

    def whereabouts(self, uids: Sequence[str]) -> dict[str, str]:
        """For each of `uids` held here, one phrase: which stages hold or await it, for how long."""
        return {uid: self._describe(self._groups[uid]) for uid in uids if uid in self._groups}

    def _describe(self, group: _Group) -> str:
        now = self._clock()
        held = [
            f"{lease.holder} for {now - lease.taken_at:.1f} s"
            f" ({lease.stage}, attempt {lease.attempt})"
            for lease in group.leases.values()
        ]
        waits = [stage for stage in self._stages if group.prompt.uid in self._ready[stage]]
        state = f"held by {', '.join(held)}" if held else f"ready for {', '.join(waits) or 'none'}"
        return f"{state}, admitted {now - group.admitted_at:.1f} s ago"

    def _refresh(self, group: _Group) -> None:
        """Bring the ready sets in line with a group that has just changed."""
        uid = group.prompt.uid
        for stage, ports in self._stages.items():
            ready = self._ready[stage]
            if self._is_ready(group, stage, ports):
                if stage == self._last_stage and group.ready_version is None:
                    group.ready_version = self._version
                ready[uid] = group
                self._wake[stage].set()
            else:
                ready.pop(uid, None)
            self._depth.observe(stage, len(ready), self._clock())

    def _is_ready(self, group: _Group, stage: str, ports: Ports) -> bool:
        if stage in group.leases or stage in group.done:
            return False
        if group.dropped is not None:
            return stage == self._last_stage
        return group.columns.keys() >= set(ports.needs)

    def _give_back(self, group: _Group, stage: str, cause: str, reason: str) -> None:
        del group.leases[stage]
        if group.attempts[stage] >= self._config.max_attempts:
            group.dropped, group.reason = cause, reason
            group.leases.clear()
        self._refresh(group)

    def _expire(self) -> None:
        """Take back the leases whose time is up."""
        now = self._clock()
        while self._expiries and self._expiries[0][0] <= now:
            _, _, lease = heapq.heappop(self._expiries)
            group = self._groups.get(lease.uid)
            if group is not None and group.leases.get(lease.stage) == lease:
                reason = f"{lease.holder} had it for {self._config.lease_s:g} s (queue.lease_s)"
                self._give_back(group, lease.stage, f"{lease.stage}_lease_expired", reason)

    def _next_expiry(self) -> float:
        return self._expiries[0][0] if self._expiries else float("inf")

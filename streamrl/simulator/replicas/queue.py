"""The experience queue as the loops see it, without experiences: what each group has, who waits.

The order is that of the real one: a stage takes the groups that were admitted first, no more than
its share of those that are ready while others of the stage wait, too.
"""

import asyncio
import heapq
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from streamrl.buffer import ShardStats
from streamrl.buffer.client import REQUEST_WAIT_S
from streamrl.buffer.depth_metric import DepthMeter
from streamrl.buffer.wire_types import Farewell
from streamrl.dataflow import VERDICT, Dataflow, Kind
from streamrl.messages import Ended, Experience, GroupInfo, Lease, Prompt
from streamrl.simulator.replicas.cpu_model import Clerk, Machine


@dataclass(eq=False, slots=True)
class Group:
    """One group: which stages have committed, who has taken it, and what is known of it.

    `order` is its number, `extra_tokens` are those of its greedy completion, its prompt included.
    Once it is scored it ends if `is_filtered`.
    """

    uid: str
    order: int
    admitted_version: int
    admitted_s: float
    done: set[str] = field(default_factory=set)
    takers: dict[str, "Taker"] = field(default_factory=dict)
    info: GroupInfo | None = None
    extra_tokens: int = 0
    ready_version: int | None = None
    is_filtered: bool = False
    ended: Ended | None = None

    def has_done(self, stage: str) -> bool:
        """Whether a stage has nothing left to do with it."""
        return stage in self.done or self.ended is not None


class Taker(Protocol):
    """A replica that works on groups."""

    def room(self, stage: str) -> int:
        """How many groups of a stage more it may be given."""
        ...

    def give(self, stage: str, groups: Sequence[Group]) -> None:
        """It has these from now on."""
        ...


LOOK_S = 2.0
"""Requests that are to be made anew are looked for that often, s."""


class Line:
    """Groups that are ready for a stage, and the replicas that ask for some.

    A replica asks for as many as it has room for then; more room comes with its next request. One
    that has waited for REQUEST_WAIT_S is made anew.
    """

    def __init__(self, stage: str, needs: frozenset[str]) -> None:
        self.stage = stage
        self.needs = needs
        self.ready: list[tuple[int, Group]] = []
        self.requests: dict[Taker, int] = {}
        self._asked_s: dict[Taker, float] = {}
        self._none_before_s = math.inf
        """No request was made before."""
        self.depths: list[tuple[float, int]] = []
        self.held_back: dict[int, list[Group]] = {}

    def add(self, group: Group) -> None:
        """A group is ready."""
        heapq.heappush(self.ready, (group.order, group))

    def remove(self, groups: Sequence[Group]) -> None:
        """Groups have ended: nobody is given them any more."""
        gone = {group.order for group in groups}
        self.ready = [entry for entry in self.ready if entry[0] not in gone]
        heapq.heapify(self.ready)

    def ask(self, taker: Taker, now: float) -> None:
        """A replica has room: it asks, unless it has done so already."""
        if taker not in self.requests and (room := taker.room(self.stage)):
            self.requests[taker] = room
            self._asked_s[taker] = now
            self._none_before_s = min(self._none_before_s, now)

    def match(self, now: float) -> None:
        """Give what is ready to those that ask: to each its share, then to whoever asks again."""
        if self.ready and now - self._none_before_s >= REQUEST_WAIT_S:
            self._ask_anew(now)
        while self.ready and self.requests:
            served = []
            while self.ready and self.requests:
                share = -(-len(self.ready) // len(self.requests))
                taker = next(iter(self.requests))
                self._give(taker, self.requests.pop(taker), share)
                served.append(taker)
            for taker in served:
                if self.ready:
                    self._give(taker, taker.room(self.stage), len(self.ready))
                self.ask(taker, now)

    def _ask_anew(self, now: float) -> None:
        """Requests that have waited for long are for as much room as there is now."""
        for taker in self.requests:
            if now - self._asked_s[taker] >= REQUEST_WAIT_S:
                self.requests[taker] = taker.room(self.stage)
                self._asked_s[taker] = now
        oldest_s = min((self._asked_s[taker] for taker in self.requests), default=math.inf)
        # Looked for now and then: some are made anew a little later than they would be.
        self._none_before_s = max(oldest_s, now - REQUEST_WAIT_S + LOOK_S)

    def _give(self, taker: Taker, room: int, share: int) -> None:
        count = min(room, share)
        chosen = [heapq.heappop(self.ready)[1] for _ in range(count)]
        for group in chosen:
            group.takers[self.stage] = taker
        if chosen:
            taker.give(self.stage, chosen)


class StreamQueue:
    """What `Control` and `train_step` ask of an ExperienceQueue, and what replicas do.

    hop_s: from a commit until the group is ready for others, and from a trainer's question to the
    groups that are ready. books_s: work of its process on the machine for each group, altogether.
    Unless it is `streamed`, a stage that scores gets the groups of a step together, once all of
    them are ready for it.
    """

    def __init__(
        self,
        dataflow: Dataflow,
        machine: Machine,
        *,
        hop_s: float,
        books_s: float,
        streamed: bool,
        groups_per_step: int,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._machine = machine
        self._hop_s = hop_s
        self._groups_per_step = groups_per_step
        makers = {name: call.stage for call in dataflow.calls for name in call.produces}
        self._lines = {
            call.stage: Line(call.stage, frozenset(makers[name] for name in call.needs))
            for call in dataflow.takers
        }
        self._whole = {call.stage for call in dataflow.of_kind(Kind.SCORE) if not streamed}
        self._judge = makers.get(VERDICT, "")
        # A group comes in, is given to each stage and comes back, and is trained.
        entries = 2 * (len(dataflow.calls) - len(dataflow.trained)) + 2
        self._entry_s = books_s / entries
        self._clerk = Clerk(machine)
        self._last = next(call.stage for call in dataflow.takers if call.kind is Kind.TRAIN)
        self.groups: dict[str, Group] = {}
        self.version = 0
        self._num_admitted = 0
        self._redelivered = 0
        self._arrived: asyncio.Future[None] | None = None
        self._one_ended: asyncio.Future[None] | None = None
        self._trainable: list[Group] = []
        self._depth = DepthMeter(self._lines, self._loop.time())

    @property
    def depths(self) -> Mapping[str, Sequence[tuple[float, int]]]:
        """By stage, how many groups wait for it, each time that changes: s, groups."""
        return {stage: line.depths for stage, line in self._lines.items()}

    # What the replicas do.

    def wait(self, stage: str, taker: Taker) -> None:
        """A replica has room."""
        line = self._lines[stage]
        line.ask(taker, self._loop.time())
        if line.ready:
            self._match(line)

    def commit(self, stage: str, groups: Iterable[Group]) -> None:
        """A stage is done with groups; others hear of it after a hop."""
        batch = list(groups)
        for group in batch:
            del group.takers[stage]
        machine = self._machine
        self._clerk.work(len(batch) * self._entry_s)
        if self._hop_s:
            machine.later(self._hop_s, lambda: self._put(stage, batch))
        else:
            self._put(stage, batch)

    def release(self, taker: Taker) -> int:
        """A replica is no more: what it had is handed out again; returns how many groups."""
        count = 0
        for line in self._lines.values():
            line.requests.pop(taker, None)
            for group in self.groups.values():
                if group.takers.get(line.stage) is taker and not group.has_done(line.stage):
                    del group.takers[line.stage]
                    line.add(group)
                    count += 1
            self._match(line)
        self._redelivered += count
        return count

    def _put(self, stage: str, groups: Sequence[Group]) -> None:
        groups = [group for group in groups if group.uid in self.groups]
        for group in groups:
            group.done.add(stage)
        if stage == self._judge:
            self._end([group for group in groups if group.is_filtered])
        groups = [group for group in groups if group.ended is None]
        for line in self._lines.values():
            if stage in line.needs:
                for group in groups:
                    if line.needs <= group.done:
                        self._ready(line, group)
                self._match(line)

    def _end(self, filtered: Sequence[Group]) -> None:
        """They go to who makes steps, and nowhere else."""
        if not filtered:
            return
        for group in filtered:
            group.ended = Ended("filtered", filtered=True)
        for line in self._lines.values():
            line.remove(filtered)
        self._trainable += filtered
        if self._one_ended is not None and not self._one_ended.done():
            self._one_ended.set_result(None)
        self._match(self._lines[self._last])

    def _ready(self, line: Line, group: Group) -> None:
        if line.stage == self._last:
            group.ready_version = self.version
            self._trainable.append(group)
        elif line.stage in self._whole:
            step = group.order // self._groups_per_step
            batch = line.held_back.setdefault(step, [])
            batch.append(group)
            if len(batch) == self._groups_per_step:
                for one in line.held_back.pop(step):
                    line.add(one)
        else:
            line.add(group)

    def _match(self, line: Line) -> None:
        if line.stage == self._last:
            if self._trainable and self._arrived is not None and not self._arrived.done():
                self._arrived.set_result(None)
            self._observe(line, len(self._trainable))
        else:
            ready = len(line.ready)
            line.match(self._loop.time())
            self._clerk.work((ready - len(line.ready)) * self._entry_s)
            self._observe(line, len(line.ready))

    def _observe(self, line: Line, level: int) -> None:
        now = self._loop.time()
        if level != (line.depths[-1][1] if line.depths else 0):
            line.depths.append((now, level))
            self._depth.observe(line.stage, level, now)

    # What the loops ask for.

    async def admit(
        self,
        prompts: Sequence[Prompt],
        version: int,
        *,
        wait_s: float = math.inf,
        on_entered: Callable[[Collection[str]], None] = lambda uids: None,
    ) -> None:
        """Prompts come in."""
        now, lines = self._loop.time(), [one for one in self._lines.values() if not one.needs]
        for prompt in prompts:
            group = Group(prompt.uid, self._num_admitted, version, now)
            self._num_admitted += 1
            self.groups[prompt.uid] = group
            for line in lines:
                line.add(group)
        self._clerk.work(len(prompts) * self._entry_s)
        on_entered([prompt.uid for prompt in prompts])
        for line in lines:
            self._match(line)

    async def take(
        self, stage: str, *, max_groups: int, columns: Sequence[str], wait_s: float
    ) -> list[Experience]:
        """All groups that are ready to be trained and were not taken yet; waits for one."""
        if not self._trainable:
            self._arrived = self._loop.create_future()
            await self._arrived
        else:
            await self._machine.until(self._machine.now + self._hop_s)
        taken, self._trainable = self._trainable, []
        self._clerk.work(len(taken) * self._entry_s)
        self._observe(self._lines[stage], 0)
        return [
            Experience(
                lease=Lease(group.order, group.uid, stage, 1, math.inf),
                admitted_version=group.admitted_version,
                info=group.info,
                ready_version=group.ready_version,
                ended=group.ended,
            )
            for group in taken
        ]

    async def uids_with(self, column: str) -> list[str]:
        """The groups that have the column of the filter's verdict."""
        assert column == VERDICT, column
        await self._machine.until(self._machine.now + self._hop_s)
        return [uid for uid, group in self.groups.items() if self._judge in group.done]

    async def ended(self, *, wait_s: float) -> list[Farewell]:
        """All groups that have ended and were not taken yet; waits for one."""
        if not any(group.ended for group in self._trainable):
            self._one_ended = self._loop.create_future()
            await self._one_ended
        return [
            Farewell(group.uid, group.ended, group.info)
            for group in self._trainable
            if group.ended is not None
        ]

    def offer_again(self) -> None:
        """Whoever trained is no more: all that is ready is there for the next one."""
        needs = self._lines[self._last].needs
        self._trainable = [
            group for group in self.groups.values() if needs <= group.done or group.ended
        ]

    async def leave(self, uids: Sequence[str], version: int) -> None:
        """These groups are trained or ended."""
        self.version = max(self.version, version)
        left = [self.groups.pop(uid) for uid in uids if uid in self.groups]
        self._trainable = [group for group in self._trainable if group.uid in self.groups]
        needs = self._lines[self._last].needs
        surplus = [one for one in left if one.ended is None and not needs <= one.done]
        for line in self._lines.values() if surplus else ():
            line.remove(surplus)

    async def end_step(self, uids: Sequence[str], version: int) -> ShardStats:
        """As `leave`; the figures of the step that has ended."""
        await self.leave(uids, version)
        stats = await self.stats()
        self._depth.restart(self._loop.time())
        self._redelivered = 0
        return stats

    async def stats(self) -> ShardStats:
        """The figures of the step under way."""
        now = self._loop.time()
        oldest_s = next((group.admitted_s for group in self.groups.values()), now)
        return ShardStats(
            depth=self._depth.means(now),
            num_bytes=0,
            oldest_age_s=now - oldest_s,
            uids=tuple(self.groups),
            counts={"redelivered": self._redelivered, "hedged": 0, "refused": 0},
        )

    async def whereabouts(self, uids: Sequence[str]) -> dict[str, str]:
        """What each of them has."""
        return {uid: f"done: {sorted(self.groups[uid].done)}" for uid in uids if uid in self.groups}

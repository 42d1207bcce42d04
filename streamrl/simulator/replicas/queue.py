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
from streamrl.buffer.client import LEASE_REQUEST_WAIT_S
from streamrl.buffer.depth_metric import DepthMeter
from streamrl.buffer.wire_types import FinishedGroup
from streamrl.dataflow import FILTER_COLUMN, CallKind, Dataflow
from streamrl.messages import Experience, GroupInfo, GroupLease, GroupOutcome, Prompt
from streamrl.simulator.replicas.cpu_model import CpuModel, SerialProcess


@dataclass(eq=False, slots=True)
class SimulatedGroup:
    """One group: which stages have committed, who has taken it, and what is known of it.

    `order` is its number, `greedy_tokens` are those of its greedy completion, its prompt included.
    Once it is scored it ends if `is_filtered`.
    """

    uid: str
    admission_index: int
    admitted_version: int
    admitted_s: float
    done_stages: set[str] = field(default_factory=set)
    consumers: dict[str, "GroupConsumer"] = field(default_factory=dict)
    info: GroupInfo | None = None
    greedy_tokens: int = 0
    ready_version: int | None = None
    is_filtered: bool = False
    end_reason: GroupOutcome | None = None

    def is_done_with(self, stage: str) -> bool:
        """Whether a stage has nothing left to do with it."""
        return stage in self.done_stages or self.end_reason is not None


class GroupConsumer(Protocol):
    """A replica that works on groups."""

    def count_free_slots(self, stage: str) -> int:
        """How many groups of a stage more it may be given."""
        ...

    def assign_groups(self, stage: str, groups: Sequence[SimulatedGroup]) -> None:
        """It has these from now on."""
        ...


REQUEST_CHECK_S = 2.0
"""Requests that are to be made anew are looked for that often, s."""


class StageQueue:
    """Groups that are ready for a stage, and the replicas that ask for some.

    A replica asks for as many as it has room for then; more room comes with its next request. One
    that has waited for REQUEST_WAIT_S is made anew.
    """

    def __init__(self, stage: str, needs: frozenset[str]) -> None:
        self.stage = stage
        self.required_stages = needs
        self.ready_heap: list[tuple[int, SimulatedGroup]] = []
        self.requests: dict[GroupConsumer, int] = {}
        self._requested_s: dict[GroupConsumer, float] = {}
        self._oldest_request_s = math.inf
        """No request was made before."""
        self.depths: list[tuple[float, int]] = []
        self.held_groups: dict[int, list[SimulatedGroup]] = {}

    def add_group(self, group: SimulatedGroup) -> None:
        """A group is ready."""
        heapq.heappush(self.ready_heap, (group.admission_index, group))

    def remove_groups(self, groups: Sequence[SimulatedGroup]) -> None:
        """Groups have ended: nobody is given them any more."""
        gone = {group.admission_index for group in groups}
        self.ready_heap = [entry for entry in self.ready_heap if entry[0] not in gone]
        heapq.heapify(self.ready_heap)

    def add_request(self, taker: GroupConsumer, now: float) -> None:
        """A replica has room: it asks, unless it has done so already."""
        if taker not in self.requests and (room := taker.count_free_slots(self.stage)):
            self.requests[taker] = room
            self._requested_s[taker] = now
            self._oldest_request_s = min(self._oldest_request_s, now)

    def serve_requests(self, now: float) -> None:
        """Give what is ready to those that ask: to each its share, then to whoever asks again."""
        if self.ready_heap and now - self._oldest_request_s >= LEASE_REQUEST_WAIT_S:
            self._renew_requests(now)
        while self.ready_heap and self.requests:
            served = []
            while self.ready_heap and self.requests:
                share = -(-len(self.ready_heap) // len(self.requests))
                taker = next(iter(self.requests))
                self._assign_groups(taker, self.requests.pop(taker), share)
                served.append(taker)
            for taker in served:
                if self.ready_heap:
                    self._assign_groups(
                        taker, taker.count_free_slots(self.stage), len(self.ready_heap)
                    )
                self.add_request(taker, now)

    def _renew_requests(self, now: float) -> None:
        """Requests that have waited for long are for as much room as there is now."""
        for taker in self.requests:
            if now - self._requested_s[taker] >= LEASE_REQUEST_WAIT_S:
                self.requests[taker] = taker.count_free_slots(self.stage)
                self._requested_s[taker] = now
        oldest_s = min((self._requested_s[taker] for taker in self.requests), default=math.inf)
        # Looked for now and then: some are made anew a little later than they would be.
        self._oldest_request_s = max(oldest_s, now - LEASE_REQUEST_WAIT_S + REQUEST_CHECK_S)

    def _assign_groups(self, taker: GroupConsumer, room: int, share: int) -> None:
        count = min(room, share)
        chosen = [heapq.heappop(self.ready_heap)[1] for _ in range(count)]
        for group in chosen:
            group.consumers[self.stage] = taker
        if chosen:
            taker.assign_groups(self.stage, chosen)


class SimulatedQueue:
    """What `RunState` and `train_step` ask of an ExperienceQueue, and what replicas do.

    hop_s: from a commit until the group is ready for others, and from a trainer's question to the
    groups that are ready. books_s: work of its process on the machine for each group, altogether.
    Unless it is `streamed`, a stage that scores gets the groups of a step together, once all of
    them are ready for it.
    """

    def __init__(
        self,
        dataflow: Dataflow,
        machine: CpuModel,
        *,
        hop_s: float,
        books_s: float,
        streamed: bool,
        groups_per_step: int,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._cpu = machine
        self._hop_s = hop_s
        self._groups_per_step = groups_per_step
        makers = {name: call.stage for call in dataflow.calls for name in call.produces}
        self._stage_queues = {
            call.stage: StageQueue(call.stage, frozenset(makers[name] for name in call.needs))
            for call in dataflow.queue_calls
        }
        self._whole_step_stages = {
            call.stage for call in dataflow.select_calls(CallKind.SCORE) if not streamed
        }
        self._verdict_stage = makers.get(FILTER_COLUMN, "")
        # A group comes in, is given to each stage and comes back, and is trained.
        entries = 2 * (len(dataflow.calls) - len(dataflow.trained_roles)) + 2
        self._entry_cost_s = books_s / entries
        self._queue_process = SerialProcess(machine)
        self._train_stage = next(
            call.stage for call in dataflow.queue_calls if call.kind is CallKind.TRAIN
        )
        self.groups: dict[str, SimulatedGroup] = {}
        self.version = 0
        self._num_admitted = 0
        self._num_redelivered = 0
        self._trainable_future: asyncio.Future[None] | None = None
        self._finished_future: asyncio.Future[None] | None = None
        self._trainable: list[SimulatedGroup] = []
        self._depth_meter = DepthMeter(self._stage_queues, self._loop.time())

    @property
    def queue_depths(self) -> Mapping[str, Sequence[tuple[float, int]]]:
        """By stage, how many groups wait for it, each time that changes: s, groups."""
        return {stage: line.depths for stage, line in self._stage_queues.items()}

    # What the replicas do.

    def request_groups(self, stage: str, taker: GroupConsumer) -> None:
        """A replica has room."""
        line = self._stage_queues[stage]
        line.add_request(taker, self._loop.time())
        if line.ready_heap:
            self._serve_stage(line)

    def commit_groups(self, stage: str, groups: Iterable[SimulatedGroup]) -> None:
        """A stage is done with groups; others hear of it after a hop."""
        batch = list(groups)
        for group in batch:
            del group.consumers[stage]
        machine = self._cpu
        self._queue_process.add_work(len(batch) * self._entry_cost_s)
        if self._hop_s:
            machine.call_later(self._hop_s, lambda: self._apply_commit(stage, batch))
        else:
            self._apply_commit(stage, batch)

    def requeue_groups(self, taker: GroupConsumer) -> int:
        """A replica is no more: what it had is handed out again; returns how many groups."""
        count = 0
        for line in self._stage_queues.values():
            line.requests.pop(taker, None)
            for group in self.groups.values():
                if group.consumers.get(line.stage) is taker and not group.is_done_with(line.stage):
                    del group.consumers[line.stage]
                    line.add_group(group)
                    count += 1
            self._serve_stage(line)
        self._num_redelivered += count
        return count

    def _apply_commit(self, stage: str, groups: Sequence[SimulatedGroup]) -> None:
        groups = [group for group in groups if group.uid in self.groups]
        for group in groups:
            group.done_stages.add(stage)
        if stage == self._verdict_stage:
            self._finish_filtered([group for group in groups if group.is_filtered])
        groups = [group for group in groups if group.end_reason is None]
        for line in self._stage_queues.values():
            if stage in line.required_stages:
                for group in groups:
                    if line.required_stages <= group.done_stages:
                        self._mark_ready(line, group)
                self._serve_stage(line)

    def _finish_filtered(self, filtered: Sequence[SimulatedGroup]) -> None:
        """They go to who makes steps, and nowhere else."""
        if not filtered:
            return
        for group in filtered:
            group.end_reason = GroupOutcome("filtered", filtered=True)
        for line in self._stage_queues.values():
            line.remove_groups(filtered)
        self._trainable += filtered
        if self._finished_future is not None and not self._finished_future.done():
            self._finished_future.set_result(None)
        self._serve_stage(self._stage_queues[self._train_stage])

    def _mark_ready(self, line: StageQueue, group: SimulatedGroup) -> None:
        if line.stage == self._train_stage:
            group.ready_version = self.version
            self._trainable.append(group)
        elif line.stage in self._whole_step_stages:
            step = group.admission_index // self._groups_per_step
            batch = line.held_groups.setdefault(step, [])
            batch.append(group)
            if len(batch) == self._groups_per_step:
                for one in line.held_groups.pop(step):
                    line.add_group(one)
        else:
            line.add_group(group)

    def _serve_stage(self, line: StageQueue) -> None:
        if line.stage == self._train_stage:
            if (
                self._trainable
                and self._trainable_future is not None
                and not self._trainable_future.done()
            ):
                self._trainable_future.set_result(None)
            self._observe_depth(line, len(self._trainable))
        else:
            ready = len(line.ready_heap)
            line.serve_requests(self._loop.time())
            self._queue_process.add_work((ready - len(line.ready_heap)) * self._entry_cost_s)
            self._observe_depth(line, len(line.ready_heap))

    def _observe_depth(self, line: StageQueue, level: int) -> None:
        now = self._loop.time()
        if level != (line.depths[-1][1] if line.depths else 0):
            line.depths.append((now, level))
            self._depth_meter.observe_depth(line.stage, level, now)

    # What the loops ask for.

    async def admit_prompts(
        self,
        prompts: Sequence[Prompt],
        version: int,
        *,
        wait_s: float = math.inf,
        on_entered: Callable[[Collection[str]], None] = lambda uids: None,
    ) -> None:
        """Prompts come in."""
        now, lines = (
            self._loop.time(),
            [one for one in self._stage_queues.values() if not one.required_stages],
        )
        for prompt in prompts:
            group = SimulatedGroup(prompt.uid, self._num_admitted, version, now)
            self._num_admitted += 1
            self.groups[prompt.uid] = group
            for line in lines:
                line.add_group(group)
        self._queue_process.add_work(len(prompts) * self._entry_cost_s)
        on_entered([prompt.uid for prompt in prompts])
        for line in lines:
            self._serve_stage(line)

    async def lease_groups(
        self, stage: str, *, max_groups: int, columns: Sequence[str], wait_s: float
    ) -> list[Experience]:
        """All groups that are ready to be trained and were not taken yet; waits for one."""
        if not self._trainable:
            self._trainable_future = self._loop.create_future()
            await self._trainable_future
        else:
            await self._cpu.wait_until(self._cpu.now + self._hop_s)
        taken, self._trainable = self._trainable, []
        self._queue_process.add_work(len(taken) * self._entry_cost_s)
        self._observe_depth(self._stage_queues[stage], 0)
        return [
            Experience(
                lease=GroupLease(group.admission_index, group.uid, stage, 1, math.inf),
                admitted_version=group.admitted_version,
                info=group.info,
                ready_version=group.ready_version,
                outcome=group.end_reason,
            )
            for group in taken
        ]

    async def find_uids_with(self, column: str) -> list[str]:
        """The groups that have the column of the filter's verdict."""
        assert column == FILTER_COLUMN, column
        await self._cpu.wait_until(self._cpu.now + self._hop_s)
        return [
            uid for uid, group in self.groups.items() if self._verdict_stage in group.done_stages
        ]

    async def wait_for_finished(self, *, wait_s: float) -> list[FinishedGroup]:
        """All groups that have ended and were not taken yet; waits for one."""
        if not any(group.end_reason for group in self._trainable):
            self._finished_future = self._loop.create_future()
            await self._finished_future
        return [
            FinishedGroup(group.uid, group.end_reason, group.info)
            for group in self._trainable
            if group.end_reason is not None
        ]

    def restore_trainable(self) -> None:
        """Whoever trained is no more: all that is ready is there for the next one."""
        needs = self._stage_queues[self._train_stage].required_stages
        self._trainable = [
            group
            for group in self.groups.values()
            if needs <= group.done_stages or group.end_reason
        ]

    async def remove_groups(self, uids: Sequence[str], version: int) -> None:
        """These groups are trained or ended."""
        self.version = max(self.version, version)
        left = [self.groups.pop(uid) for uid in uids if uid in self.groups]
        self._trainable = [group for group in self._trainable if group.uid in self.groups]
        needs = self._stage_queues[self._train_stage].required_stages
        surplus = [one for one in left if one.end_reason is None and not needs <= one.done_stages]
        for line in self._stage_queues.values() if surplus else ():
            line.remove_groups(surplus)

    async def end_step(self, uids: Sequence[str], version: int) -> ShardStats:
        """As `leave`; the figures of the step that has ended."""
        await self.remove_groups(uids, version)
        stats = await self.get_stats()
        self._depth_meter.restart_window(self._loop.time())
        self._num_redelivered = 0
        return stats

    async def get_stats(self) -> ShardStats:
        """The figures of the step under way."""
        now = self._loop.time()
        oldest_s = next((group.admitted_s for group in self.groups.values()), now)
        return ShardStats(
            depth=self._depth_meter.compute_means(now),
            num_bytes=0,
            oldest_age_s=now - oldest_s,
            uids=tuple(self.groups),
            counts={"redelivered": self._num_redelivered, "hedged": 0, "refused": 0},
        )

    async def locate_groups(self, uids: Sequence[str]) -> dict[str, str]:
        """What each of them has."""
        return {
            uid: f"done: {sorted(self.groups[uid].done_stages)}"
            for uid in uids
            if uid in self.groups
        }

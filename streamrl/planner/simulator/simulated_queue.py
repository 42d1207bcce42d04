"""Simulated experience queue: the state of each group, without columns, and replicas' requests.

The order matches the real queue: a stage takes the groups that were admitted first. While several
replicas wait, each gets at most its share of the ready groups.
"""

import asyncio
import heapq
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from streamrl.buffer import ShardStats
from streamrl.buffer.encoding import FinishedGroup
from streamrl.buffer.shard import DepthMeter
from streamrl.dataflow import FILTER_COLUMN, CallKind, Dataflow
from streamrl.messages import Experience, GroupInfo, GroupLease, GroupOutcome, Prompt


@dataclass(eq=False, slots=True)
class SimulatedGroup:
    """A group in the simulated queue.

    admission_index: position in the order of admission.
    done_stages: stages that have committed the group.
    greedy_tokens: tokens of the greedy completion, including the prompt.
    ready_version: version in training when the group became ready to train.
    is_filtered: whether the group filter rejects the group once it has scores.
    end_reason: outcome of a group that is not trained.
    """

    uid: str
    admission_index: int
    admitted_version: int
    admitted_s: float
    done_stages: set[str] = field(default_factory=set)
    info: GroupInfo | None = None
    greedy_tokens: int = 0
    ready_version: int | None = None
    is_filtered: bool = False
    end_reason: GroupOutcome | None = None


class GroupConsumer(Protocol):
    """Protocol of a simulated replica that leases groups."""

    def count_free_slots(self, stage: str) -> int: ...

    def assign_groups(self, stage: str, groups: Sequence[SimulatedGroup]) -> None:
        """Take over these groups for a stage: the queue has leased them to the replica."""
        ...


class StageQueue:
    """Groups ready for a stage, and pending lease requests of the stage's replicas.

    A request is for the slots that are free when it is made; slots that become free later need the
    next request.
    """

    def __init__(self, stage: str, required_stages: frozenset[str]) -> None:
        self.stage = stage
        self.required_stages = required_stages
        self.ready_heap: list[tuple[int, SimulatedGroup]] = []
        self.requests: dict[GroupConsumer, int] = {}

    def add_group(self, group: SimulatedGroup) -> None:
        heapq.heappush(self.ready_heap, (group.admission_index, group))

    def remove_groups(self, groups: Sequence[SimulatedGroup]) -> None:
        removed = {group.admission_index for group in groups}
        self.ready_heap = [entry for entry in self.ready_heap if entry[0] not in removed]
        heapq.heapify(self.ready_heap)

    def add_request(self, consumer: GroupConsumer) -> None:
        """Add a lease request for the replica's free slots, unless a request of it is pending."""
        if consumer not in self.requests and (free_slots := consumer.count_free_slots(self.stage)):
            self.requests[consumer] = free_slots

    def serve_requests(self) -> None:
        """Assign ready groups to the replicas with pending lease requests.

        First, each replica gets its share (ready groups over pending requests, rounded up), limited
        by its request. The rest goes to the same replicas up to their free slots, as if they had
        asked again at once.
        """
        while self.ready_heap and self.requests:
            served = []
            while self.ready_heap and self.requests:
                share = -(-len(self.ready_heap) // len(self.requests))
                consumer = next(iter(self.requests))
                self._assign_groups(consumer, self.requests.pop(consumer), share)
                served.append(consumer)
            for consumer in served:
                if self.ready_heap:
                    self._assign_groups(
                        consumer, consumer.count_free_slots(self.stage), len(self.ready_heap)
                    )
                self.add_request(consumer)

    def _assign_groups(self, consumer: GroupConsumer, free_slots: int, share: int) -> None:
        count = min(free_slots, share)
        chosen = [heapq.heappop(self.ready_heap)[1] for _ in range(count)]
        if chosen:
            consumer.assign_groups(self.stage, chosen)


class SimulatedQueue:
    """Experience queue of a simulated run, as the control loops and the replicas use it.

    hop_s: delay from a commit until dependent stages see the group, and of a trainer's lease
        request.
    """

    def __init__(self, dataflow: Dataflow, *, hop_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._hop_s = hop_s
        producers = {name: call.stage for call in dataflow.calls for name in call.produces}
        self._stage_queues = {
            call.stage: StageQueue(call.stage, frozenset(producers[name] for name in call.needs))
            for call in dataflow.queue_calls
        }
        self._verdict_stage = producers.get(FILTER_COLUMN, "")
        self._train_stage = next(
            call.stage for call in dataflow.queue_calls if call.kind is CallKind.TRAIN
        )
        self.groups: dict[str, SimulatedGroup] = {}
        self.version = 0
        self._num_admitted = 0
        self._trainable_future: asyncio.Future[None] | None = None
        self._finished_future: asyncio.Future[None] | None = None
        self._trainable: list[SimulatedGroup] = []
        self._depth_meter = DepthMeter(self._stage_queues, self._loop.time())

    # Called by replicas.

    def request_groups(self, stage: str, consumer: GroupConsumer) -> None:
        stage_queue = self._stage_queues[stage]
        stage_queue.add_request(consumer)
        if stage_queue.ready_heap:
            self._serve_stage(stage_queue)

    def commit_groups(self, stage: str, groups: Iterable[SimulatedGroup]) -> None:
        """Commit a stage's work on groups; the stages after it see the groups after `hop_s`."""
        if self._hop_s:
            self._loop.call_later(self._hop_s, self._apply_commit, stage, list(groups))
        else:
            self._apply_commit(stage, list(groups))

    def _apply_commit(self, stage: str, groups: Sequence[SimulatedGroup]) -> None:
        groups = [group for group in groups if group.uid in self.groups]
        for group in groups:
            group.done_stages.add(stage)
        if stage == self._verdict_stage:
            self._finish_filtered([group for group in groups if group.is_filtered])
        groups = [group for group in groups if group.end_reason is None]
        for stage_queue in self._stage_queues.values():
            if stage in stage_queue.required_stages:
                for group in groups:
                    if stage_queue.required_stages <= group.done_stages:
                        self._mark_ready(stage_queue, group)
                self._serve_stage(stage_queue)

    def _finish_filtered(self, filtered: Sequence[SimulatedGroup]) -> None:
        """End groups that the group filter rejects: only the coordinator sees them from now on."""
        if not filtered:
            return
        for group in filtered:
            group.end_reason = GroupOutcome("filtered", filtered=True)
        for stage_queue in self._stage_queues.values():
            stage_queue.remove_groups(filtered)
        self._trainable += filtered
        if self._finished_future is not None and not self._finished_future.done():
            self._finished_future.set_result(None)
        self._serve_stage(self._stage_queues[self._train_stage])

    def _mark_ready(self, stage_queue: StageQueue, group: SimulatedGroup) -> None:
        if stage_queue.stage == self._train_stage:
            group.ready_version = self.version
            self._trainable.append(group)
        else:
            stage_queue.add_group(group)

    def _serve_stage(self, stage_queue: StageQueue) -> None:
        if stage_queue.stage == self._train_stage:
            if (
                self._trainable
                and self._trainable_future is not None
                and not self._trainable_future.done()
            ):
                self._trainable_future.set_result(None)
            self._observe_depth(stage_queue, len(self._trainable))
        else:
            stage_queue.serve_requests()
            self._observe_depth(stage_queue, len(stage_queue.ready_heap))

    def _observe_depth(self, stage_queue: StageQueue, depth: int) -> None:
        self._depth_meter.observe_depth(stage_queue.stage, depth, self._loop.time())

    # Interface of ExperienceQueue, for the control loops.

    async def insert_prompts(
        self,
        prompts: Sequence[Prompt],
        version: int,
        *,
        wait_s: float = math.inf,
        on_entered: Callable[[Collection[str]], None] = lambda uids: None,
    ) -> None:
        """Add a group per prompt, ready for the stages that need no earlier stage; never waits."""
        now, all_queues = self._loop.time(), self._stage_queues.values()
        stage_queues = [queue for queue in all_queues if not queue.required_stages]
        for prompt in prompts:
            group = SimulatedGroup(prompt.uid, self._num_admitted, version, now)
            self._num_admitted += 1
            self.groups[prompt.uid] = group
            for stage_queue in stage_queues:
                stage_queue.add_group(group)
        on_entered([prompt.uid for prompt in prompts])
        for stage_queue in stage_queues:
            self._serve_stage(stage_queue)

    async def lease_groups(
        self, stage: str, *, max_groups: int, columns: Sequence[str], wait_s: float
    ) -> list[Experience]:
        """Return all groups that are ready to train and not yet leased; wait for at least one."""
        if not self._trainable:
            self._trainable_future = self._loop.create_future()
            await self._trainable_future
        else:
            await asyncio.sleep(self._hop_s)
        groups, self._trainable = self._trainable, []
        self._observe_depth(self._stage_queues[stage], 0)
        return [
            Experience(
                lease=GroupLease(group.admission_index, group.uid, stage, 1, math.inf),
                admitted_version=group.admitted_version,
                info=group.info,
                ready_version=group.ready_version,
                outcome=group.end_reason,
            )
            for group in groups
        ]

    async def find_uids_with(self, column: str) -> list[str]:
        assert column == FILTER_COLUMN, column
        await asyncio.sleep(self._hop_s)
        return [
            uid for uid, group in self.groups.items() if self._verdict_stage in group.done_stages
        ]

    async def wait_for_finished(self, *, wait_s: float) -> list[FinishedGroup]:
        """Return all filtered groups that are not yet removed; wait for at least one."""
        if not any(group.end_reason for group in self._trainable):
            self._finished_future = self._loop.create_future()
            await self._finished_future
        return [
            FinishedGroup(group.uid, group.end_reason, group.info)
            for group in self._trainable
            if group.end_reason is not None
        ]

    async def remove_groups(self, uids: Sequence[str], version: int) -> None:
        """Remove trained, filtered or dropped groups; `version` is the version in training."""
        self.version = max(self.version, version)
        removed = [self.groups.pop(uid) for uid in uids if uid in self.groups]
        self._trainable = [group for group in self._trainable if group.uid in self.groups]
        required_stages = self._stage_queues[self._train_stage].required_stages
        surplus = [
            group
            for group in removed
            if group.end_reason is None and not required_stages <= group.done_stages
        ]
        for stage_queue in self._stage_queues.values() if surplus else ():
            stage_queue.remove_groups(surplus)

    async def end_step(
        self, uids: Sequence[str], version: int, keep: Sequence[str] | None = None
    ) -> ShardStats:
        """Remove the groups of a finished step; return the queue's statistics of that step."""
        await self.remove_groups(uids, version)
        stats = await self.get_stats()
        self._depth_meter.restart_window(self._loop.time())
        return stats

    async def get_stats(self) -> ShardStats:
        now = self._loop.time()
        oldest_s = next((group.admitted_s for group in self.groups.values()), now)
        return ShardStats(
            depth=self._depth_meter.compute_means(now),
            num_bytes=0,
            oldest_age_s=now - oldest_s,
            uids=tuple(self.groups),
            counts={"redelivered": 0, "refused": 0},
        )

"""Stage worker: leases, commits, renewals, cancellation."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.buffer import ExperienceQueue
from streamrl.errors import RewardError
from streamrl.messages import Columns, Experience, FilteredGroup, GroupLease
from streamrl.stream.device_lease import DedicatedDeviceLease
from streamrl.stream.protocols import StageContext
from streamrl.stream.stage_worker import (
    PARTIAL_SAVE_INTERVAL_S,
    ConcurrencyLimit,
    InFlightWork,
    PartialRolloutSaver,
    StageResult,
    serve_stage,
    split_batches,
    split_slots,
)
from streamrl.telemetry.spans import SpanRecorder
from tests.buffer.clients import local_shards
from tests.buffer.shards import prompt, rollouts
from tests.fake_shards import LocalShard
from tests.virtual_time import in_virtual_time

UIDS = [f"0:{i}:0" for i in range(6)]


async def open_shard(
    uids: Sequence[str] = UIDS, **settings: Any
) -> tuple[LocalShard, ExperienceQueue]:
    """Open a shard with these prompts; return it and the coordinator's queue client."""
    (shard,) = local_shards(1, **settings)
    queue = ExperienceQueue([shard], "coordinator")
    await queue.insert_prompts([prompt(uid) for uid in uids], 0)
    return shard, queue


class Sampler:
    """Slow generate stage that returns the given result of each group."""

    def __init__(self, *, seconds: float = 1.0, **results: StageResult) -> None:
        self.started: list[str] = []
        self.finished: list[str] = []
        self.num_running = 0
        self.max_running = 0
        self._seconds = seconds
        self._results = results

    async def __call__(self, experiences: Sequence[Experience]) -> Sequence[StageResult]:
        uids = [experience.uid for experience in experiences]
        self.started += uids
        self.num_running += len(uids)
        self.max_running = max(self.max_running, self.num_running)
        try:
            await asyncio.sleep(self._seconds)
        finally:
            self.num_running -= len(uids)
        self.finished += uids
        return [self._results.get(f"uid_{uid.split(':')[1]}", rollouts()) for uid in uids]


def start_stage(
    shard: LocalShard,
    sampler: Sampler,
    *,
    slots: int = 2,
    batch: int = 1,
    holder: str = "me",
    leaving: asyncio.Event | None = None,
) -> "asyncio.Task[None]":
    queue, spans = ExperienceQueue([shard], holder), SpanRecorder(holder)
    stage = StageContext(
        "generate", queue, DedicatedDeviceLease(), spans, leaving or asyncio.Event()
    )
    return asyncio.create_task(
        serve_stage(stage, sampler, InFlightWork(ConcurrencyLimit(slots)), columns=(), batch=batch)
    )


@pytest.mark.parametrize(("slots", "batch"), [(1, 1), (3, 1), (4, 2), (9, 9)])
@in_virtual_time
async def test_stage_respects_its_concurrency_limit_and_commits_all(slots: int, batch: int):
    (shard, queue), sampler = await open_shard(), Sampler()
    loop = start_stage(shard, sampler, slots=slots, batch=batch)
    await asyncio.sleep(20.0)
    loop.cancel()
    assert sorted(sampler.finished) == UIDS
    assert sampler.max_running == min(slots, len(UIDS))
    limits = await queue.read_columns(UIDS, ("lengths",))
    assert all(columns["lengths"].tolist() == [5, 5] for columns in limits.values())


@in_virtual_time
async def test_results_are_committed_filtered_or_failed_by_type():
    shard, queue = await open_shard(UIDS[:3], max_attempts=1)
    sampler = Sampler(uid_1=FilteredGroup("not worth it"), uid_2=RewardError("no verdict"))
    loop = start_stage(shard, sampler, slots=3, batch=3)
    await asyncio.sleep(5.0)
    loop.cancel()
    ended = await queue.lease_groups("train", max_groups=9, columns=(), wait_s=1.0)
    causes = {group.uid: group.outcome.cause for group in ended if group.outcome}
    assert causes == {"0:1:0": "filtered", "0:2:0": "reward_error"}
    assert (await queue.read_columns(["0:0:0"], ("lengths",)))["0:0:0"]["lengths"].tolist() == [
        5,
        5,
    ]


@in_virtual_time
async def test_leaving_stage_commits_finished_work_and_leases_nothing():
    (shard, queue), sampler = await open_shard(), Sampler(seconds=10.0)
    loop = start_stage(shard, sampler, leaving=(leaving := asyncio.Event()))
    await asyncio.sleep(15.0)
    leaving.set()
    await loop
    assert await queue.release_holder("me", died=False) == 2
    assert sampler.started == UIDS[:4] and sorted(sampler.finished) == UIDS[:2]
    await asyncio.sleep(30.0)
    other_queue = ExperienceQueue([shard], "you")
    remaining = await other_queue.lease_groups("generate", max_groups=9, columns=(), wait_s=1.0)
    assert [(group.uid, group.lease.attempt) for group in remaining] == [
        (uid, 1) for uid in UIDS[2:]
    ]


@in_virtual_time
async def test_lost_work_is_cancelled_and_frees_its_slot():
    (shard, queue), sampler = await open_shard(UIDS[:1]), Sampler(seconds=30.0)
    loop = start_stage(shard, sampler, slots=1)
    await asyncio.sleep(5.0)
    await queue.remove_groups(UIDS[:1], 0)
    await queue.insert_prompts([prompt(UIDS[1])], 0)
    await asyncio.sleep(40.0)
    loop.cancel()
    assert sampler.started == UIDS[:2]
    assert sampler.finished == [UIDS[1]], "the lost group is cancelled"


@in_virtual_time
async def test_error_of_the_compute_function_ends_the_loop():
    class Broken(Sampler):
        async def __call__(self, experiences: Sequence[Experience]) -> Sequence[StageResult]:
            raise KeyError("lengths")

    shard, _ = await open_shard()
    with pytest.raises(ExceptionGroup) as error:
        await start_stage(shard, Broken())
    assert error.group_contains(KeyError)


# Slots


def experience(uid: str, token: int = 1, *, attempt: int = 1) -> Experience:
    return Experience(GroupLease(token, uid, "reward", attempt, 0.0), 0)


@in_virtual_time
async def test_group_starts_while_any_slot_is_free_and_releases_slots_one_by_one():
    in_flight = InFlightWork(ConcurrencyLimit(6, slots_per_group=4))
    assert await in_flight.wait_for_slots() == 2

    async def work() -> None:
        release_slot = in_flight.make_slot_releaser()
        for _ in range(3):
            await asyncio.sleep(1.0)
            release_slot()
        await asyncio.sleep(1.0)

    for uid in "ab":
        in_flight.add_task([experience(uid)], asyncio.ensure_future(work()))
    # Two completions wait for a slot: a slot is free after three completions.
    assert (await in_flight.wait_for_slots(), asyncio.get_running_loop().time()) == (1, 2.0)
    await asyncio.sleep(1.5)
    assert (await in_flight.wait_for_slots(), in_flight.is_empty) == (1, False)
    await asyncio.sleep(1.0)
    assert (await in_flight.wait_for_slots(), in_flight.is_empty) == (2, True)


@given(st.integers(1, 600), st.integers(1, 32), st.booleans())
def test_split_slots_is_proportional_to_completions(count: int, group_size: int, greedy: bool):
    completions = {"generate": group_size, **({"greedy": 1} if greedy else {})}
    limits = split_slots(count, completions, group_size=group_size)
    assert {name: limit.slots_per_group for name, limit in limits.items()} == completions
    assert all(limit.available_groups >= 1 for limit in limits.values())
    assert sum(limit.free_slots for limit in limits.values()) <= max(count, len(limits))
    total = sum(completions.values())
    for name, limit in limits.items():
        assert (
            limit.free_slots == 1
            or 0 <= count * completions[name] - limit.free_slots * total < total
        )


@in_virtual_time
async def test_lost_lease_cancels_only_its_own_task():
    in_flight = InFlightWork(ConcurrencyLimit(2))
    tasks = [asyncio.ensure_future(asyncio.sleep(100.0)) for _ in range(2)]
    for token, task in enumerate(tasks):
        in_flight.add_task([experience("a", token)], task)
    in_flight.abandon_lease(experience("a", 0).lease)
    await asyncio.sleep(1.0)
    assert [task.cancelled() for task in tasks] == [True, False]


def test_retried_groups_form_batches_of_one():
    items = [experience(uid, attempt=1 + (uid in "bd")) for uid in "abcde"]
    assert [[group.uid for group in chunk] for chunk in split_batches(items, 2)] == [
        ["b"],
        ["d"],
        ["a", "c"],
        ["e"],
    ]


@in_virtual_time
async def test_groups_that_start_at_any_time_share_reads_of_their_partial_rollouts():
    clock = asyncio.get_running_loop().time
    saved_at: dict[GroupLease, float] = {}
    intervals: list[float] = []
    reads: list[float] = []

    async def read_partials() -> dict[str, Columns]:
        reads.append(clock())
        return {lease.uid: {} for lease in saved_at}

    class Queue(ExperienceQueue):
        async def save_partials(self, entries: Sequence[tuple[GroupLease, Columns]]) -> None:
            for lease, _ in entries:
                intervals.append(clock() - saved_at[lease])
                saved_at[lease] = clock()

    saver = PartialRolloutSaver(Queue([(await open_shard())[0]], "me"), read_partials)

    async def run_group(number: int) -> None:
        await asyncio.sleep(0.13 * number)
        lease = GroupLease(number, f"0:{number}:0", "generate", 1, 1000.0)
        saved_at[lease] = clock()
        with saver.track_lease(lease):
            await asyncio.sleep(40.0)

    saving = asyncio.create_task(saver.save_periodically())
    await asyncio.gather(*map(run_group, range(64)))
    saving.cancel()
    assert len(reads) <= clock()
    assert min(intervals) >= 1.0 and max(intervals) <= PARTIAL_SAVE_INTERVAL_S

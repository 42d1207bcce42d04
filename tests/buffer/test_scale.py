"""The cost of an event does not grow with the groups in flight or with the idle generators."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from streamrl.buffer import ExperienceQueue, ShardCapacity, StepAssembler
from streamrl.buffer.micro_batch_schedule import MicroBatchPacker
from streamrl.buffer.staleness_credits import OversamplingController
from streamrl.errors import DeadlineError
from streamrl.planner.simulator.virtual_loop import run_virtual
from tests.buffer.clients import finish, lease, local_shards
from tests.buffer.shards import (
    admit,
    do,
    entry,
    make_shard,
    prompt,
    put,
    rollouts,
    take,
)
from tests.operations import count_lines
from tests.rollouts import make_ready_group
from tests.virtual_time import in_virtual_time

FEW, MANY = 20, 320
GROWTH = 1.5
"""Most lines with MANY over lines with FEW. A look at each would make this about 10."""


def check_flat(count: Callable[[int], int]) -> None:
    """Check that the lines which `count` returns for a number of groups hardly grow with it."""
    few, many = count(FEW), count(MANY)
    assert few > 0
    assert many <= GROWTH * few, f"{few} lines with {FEW}, {many} with {MANY}"


def on_loops(count: Callable[[int], Coroutine[Any, Any, int]]) -> Callable[[], None]:
    """Make a test of a coroutine that returns the lines for a number of groups."""

    def test() -> None:
        check_flat(lambda number: run_virtual(count(number)))

    test.__name__ = count.__name__
    return test


def make_assembler(ready: int, pending: int, **settings: Any) -> StepAssembler:
    """Make an assembler with groups of version 1 in flight, of which some are ready."""
    assembler = StepAssembler(max_staleness=1, groups_per_step=2 * MANY, **settings)
    uids = [f"0:{i}:0" for i in range(ready + pending)]
    for uid in uids:
        assembler.admit_group(uid, 1)
    assembler.offer_groups(make_ready_group(uid, 1) for uid in uids[:ready])
    return assembler


@pytest.mark.parametrize("drops_stale", [False, True])
@pytest.mark.parametrize(
    "look",
    [
        lambda assembler, number: assembler.count_drawable(1) == number,
        lambda assembler, number: assembler.remove_late_groups(1) == [],
    ],
    ids=["drawable", "late"],
)
def test_drawable_and_late_groups_are_found_without_a_look_at_each(
    look: Callable[[StepAssembler, int], bool], drops_stale: bool
):
    def count(number: int) -> int:
        oversampling = OversamplingController(2.0, groups_per_step=number)
        assembler = make_assembler(
            number, number, drops_stale=drops_stale, oversampling=oversampling
        )
        with count_lines() as counted:
            assert look(assembler, number)
        return counted.lines

    check_flat(count)


def test_a_group_that_fills_no_round_is_packed_without_a_look_at_those_that_wait():
    def count(number: int) -> int:
        packer = MicroBatchPacker(dp_size=8, micro_batch_tokens=100 * MANY)
        for i in range(number):
            packer.add_group(f"0:{i}:0", [7 + i % 5, 9])
        assert packer.take_rounds(final=False) == []
        packer.add_group("0:9999:0", [8, 12])
        with count_lines() as counted:
            assert packer.take_rounds(final=False) == []
        return counted.lines

    check_flat(count)


@on_loops
async def test_a_group_costs_the_coordinator_the_same_whatever_it_holds_already(number: int) -> int:
    queue = ExperienceQueue(local_shards(1, capacity=2 * MANY), "coordinator")
    await queue.insert_prompts([prompt(f"0:{i}:0") for i in range(number)], 0)
    await finish(queue)
    assert len(await lease(queue, "train", number)) == number
    await queue.insert_prompts([prompt("0:9998:0"), prompt("0:9999:0")], 0)
    await finish(queue)
    with count_lines() as counted:
        taken = await lease(queue, "train", 2)
        await queue.remove_groups(["0:9998:0"], 0)
    assert len(taken) == 2
    return counted.lines


@on_loops
async def test_a_prompt_wakes_one_of_the_idle_generators(number: int) -> int:
    shard = make_shard()
    waiting = [
        asyncio.create_task(take(shard, "generate", holder=f"generator-{i}", wait_s=60.0))
        for i in range(number)
    ]
    await asyncio.sleep(1.0)
    with count_lines() as counted:
        await admit(shard, "a")
        await asyncio.sleep(1.0)
    served = [task for task in waiting if task.done()]
    assert [group.uid for task in served for group in task.result()] == ["a"]
    for task in waiting:
        task.cancel()
    return counted.lines


@on_loops
async def test_an_idle_generator_does_not_wake_for_leases_that_ended(number: int) -> int:
    shard = make_shard(bounds=ShardCapacity(number))
    for i in range(number):
        await admit(shard, f"0:{i}:0")
        await do(shard, "generate")
        await asyncio.sleep(0.01)
    with count_lines() as counted:
        assert await take(shard, "generate", wait_s=60.0) == []
    # The heap entry of each ended lease is removed once.
    return counted.lines - number * 10


@in_virtual_time
async def test_a_woken_request_that_leaves_passes_the_prompt_on():
    shard = make_shard()
    first, second = (
        asyncio.create_task(take(shard, "generate", holder=name, wait_s=60.0)) for name in "ab"
    )
    await asyncio.sleep(1.0)
    await admit(shard, "a")
    first.cancel()
    assert [group.uid for group in await second] == ["a"]
    assert asyncio.get_running_loop().time() < 2.0


@on_loops
async def test_a_filtered_group_is_found_without_a_look_at_the_others(number: int) -> int:
    shard = make_shard(bounds=ShardCapacity(number), max_attempts=1)
    await admit(shard, *(f"0:{i}:0" for i in range(number)))
    (group,) = await take(shard, "generate", max_groups=1)
    await shard.fail_groups([(group.lease, DeadlineError("no"))])
    with count_lines() as counted:
        (finished,) = await shard.wait_for_finished(wait_s=1.0)
    assert finished.uid == group.uid
    return counted.lines


@on_loops
async def test_a_kept_group_is_reported_without_those_reported_before(number: int) -> int:
    queue = ExperienceQueue(local_shards(1, capacity=2 * MANY), "coordinator")
    await queue.insert_prompts([prompt(f"0:{i}:0") for i in range(number + 1)], 0)
    groups = await lease(queue, "generate", number + 1)
    *first, last = [(group.lease, rollouts()) for group in groups]
    await queue.commit_columns(first)
    assert len(await queue.find_uids_with("token_ids")) == number
    assert await queue.find_uids_with("token_ids") == []
    await queue.commit_columns([last])
    with count_lines() as counted:
        assert await queue.find_uids_with("token_ids") == [last[0].uid]
    return counted.lines


@on_loops
async def test_a_commit_in_a_full_shard_does_not_look_at_the_prompts_that_wait(number: int) -> int:
    shard = make_shard(bounds=ShardCapacity(1))
    await admit(shard, "a")
    entries = [entry(f"0:{i}:0") for i in range(number)]
    blocked = asyncio.create_task(shard.admit_entries(entries, wait_s=60.0))
    await asyncio.sleep(1.0)
    (group,) = await take(shard, "generate")
    with count_lines() as counted:
        await put(shard, (group.lease, rollouts()))
        await asyncio.sleep(1.0)
    assert not blocked.done()
    blocked.cancel()
    return counted.lines


class TightShard:
    """ShardProxy of a shard that admits a single prompt per call; counts the prompts sent."""

    def __init__(self) -> None:
        self.num_sent = 0

    async def call(
        self, method: Any, /, entries: Sequence[tuple[str, bytes, int]], *, wait_s: float
    ) -> Any:
        self.num_sent += len(entries)
        return [entries[0][0]]


@in_virtual_time
async def test_prompts_that_wait_for_capacity_are_not_sent_with_each_that_enters():
    shard, entered = TightShard(), list[str]()
    queue = ExperienceQueue([shard], "coordinator")  # type: ignore[list-item]
    uids = [f"0:{i}:0" for i in range(MANY)]
    await queue.insert_prompts([prompt(uid) for uid in uids], 0, on_entered=entered.extend)
    assert entered == uids
    assert shard.num_sent <= 3 * MANY

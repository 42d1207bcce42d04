"""Capacity of a shard in groups and bytes: backpressure on admission only."""

import asyncio
import math
from typing import Any

import pytest

from streamrl.buffer import QueueShard, ShardCapacity, group
from streamrl.buffer.encoding import encode_columns
from streamrl.errors import ConfigError, DeadlineError
from tests.buffer.shards import (
    STAGES,
    WORK,
    admit,
    do,
    entry,
    finish,
    make_shard,
    on_shard,
    take,
)
from tests.fake_shards import MemoryLog, recover
from tests.virtual_time import in_virtual_time

WHOLE_BYTES = sum(len(encode_columns(columns)) for columns in WORK.values())
"""Bytes of the columns of a finished group."""


@on_shard(bounds=ShardCapacity(2))
async def test_admission_inserts_as_many_as_fit(shard: QueueShard):
    entries = [entry(uid) for uid in "abc"]
    assert await shard.admit_entries(entries, wait_s=60.0) == ["a", "b"]
    retry = asyncio.create_task(shard.admit_entries(entries[2:], wait_s=60.0))
    await asyncio.sleep(1.0)
    assert not retry.done()
    await shard.remove_groups(["a"], 1)
    assert await retry == ["c"]
    assert (await shard.get_stats()).uids == ("b", "c")


@pytest.mark.parametrize(
    "bounds", [ShardCapacity(2), ShardCapacity(9, max_bytes=2999, reserved_group_bytes=1000)]
)
@in_virtual_time
async def test_admissions_being_journaled_occupy_capacity(bounds: ShardCapacity):
    shard = make_shard(bounds=bounds, log=MemoryLog(write_s=1.0))
    entering = [asyncio.create_task(admit(shard, uid, wait_s=5.0)) for uid in "abc"]
    await asyncio.wait(entering)
    assert [task.exception() is None for task in entering] == [True, True, False]
    assert (await shard.get_stats()).uids == ("a", "b")


@on_shard(bounds=ShardCapacity(1))
async def test_admission_retried_while_waiting_is_inserted_once(shard: QueueShard):
    await admit(shard, "x")
    admissions = [asyncio.create_task(admit(shard, "a", wait_s=60.0)) for _ in range(2)]
    await asyncio.sleep(1.0)
    await shard.remove_groups(["x"], 0)
    await asyncio.gather(*admissions)
    assert (await shard.get_stats()).uids == ("a",)
    assert len(await take(shard, "generate")) == 1


@on_shard(bounds=ShardCapacity(1))
async def test_admission_retried_after_removal_does_not_reinsert_the_group(shard: QueueShard):
    await admit(shard, "a")
    waiting = asyncio.create_task(shard.admit_entries([entry("b")], wait_s=60.0))
    await asyncio.sleep(1.0)
    await shard.remove_groups(["a"], 1)
    assert await shard.admit_entries([entry("b")], wait_s=1.0) == ["b"]
    await shard.remove_groups(["b"], 1)
    assert await shard.admit_entries([entry("a")], wait_s=1.0) == ["a"]
    assert await waiting == ["b"]
    assert (await shard.get_stats()).uids == ()


@in_virtual_time
async def test_seen_uids_survive_a_shard_restart_but_not_a_new_session():
    log, removed = MemoryLog(), {}
    shard = make_shard(log=log, session="first")
    await take(shard, "generate")
    await admit(shard, "a")
    await shard.remove_groups(["a"], 1)
    for session in ("first", "second"):
        successor = make_shard(book=recover(STAGES, log), session=session)
        assert await successor.admit_entries([entry("a")], wait_s=1.0) == ["a"]
        removed[session] = (await successor.get_stats()).uids
    assert removed == {"first": (), "second": ("a",)}


@on_shard()
async def test_seen_uids_are_bounded(shard: QueueShard, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(group, "MAX_SEEN_UIDS", 2)
    for uid in "abc":
        await admit(shard, uid)
        await shard.remove_groups([uid], 1)
    await admit(shard, "a", "b", "c")
    assert (await shard.get_stats()).uids == ("a",)


@in_virtual_time
async def test_cancelled_admission_releases_its_reservation():
    shard = make_shard(bounds=ShardCapacity(1), log=MemoryLog(write_s=1.0))
    dying = asyncio.create_task(admit(shard, "a", wait_s=5.0))
    await asyncio.sleep(0.5)
    dying.cancel()
    await asyncio.sleep(2.0)
    await admit(shard, "a", wait_s=5.0)
    assert len(await take(shard, "generate")) == 1


@pytest.mark.parametrize(
    ("bounds", "full"),
    [
        (ShardCapacity(2), "it holds 2 of 2 groups and 0 "),
        (ShardCapacity(10, 2999, 1000), "it holds 2 of 10 groups and 2000 of 2999 bytes"),
    ],
)
@in_virtual_time
async def test_capacity_deadline_names_the_groups_in_the_shard(bounds: ShardCapacity, full: str):
    shard = make_shard(bounds=bounds)
    await admit(shard, *"ab")
    message = rf"prompt c waited .* full shard: {full}.*; the first are \['a', 'b'\]"
    with pytest.raises(DeadlineError, match=message):
        await admit(shard, "c", wait_s=5.0)
    assert asyncio.get_running_loop().time() == pytest.approx(5.0)


@on_shard(bounds=ShardCapacity(10, 2 * 2000 + WHOLE_BYTES, reserved_group_bytes=2000))
async def test_complete_group_releases_unused_reservation(shard: QueueShard):
    assert WHOLE_BYTES < 2000
    await admit(shard, *"ab")
    blocked = asyncio.create_task(admit(shard, "c", wait_s=60.0))
    await do(shard, "generate", "reward", max_groups=1)
    await asyncio.sleep(1.0)
    assert not blocked.done(), "the reference may still need its reservation"
    await do(shard, "reference", max_groups=1)
    await blocked


@on_shard(bounds=ShardCapacity(10, max_bytes=1000, reserved_group_bytes=1000), max_attempts=1)
async def test_ended_group_releases_its_bytes(shard: QueueShard):
    await admit(shard, "a")
    await do(shard, "generate")
    (experience,) = await take(shard, "reward")
    blocked = asyncio.create_task(admit(shard, "b", wait_s=60.0))
    await asyncio.sleep(1.0)
    assert not blocked.done()
    await shard.fail_groups([(experience.lease, DeadlineError("no"))])
    await blocked


@on_shard(bounds=ShardCapacity(1))
async def test_a_finished_group_counts_until_its_removal(shard: QueueShard):
    await admit(shard, "a")
    await finish(shard)
    with pytest.raises(DeadlineError):
        await admit(shard, "b", wait_s=5.0)


@on_shard(bounds=ShardCapacity(3, max_bytes=3 * WHOLE_BYTES, reserved_group_bytes=WHOLE_BYTES))
async def test_commit_never_waits_and_stays_within_reservations(shard: QueueShard):
    await admit(shard, *"abc")
    await finish(shard)
    assert asyncio.get_running_loop().time() == 0.0
    assert (await shard.get_stats()).num_bytes == 3 * WHOLE_BYTES


@pytest.mark.parametrize(
    ("bounds", "words"),
    [
        ((0,), "max_groups=0"),
        ((10, 500, 600), "max_bytes=500"),
        ((10, 0), "max_bytes=0"),
        ((10, math.nan), "max_bytes=nan"),
    ],
)
def test_capacity_that_admits_no_group_raises(bounds: tuple[Any, ...], words: str):
    with pytest.raises(ConfigError, match=words):
        ShardCapacity(*bounds)

"""Queue client over several shards: location of groups, finished groups, dead holders."""

import asyncio
import math
import zlib

import numpy as np
import pytest

from streamrl.buffer import ExperienceQueue, QueueShard
from streamrl.buffer.encoding import LARGE_BLOB_BYTES
from streamrl.errors import ContractError, DeadlineError
from streamrl.messages import Columns
from tests.buffer.clients import UIDS, do, local_shards, queue_of, take_all
from tests.buffer.shards import prompt, rollouts
from tests.virtual_time import in_virtual_time


def large(value: int) -> Columns:
    """Return the columns of one long completion, encoded as several pieces."""
    tokens = LARGE_BLOB_BYTES // 4
    return {
        "token_ids": np.full(tokens, value, np.int32),
        "loss_mask": np.ones(tokens, np.bool_),
        "generator_logprobs": np.zeros(tokens, np.float32),
        "policy_version": np.zeros(tokens, np.int32),
        "lengths": np.array([tokens], np.int32),
        "finish_reason": np.zeros(1, np.int8),
    }


@in_virtual_time
async def test_large_columns_survive_a_shard_restart():
    (shard,) = shards = local_shards(1)
    queue = ExperienceQueue(shards, "me")
    await queue.insert_prompts([prompt("0:0:0")], 0)
    await do(queue, "generate", large(7))
    shard.kill()
    shard.revive()
    (scoring,) = await take_all(queue, "reward", ("token_ids", "lengths"))
    assert (scoring.columns["token_ids"] == 7).all()
    assert scoring.columns["lengths"] == scoring.columns["token_ids"].size


@in_virtual_time
async def test_failed_commit_waits_for_all_shards_before_raising():
    shards = local_shards(2)
    queue = ExperienceQueue(shards, "me")
    await queue.insert_prompts([prompt(uid) for uid in UIDS[:8]], 0)
    leases = {
        queue.get_shard_index(group.uid): group.lease for group in await take_all(queue, "generate")
    }
    shards[1].log.write_s = 5.0
    columns = large(7)
    bad = {**large(7), "lengths": np.array([3], np.int32)}
    with pytest.raises(ContractError, match="token_ids"):
        await queue.commit_columns([(leases[0], bad), (leases[1], columns)])
    # The caller may now change the columns.
    columns["token_ids"][:] = 99
    shards[1].log.write_s = 0.0
    shards[1].kill()
    shards[1].revive()
    (scoring,) = await take_all(queue, "reward", ("token_ids",))
    assert (scoring.columns["token_ids"] == 7).all()


@in_virtual_time
async def test_admission_waits_for_capacity_over_several_requests():
    queue = ExperienceQueue(local_shards(1, capacity=1), "me")
    await queue.insert_prompts([prompt("a")], 0)
    with pytest.raises(DeadlineError, match="waited for capacity in a full shard"):
        await queue.insert_prompts([prompt("b")], 0, wait_s=50.0)
    assert asyncio.get_running_loop().time() == pytest.approx(50.0, abs=1.0)
    waiting = asyncio.create_task(queue.insert_prompts([prompt("b")], 0, wait_s=math.inf))
    await asyncio.sleep(10_000.0)
    assert not waiting.done()
    await queue.remove_groups(["a"], 1)
    await waiting


# Location of groups


@in_virtual_time
async def test_shard_index_is_equal_in_every_process():
    shards = local_shards(3)
    first_queue, second_queue = ExperienceQueue(shards, "me"), ExperienceQueue(shards, "you")
    await first_queue.insert_prompts([prompt(uid) for uid in UIDS], 0)
    indices = [first_queue.get_shard_index(uid) for uid in UIDS]
    assert indices == [second_queue.get_shard_index(uid) for uid in UIDS]
    assert indices == [zlib.crc32(uid.encode()) % 3 for uid in UIDS]
    for i, shard in enumerate(shards):
        shard_uids = {uid for uid, index in zip(UIDS, indices, strict=True) if index == i}
        assert set((await shard.call(QueueShard.get_stats)).uids) == shard_uids != set()


@in_virtual_time
async def test_read_columns_by_uid():
    queue, uids = queue_of(2), UIDS[:6]
    await queue.insert_prompts([prompt(uid) for uid in uids], 0)
    await do(queue, "generate", rollouts(version=3))
    columns_by_uid = await queue.read_columns(uids, ("policy_version", "lengths"))
    assert set(columns_by_uid) == set(uids)
    assert all(columns["lengths"].tolist() == [5, 5] for columns in columns_by_uid.values())
    assert all(
        columns.keys() == {"policy_version", "lengths"} for columns in columns_by_uid.values()
    )
    stats = await queue.end_step([], 1)
    assert set(stats.uids) == set(uids)
    assert stats.depth["reward"] >= 0


@in_virtual_time
async def test_stats_are_summed_over_shards():
    queue = queue_of(3)
    await queue.insert_prompts([prompt(uid) for uid in UIDS], 0)
    await asyncio.sleep(5.0)
    stats = await queue.end_step(UIDS[:5], 1)
    assert sorted(stats.uids) == sorted(UIDS[5:])
    assert stats.depth["generate"] == pytest.approx(20.0, rel=0.01)
    assert stats.oldest_age_s == pytest.approx(5.0, abs=0.1)
    assert stats.counts == {"redelivered": 0, "refused": 0}


# Dead holders and stalls


@in_virtual_time
async def test_release_holder_requeues_in_every_shard():
    shards = local_shards(3)
    dead, alive = ExperienceQueue(shards, "worker-0"), ExperienceQueue(shards, "worker-1")
    await alive.insert_prompts([prompt(uid) for uid in UIDS], 0)
    dead_groups = await take_all(dead, "generate")
    assert len(dead_groups) == 20
    assert await alive.release_holder("worker-0") == 20
    assert len(await take_all(alive, "generate")) == 20


@in_virtual_time
async def test_find_overdue_and_locate_groups_cover_all_shards():
    shards = local_shards(3)
    slow, watcher = ExperienceQueue(shards, "worker-0"), ExperienceQueue(shards, "coordinator")
    await watcher.insert_prompts([prompt(uid) for uid in UIDS[:5]], 0)
    leased = await take_all(slow, "generate")
    await asyncio.sleep(5.0)
    overdue = await watcher.find_overdue(4.0)
    assert sorted(stall.uid for stall in overdue) == sorted(group.uid for group in leased)
    assert {stall.lease.holder for stall in overdue} == {"worker-0"}
    locations = await watcher.locate_groups([*UIDS[:2], "0:99:0"])
    assert locations.keys() == set(UIDS[:2])
    assert all("held by worker-0 for 6." in phrase for phrase in locations.values())
    await watcher.requeue_overdue(overdue)
    assert len(await slow.renew_leases()) == 5

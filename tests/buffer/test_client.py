"""Queue client over several shards: routing, requests, grants, renewals, dead holders."""

import asyncio
import gc
import math
import weakref
import zlib

import numpy as np
import pytest

from streamrl.buffer import ExperienceQueue, QueueShard
from streamrl.buffer.encoding import LARGE_BLOB_BYTES
from streamrl.errors import ContractError, DeadlineError, StreamError
from streamrl.messages import Columns, FilteredGroup
from tests.buffer.clients import UIDS, do, finish, lease, local_shards, queue_of, take_all
from tests.buffer.shards import SCORES, prompt, rollouts
from tests.fake_shards import CALL_S
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
    queue = ExperienceQueue(shards, "me")
    await queue.insert_prompts([prompt(uid) for uid in UIDS], 0)
    indices = [queue.get_shard_index(uid) for uid in UIDS]
    assert indices == [zlib.crc32(uid.encode()) % 3 for uid in UIDS]
    for i, shard in enumerate(shards):
        shard_uids = {uid for uid, index in zip(UIDS, indices, strict=True) if index == i}
        assert set((await shard.call(QueueShard.get_stats)).uids) == shard_uids != set()


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


# Requests


@in_virtual_time
async def test_waiting_lease_call_returns_when_any_shard_gets_a_prompt():
    queue = queue_of(3)
    waiting = asyncio.create_task(lease(queue, "generate", 4, wait_s=60.0))
    await asyncio.sleep(5.0)
    await queue.insert_prompts([prompt("0:7:0")], 0)
    (group,) = await waiting
    assert group.uid == "0:7:0"
    assert group.prompt is not None and group.prompt.token_ids.tolist() == [1, 2]
    assert asyncio.get_running_loop().time() < 6.0


@in_virtual_time
async def test_request_outlives_the_call():
    shards = local_shards(1)
    queue = ExperienceQueue(shards, "me")
    for _ in range(5):
        assert not await lease(queue, "generate", 2)
    cancelled = asyncio.create_task(lease(queue, "generate", 2, wait_s=9))
    await asyncio.sleep(1.0)
    cancelled.cancel()
    await queue.insert_prompts([prompt("0:0:0")], 0)
    await asyncio.sleep(1.0)
    # The shard answered the first call's request while no call was waiting.
    started = asyncio.get_running_loop().time()
    (group,) = await lease(queue, "generate", 2)
    assert asyncio.get_running_loop().time() == started
    assert group.uid == "0:0:0"


@in_virtual_time
async def test_request_is_retried_after_a_shard_restart_and_gets_the_same_leases():
    shards = local_shards(1)
    queue = ExperienceQueue(shards, "me")
    await queue.insert_prompts([prompt(uid) for uid in UIDS], 0)
    leasing = asyncio.create_task(lease(queue, "generate", 3, wait_s=60.0))
    # The grant is in the log, but the reply is still in flight.
    await asyncio.sleep(1.5 * CALL_S + 0.002)
    await shards[0].log.append([])
    shards[0].kill()
    shards[0].revive()
    first = await leasing
    assert len(first) == 3
    second = await lease(queue, "generate", 20)
    assert len(second) == 17
    assert await queue.commit_columns([(group.lease, rollouts()) for group in first]) == []


# Active leases


@in_virtual_time
async def test_pending_grants_are_renewed():
    shards = local_shards(2)
    queue, other_queue = ExperienceQueue(shards, "me"), ExperienceQueue(shards, "you")
    await queue.insert_prompts([prompt(uid) for uid in UIDS[:4]], 0)
    assert queue.renew_interval_s == float("inf"), "no leases are held"
    (first,) = await lease(queue, "generate")
    assert queue.renew_interval_s == pytest.approx(10.0 / 3)
    taken_uids = {group.uid for group in await take_all(other_queue, "generate")}
    for _ in range(5):
        await asyncio.sleep(queue.renew_interval_s)
        assert await queue.renew_leases() == []
        await other_queue.renew_leases()
    assert not await take_all(other_queue, "generate")
    assert first.uid not in taken_uids


@in_virtual_time
async def test_lost_leases_are_reported_once_and_not_returned():
    shards = local_shards(2)
    queue, other_queue = ExperienceQueue(shards, "me"), ExperienceQueue(shards, "you")
    leasing = asyncio.create_task(lease(queue, "generate", 2, wait_s=5.0))
    await asyncio.sleep(1.0)
    # One group in each shard: the second reply arrives after the call has returned.
    await queue.insert_prompts([prompt("0:0:0")], 0)
    (pending,) = await leasing
    await queue.insert_prompts([prompt(uid) for uid in UIDS[1:4]], 0)
    await asyncio.sleep(11.0)
    taken_uids = [group.uid for group in await take_all(other_queue, "generate")]
    assert pending.uid in taken_uids
    lost = {lease.uid for lease in await queue.renew_leases()}
    assert pending.uid in lost and lost <= set(taken_uids) and len(lost) > 1
    assert await queue.renew_leases() == []
    assert not await lease(queue, "generate", 2)


@in_virtual_time
async def test_ranks_read_groups_that_their_leader_leased_unless_the_lease_is_lost():
    shards = local_shards(2)
    leader, rank = ExperienceQueue(shards, "leader"), ExperienceQueue(shards, "rank")
    await leader.insert_prompts([prompt(uid) for uid in UIDS[:4]], 0)
    await do(leader, "generate", rollouts())
    leases = [group.lease for group in await take_all(leader, "reward")]
    assert len({leader.get_shard_index(lease.uid) for lease in leases}) == 2
    await asyncio.sleep(8.0)
    assert await shards[0].shard.renew_leases(leases) is not None
    kept = [lease for lease in leases if leader.get_shard_index(lease.uid) == 0]
    await asyncio.sleep(8.0)
    groups = await rank.read_leased(leases, ("token_ids", "lengths"))
    assert sorted(groups, key=str) == sorted(kept, key=str)
    assert all(set(columns) == {"token_ids", "lengths"} for columns in groups.values())


@in_virtual_time
async def test_a_group_may_lack_token_scores_and_no_other_column():
    queue = queue_of(2)
    await queue.insert_prompts([prompt(uid) for uid in UIDS[:2]], 0)
    await do(queue, "generate", rollouts())
    placed, plain = await take_all(queue, "reward")
    token_scores = {"token_scores": np.arange(10, dtype=np.float32)}
    await queue.commit_columns(
        [(placed.lease, {**SCORES, **token_scores}), (plain.lease, {**SCORES})]
    )
    uids = [placed.lease.uid, plain.lease.uid]
    groups = await queue.read_columns(uids, ["lengths", "scores", "token_scores"])
    assert [*map(len, groups.values())] == [3, 2]
    assert groups[uids[0]]["token_scores"].tolist() == [*range(10)]
    with pytest.raises(StreamError, match=r"no \['ref_logprobs'\] are in the queue"):
        await queue.read_columns(uids, ["scores", "ref_logprobs"])


@in_virtual_time
async def test_settled_leases_are_not_renewed():
    queue = queue_of(2)
    await queue.insert_prompts([prompt(uid) for uid in UIDS[:3]], 0)
    done, failed, filtered = await take_all(queue, "generate")
    await queue.commit_columns([(done.lease, rollouts())])
    await queue.filter_groups([(filtered.lease, FilteredGroup("not worth it"))])
    await queue.fail_groups([(failed.lease, DeadlineError("no"))])
    (redelivered,) = await take_all(queue, "generate")
    await queue.fail_groups([(redelivered.lease, DeadlineError("no"))])
    assert queue.renew_interval_s == float("inf")
    assert await queue.renew_leases() == []


@in_virtual_time
async def test_coordinator_does_not_renew_and_forgets_removed_groups():
    queue = queue_of(1)
    await queue.insert_prompts([prompt("0:0:0")], 0)
    await finish(queue)
    (ready,) = await take_all(queue, "train")
    assert queue.renew_interval_s == float("inf")
    released = weakref.ref(ready.lease)
    del ready
    await queue.remove_groups(["0:0:0"], 1)
    gc.collect()
    assert released() is None


# Pending grants


@in_virtual_time
async def test_grant_that_fails_to_decode_stays_for_the_next_call():
    queue = queue_of(2)
    await queue.insert_prompts([prompt(uid) for uid in UIDS], 0)
    (first,) = await lease(queue, "generate")
    await asyncio.sleep(1.0)  # the other shard has granted a group as well
    with pytest.raises(ContractError, match=r"\['nope'\] do not exist yet"):
        await lease(queue, "generate", columns=("nope",))
    started = asyncio.get_running_loop().time()
    (second,) = await lease(queue, "generate")
    assert asyncio.get_running_loop().time() == started
    assert second.uid != first.uid and second.lease.attempt == 1


@pytest.mark.parametrize("commits", [False, True])
@in_virtual_time
async def test_lease_lost_during_a_lease_call_is_reported_once(commits: bool):
    queue = queue_of(1)
    await queue.insert_prompts([prompt("0:0:0")], 0)
    (group,) = await lease(queue, "generate")
    await asyncio.sleep(30.0)
    (redelivered,) = await lease(queue, "generate")
    if commits:
        assert await queue.commit_columns([(group.lease, rollouts())]) == ["0:0:0"]
    else:
        assert await queue.renew_leases() == [group.lease]
    assert await queue.renew_leases() == []
    assert await queue.commit_columns([(redelivered.lease, rollouts())]) == []


@in_virtual_time
async def test_grants_are_returned_only_after_a_due_renewal():
    shards = local_shards(2)
    queue = ExperienceQueue(shards, "me")
    uids = [next(uid for uid in UIDS if queue.get_shard_index(uid) == i) for i in range(2)]
    await queue.insert_prompts([prompt(uid) for uid in uids], 0)
    (group,) = await lease(queue, "generate")
    await asyncio.sleep(6.0)  # the other shard has answered as well, and a renewal is due
    await queue.insert_prompts([prompt(uid) for uid in UIDS], 0)  # makes the leases durable
    for shard in shards:
        shard.kill()
    started = asyncio.get_running_loop().time()
    assert await lease(queue, "generate") == []
    assert asyncio.get_running_loop().time() == started + 1.0, "a renewal that hangs is left"
    for shard in shards:
        shard.revive()
    (second,) = await lease(queue, "generate", wait_s=10.0)
    assert {group.uid, second.uid} == set(uids)


@pytest.mark.parametrize("version", [None, "0", 1.5, True, -1, np.int64(1)])
@in_virtual_time
async def test_invalid_version_raises_and_changes_nothing(version: object):
    (shard,) = local_shards(1)
    queue = ExperienceQueue([shard], "me")
    await queue.insert_prompts([prompt("0:0:0")], 0)
    before = list(shard.log.records)
    with pytest.raises(ContractError, match="version"):
        await queue.insert_prompts([prompt("0:1:0")], version)  # type: ignore[arg-type]
    with pytest.raises(ContractError, match="version"):
        await queue.remove_groups(["0:0:0"], version)  # type: ignore[arg-type]
    assert shard.log.records == before
    await queue.insert_prompts([prompt("0:1:0")], 1)

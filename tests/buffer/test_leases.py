"""Leases of a shard: expiry, renewal, restarts."""

import asyncio
import gc
import weakref
from collections.abc import Awaitable, Callable

import pytest

from streamrl.buffer import QueueShard, ShardCapacity
from streamrl.buffer.shard import MIN_COMPACT_SIZE, OverdueLease
from streamrl.messages import GroupOutcome
from tests.buffer.shards import SCORES, STAGES, admit, do, make_shard, on_shard, put, rollouts, take
from tests.fake_shards import MemoryLog, recover
from tests.virtual_time import in_virtual_time


def now() -> float:
    return asyncio.get_running_loop().time()


async def expire(shard: QueueShard) -> None:
    await asyncio.sleep(10.1)


async def die(shard: QueueShard) -> None:
    await shard.release_holder("generator-0")


async def requeue_overdue(shard: QueueShard) -> None:
    await asyncio.sleep(9.0)
    (overdue,) = await shard.find_overdue(8.0)
    for _ in range(2):
        await shard.requeue_overdue([overdue])


# Expiry and renewal; lease_s is 10, max_attempts 2


@pytest.mark.parametrize(
    ("lose_lease", "cause", "reason"),
    [
        (expire, "generate_lease_expired", "was silent for 10 s (queue.lease_s)"),
        (die, "generate_died", "died while holding the lease"),
        (requeue_overdue, "generate_stalled", "made no progress for 9 s (pipeline.stall_s)"),
    ],
)
@on_shard()
async def test_group_is_dropped_after_too_many_lost_leases(
    shard: QueueShard, lose_lease: Callable[[QueueShard], Awaitable[None]], cause: str, reason: str
):
    await admit(shard, "a")
    for attempt in (1, 2):
        (group,) = await take(shard, "generate", holder="generator-0")
        assert group.lease.attempt == attempt
        await lose_lease(shard)
        assert await shard.renew_leases([group.lease]) == [group.lease]
    (ended,) = await take(shard, "train")
    assert ended.outcome == GroupOutcome(cause, f"generator-0 {reason}")


@on_shard()
async def test_renewed_lease_is_kept_and_expired_lease_is_lost(shard: QueueShard):
    await admit(shard, *"ab")
    renewed, expired = (
        group.lease for group in await take(shard, "generate", holder="generator-0")
    )
    for _ in range(5):
        await asyncio.sleep(6.0)
        await shard.renew_leases([renewed])
    assert [g.uid for g in await take(shard, "generate", holder="generator-1")] == ["b"]
    assert await shard.renew_leases([renewed, expired]) == [expired]
    assert await put(shard, (renewed, rollouts()), (expired, rollouts())) == ["b"]


@on_shard()
async def test_commit_after_expiry_is_refused_even_without_another_holder(shard: QueueShard):
    await admit(shard, "a")
    (group,) = await take(shard, "generate")
    await asyncio.sleep(10.0)
    assert await put(shard, (group.lease, rollouts())) == ["a"]
    assert len(await take(shard, "generate")) == 1


@on_shard(bounds=ShardCapacity(2 * MIN_COMPACT_SIZE), lease_s=1e6)
async def test_settled_leases_are_compacted_before_expiry(shard: QueueShard):
    uids = [f"0:{i}:0" for i in range(MIN_COMPACT_SIZE + 1)]
    await admit(shard, *uids)
    settled = weakref.ref((await take(shard, "generate", max_groups=1))[0].lease)
    await shard.remove_groups(uids[:1], 0)
    await take(shard, "generate", max_groups=len(uids))
    gc.collect()
    assert settled() is None


@on_shard()
async def test_coordinator_leases_last_until_removal(shard: QueueShard):
    await admit(shard, "a")
    await do(shard, "generate", "reward", "reference")
    (ready,) = await take(shard, "train", holder="coordinator")
    await asyncio.sleep(1000.0)
    assert not await take(shard, "train", holder="coordinator")
    assert await shard.renew_leases([ready.lease]) == []
    assert await shard.find_overdue(1.0) == []
    await shard.remove_groups(["a"], 1)
    assert await shard.renew_leases([ready.lease]) == [ready.lease]


# Dead holders and stalls


@on_shard()
async def test_release_requeues_work_of_a_dead_holder_in_every_stage(shard: QueueShard):
    await admit(shard, *"abc")
    await do(shard, "generate", max_groups=1)
    (scoring,) = await take(shard, "reward", holder="worker-0")
    (sampling,) = await take(shard, "generate", holder="worker-0", max_groups=1)
    (live,) = await take(shard, "generate", holder="worker-1")
    assert await shard.release_holder("worker-0") == 2
    assert await shard.release_holder("worker-0") == 0
    assert [g.uid for g in await take(shard, "reward", holder="worker-2")] == [scoring.uid]
    (redelivered,) = await take(shard, "generate", holder="worker-2")
    assert (redelivered.uid, redelivered.lease.attempt) == (sampling.uid, 2)
    assert await shard.renew_leases([live.lease]) == []
    assert await put(shard, (scoring.lease, SCORES)) == ["a"]


@on_shard()
async def test_pending_request_of_a_dead_holder_gets_nothing(shard: QueueShard):
    await admit(shard, "a")
    await take(shard, "generate", holder="worker-0")
    waiting = asyncio.create_task(take(shard, "generate", holder="worker-0", wait_s=20.0))
    next_request = asyncio.create_task(take(shard, "generate", holder="worker-1", wait_s=20.0))
    await asyncio.sleep(1.0)
    assert await shard.release_holder("worker-0") == 1
    assert [g.uid for g in await next_request] == ["a"]
    assert await waiting == []
    assert now() == pytest.approx(1.0, abs=0.1), "the pending request ends at once"
    await admit(shard, "b")
    assert len(await take(shard, "generate", holder="worker-0")) == 1, (
        "the restarted holder leases again"
    )


@on_shard()
async def test_overdue_work_is_reported_even_if_renewed(shard: QueueShard):
    await admit(shard, *"ab")
    (slow,) = await take(shard, "generate", holder="generator-0", max_groups=1)
    for _ in range(4):
        await asyncio.sleep(6.0)
        await shard.renew_leases([slow.lease])
    await take(shard, "generate", holder="generator-1")
    assert await shard.find_overdue(20.0) == [OverdueLease(slow.lease, 24.0)]
    assert await shard.renew_leases([slow.lease]) == [], "finding overdue work keeps its lease"


# Restarted shards


@in_virtual_time
async def test_lease_tokens_are_unique_even_if_the_open_record_is_damaged():
    log, tokens = MemoryLog(), list[int]()
    for life in range(3):
        shard = make_shard(log=log, book=recover(STAGES, log), session="run")
        await admit(shard, f"{life}")
        (group,) = await take(shard, "generate")
        tokens.append(group.lease.token)
        await log.append([])
        if life == 1:
            (lost,) = (r for r in log.records if r.meta.get("incarnation") == 2)
            log.records.remove(lost)
    assert len(set(tokens)) == 3


@in_virtual_time
async def test_restart_keeps_leases_of_the_same_session_with_full_term():
    log = MemoryLog()
    shard = make_shard(log=log, session="run")
    await admit(shard, *"abc")
    granted = await take(shard, "generate", max_groups=2, request="me/0")
    await asyncio.sleep(9.0)
    await log.append([])
    shard = make_shard(log=log, book=recover(STAGES, log), session="run")
    restart = now()
    assert await shard.find_overdue(5.0) == [], "the lease age restarts"
    assert len(await take(shard, "generate", holder="you")) == 1, "only c is unleased"
    renewed, silent = await take(shard, "generate", max_groups=2, request="me/0")
    assert [g.lease.token for g in (renewed, silent)] == [g.lease.token for g in granted]
    assert renewed.lease.granted_at == pytest.approx(restart)
    await asyncio.sleep(9.0)
    assert await put(shard, (granted[0].lease, rollouts())) == []
    (redelivered,) = await take(shard, "generate", wait_s=60.0)
    assert now() == pytest.approx(restart + 10.0, abs=0.1)
    assert (redelivered.uid, redelivered.lease.attempt) == (silent.uid, 2)

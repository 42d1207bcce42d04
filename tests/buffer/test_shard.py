"""Queue shard: readiness, grants, finished groups, statistics."""

import asyncio
import gc
import inspect
import weakref

import pytest

from streamrl.buffer import DurableShard, QueueShard
from streamrl.errors import DeadlineError, RewardError, StreamError
from streamrl.messages import GroupOutcome
from tests.buffer.shards import (
    REFERENCE,
    SCORES,
    admit,
    do,
    finish,
    on_shard,
    put,
    rollouts,
    take,
)
from tests.fake_shards import MemoryLog

# Readiness


@on_shard()
async def test_scorers_lease_a_group_in_parallel_once_required_columns_exist(shard: QueueShard):
    await admit(shard, "a", version=3)
    assert not await take(shard, "reward")
    (generating,) = await take(shard, "generate")
    assert generating.prompt is not None and generating.admitted_version == 3
    assert generating.prompt.uid == "a"
    assert await put(shard, (generating.lease, rollouts())) == []
    (reward,) = await take(shard, "reward", ("token_ids",))
    assert reward.columns["token_ids"].tolist() == [1, 2, 5, 6, 7] * 2
    (reference,) = await take(shard, "reference")
    await put(shard, (reference.lease, REFERENCE))
    assert not await take(shard, "train")
    await put(shard, (reward.lease, SCORES))
    (training,) = await take(shard, "train")
    assert training.prompt is None, "the train stage gets no prompts"
    assert training.info is not None and training.info.lengths == (5, 5)
    assert training.info.num_loss_tokens == 6


@on_shard()
async def test_earliest_admission_is_granted_first(shard: QueueShard):
    await admit(shard, "c", "a", "b")
    assert [g.uid for g in await take(shard, "generate", max_groups=2)] == ["c", "a"]


@on_shard()
async def test_ready_version_is_the_version_in_training(shard: QueueShard):
    await admit(shard, "a", "b", version=4)
    await finish(shard, max_groups=1)
    await shard.remove_groups([], 5)
    await finish(shard, max_groups=1)
    await shard.remove_groups([], 6)
    assert [g.ready_version for g in await take(shard, "train")] == [4, 5]


# Grants


@on_shard()
async def test_waiting_requests_share_ready_groups(shard: QueueShard):
    waiting = [
        asyncio.create_task(take(shard, "generate", wait_s=60.0, holder=f"generator-{i}"))
        for i in range(3)
    ]
    await asyncio.sleep(1.0)
    await admit(shard, *"abcdefg")
    batches = await asyncio.gather(*waiting)
    assert [len(groups) for groups in batches] == [3, 2, 2]
    expected = ["generator-0", "generator-1"]
    assert [g.lease.holder for groups in batches for g in groups][2:4] == expected


@on_shard()
async def test_retried_request_gets_the_same_leases(shard: QueueShard):
    await admit(shard, *"abc")
    first = await take(shard, "generate", max_groups=2, request="me/0")
    retried = await take(shard, "generate", max_groups=2, request="me/0")
    assert [g.lease for g in retried] == [g.lease for g in first]
    assert retried[0].prompt is not None and retried[0].prompt.uid == "a"
    (next_group,) = await take(shard, "generate", holder="you", request="me/0")
    assert next_group.uid == "c"
    await put(shard, (first[0].lease, rollouts()))
    remaining = await take(shard, "generate", max_groups=2, request="me/0")
    assert [g.lease for g in remaining] == [first[1].lease]
    assert not await take(shard, "generate", max_groups=2, request="me/1")


@on_shard()
async def test_request_retried_while_waiting_is_granted_once(shard: QueueShard):
    lost = asyncio.create_task(take(shard, "generate", wait_s=20.0, request="me/0"))
    await asyncio.sleep(1.0)
    retry = asyncio.create_task(take(shard, "generate", wait_s=20.0, request="me/0"))
    await asyncio.sleep(1.0)
    await admit(shard, "a", "b")
    assert await lost == []
    assert [group.uid for group in await retry] == ["a", "b"]


@on_shard(log=MemoryLog())
async def test_request_retried_while_the_shard_opens_gets_the_same_leases(shard: QueueShard):
    await admit(shard, "a")
    requests = (take(shard, "generate", wait_s=5.0, request="me/0") for _ in range(2))
    first, retried = await asyncio.gather(*requests)
    assert [group.lease for group in first] == [group.lease for group in retried] != []


# Finished groups


@pytest.mark.parametrize(
    ("error", "attempts", "cause"),
    [(DeadlineError("no verdict"), 2, "deadline"), (RewardError("is None"), 1, "reward_error")],
)
@on_shard()
async def test_group_is_dropped_after_max_attempts_or_a_final_failure(
    shard: QueueShard, error: StreamError, attempts: int, cause: str
):
    await admit(shard, "a")
    await do(shard, "generate")
    for _ in range(attempts):
        assert not await take(shard, "train")
        (scoring,) = await take(shard, "reward")
        await shard.fail_groups([(scoring.lease, error)])
    (dropped,) = await take(shard, "train", ("scores",))
    assert dropped.outcome == GroupOutcome(cause, str(error))
    assert not await take(shard, "reference"), "a dropped group is not granted"
    assert (await shard.get_stats()).num_bytes == 0
    await shard.remove_groups(["a"], 0)
    assert (await shard.get_stats()).uids == ()


@on_shard()
async def test_attempts_count_per_stage(shard: QueueShard):
    await admit(shard, "a")
    await do(shard, "generate")
    for stage in ("reward", "reference"):
        (group,) = await take(shard, stage)
        await shard.fail_groups([(group.lease, DeadlineError("no verdict"))])
    await do(shard, "reward", "reference")
    (training,) = await take(shard, "train")
    assert training.outcome is None


# Statistics and reads


@on_shard()
async def test_depth_is_a_time_weighted_mean(shard: QueueShard):
    await admit(shard, *"ab")
    await asyncio.sleep(3.0)
    await take(shard, "generate")
    await asyncio.sleep(1.0)
    figures = await shard.end_step([], 1)
    assert figures.depth["generate"] == pytest.approx(1.5)
    await asyncio.sleep(1.0)
    assert (await shard.end_step([], 2)).depth["generate"] == 0.0


@on_shard()
async def test_stats_cover_the_time_since_the_last_step(shard: QueueShard):
    await admit(shard, *"ab")
    (late, _) = await take(shard, "generate")
    await asyncio.sleep(11.0)
    await put(shard, (late.lease, rollouts()))
    await take(shard, "generate")
    for _ in range(2):
        # An ended group is removed in the middle of the step.
        await shard.remove_groups(["b"], 0)
        figures = await shard.get_stats()
        assert figures.counts == {"redelivered": 2, "refused": 1}
    figures = await shard.end_step([], 1)
    assert figures.counts == {"redelivered": 2, "refused": 1}
    assert (await shard.get_stats()).counts == dict.fromkeys(figures.counts, 0)
    await admit(shard, "c")
    repeated = await shard.end_step([], 1)
    assert (repeated.counts, repeated.depth) == (figures.counts, figures.depth)
    assert repeated.uids == ("a", "c")
    assert (await shard.end_step([], 2)).counts == dict.fromkeys(figures.counts, 0)


@on_shard()
async def test_locate_groups_describes_holders_and_waiting_stages(shard: QueueShard):
    await admit(shard, *"ab")
    await take(shard, "generate", max_groups=1, holder="generator-0")
    await asyncio.sleep(2.0)
    assert await shard.locate_groups(["a", "b", "c"]) == {
        "a": "held by generator-0 for 2.0 s (generate, attempt 1), admitted 2.0 s ago",
        "b": "ready for generate, admitted 2.0 s ago",
    }


@on_shard()
async def test_columns_can_be_read_without_a_lease(shard: QueueShard):
    await admit(shard, *"ab")
    await finish(shard)
    blobs_by_group = await shard.read_columns(["b", "a"], ["scores", "ref_logprobs"])
    assert [len(blobs) for blobs in blobs_by_group] == [2, 2]
    with pytest.raises(StreamError, match=r"group b: no \['loss', 'mask'\] are in the queue"):
        await shard.read_columns(["b"], ["mask", "scores", "loss"])
    await shard.remove_groups(["a"], 1)
    with pytest.raises(StreamError, match="group a is neither in the queue nor in its journal"):
        await shard.read_columns(["a"], ["scores"])


@on_shard()
async def test_remove_groups_is_idempotent_and_versions_only_grow(shard: QueueShard):
    await admit(shard, "a", version=3)
    await finish(shard)
    for version in (5, 4):
        await shard.remove_groups(["a", "unknown"], version)
    assert (await shard.get_stats()).uids == ()
    await admit(shard, "b", version=4)
    await finish(shard)
    (ready,) = await take(shard, "train")
    assert ready.ready_version == 5


@on_shard()
async def test_shard_forgets_removed_groups(shard: QueueShard):
    remaining = []
    for uid in ("a", "b", "c"):
        await admit(shard, uid)
        await finish(shard)
        (group,) = await take(shard, "train")
        remaining.append(weakref.ref(group.lease))
        await shard.remove_groups([uid], 1)
        del group
    await asyncio.sleep(11.0)
    assert not await take(shard, "train")
    gc.collect()
    assert [lease() for lease in remaining] == [None] * 3


def test_every_wait_of_a_shard_method_is_passed_by_name():
    """A remote call adds `wait_s` of its keyword arguments to its deadline."""
    methods = inspect.getmembers(DurableShard, inspect.iscoroutinefunction)
    waits = [inspect.signature(method).parameters.get("wait_s") for _, method in methods]
    found = [wait for wait in waits if wait is not None]
    assert found
    assert {wait.kind for wait in found} == {inspect.Parameter.KEYWORD_ONLY}
    assert {wait.default for wait in found} == {inspect.Parameter.empty}

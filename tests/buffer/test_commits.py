"""Commits to a shard: accepted once, refused without an active lease; saved partial rollouts."""

import asyncio
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from streamrl.buffer import QueueShard
from streamrl.buffer.encoding import count_blob_bytes, decode_columns, encode_columns
from streamrl.buffer.group import ShardState
from streamrl.buffer.shard import LeaseRequest
from streamrl.errors import ContractError, DeadlineError
from streamrl.messages import (
    Columns,
    FilteredGroup,
    FinishReason,
    GroupLease,
    GroupOutcome,
    rollouts_to_columns,
)
from tests.buffer.shards import (
    REFERENCE,
    SCORES,
    WITH_A_GREEDY_ONE,
    admit,
    commit,
    do,
    make_shard,
    on_shard,
    put,
    rollouts,
    take,
)
from tests.fake_shards import MemoryLog
from tests.rollouts import make_rollout
from tests.virtual_time import in_virtual_time

# Commits


@on_shard()
async def test_late_and_duplicate_commits_are_refused(shard: QueueShard):
    await admit(shard, "a")
    (slow,) = await take(shard, "generate")
    await asyncio.sleep(11.0)
    (redelivered,) = await take(shard, "generate")
    assert redelivered.lease.attempt == 2
    assert await put(shard, (slow.lease, rollouts())) == ["a"]
    assert await put(shard, (redelivered.lease, rollouts())) == []
    assert await put(shard, (redelivered.lease, rollouts())) == ["a"], "a duplicate"
    assert (await shard.get_stats()).counts == {"redelivered": 1, "refused": 2}


@on_shard()
async def test_commit_for_a_filtered_group_is_refused_but_not_counted(shard: QueueShard):
    await admit(shard, "a")
    (group,) = await take(shard, "generate")
    await put(shard, (group.lease, rollouts()))
    (reward,), (reference,) = await take(shard, "reward"), await take(shard, "reference")
    for reason in ("all 2 rewards are 1", "again"):
        await shard.filter_groups([(reward.lease, FilteredGroup(reason))])
    (filtered,) = await take(shard, "train")
    assert filtered.outcome == GroupOutcome("filtered", "all 2 rewards are 1", filtered=True)
    assert await put(shard, (reference.lease, REFERENCE)) == ["a"]
    assert (await shard.get_stats()).counts["refused"] == 0


@on_shard()
async def test_commit_for_a_removed_group_is_refused_but_not_counted(shard: QueueShard):
    await admit(shard, "a", "b")
    first, second = await take(shard, "generate")
    await shard.remove_groups(["a"], 1)
    assert await shard.renew_leases([first.lease, second.lease]) == [first.lease]
    assert await put(shard, (first.lease, rollouts()), (second.lease, rollouts())) == ["a"]
    assert (await shard.get_stats()).counts["refused"] == 0


@on_shard()
async def test_wait_for_finished_reports_groups_until_removal(shard: QueueShard):
    clock = asyncio.get_running_loop().time
    await admit(shard, "a", "b")
    assert await shard.wait_for_finished(wait_s=2.0) == []
    assert clock() == pytest.approx(2.0, abs=0.1)
    generated = [(group.lease, rollouts()) for group in await take(shard, "generate")]
    await put(shard, *generated)
    first, _ = await take(shard, "reward")
    waiting = asyncio.create_task(shard.wait_for_finished(wait_s=60.0))
    await asyncio.sleep(1.0)
    await shard.filter_groups([(first.lease, FilteredGroup("not worth it"))])
    began = clock()
    for finished in (await waiting, await shard.wait_for_finished(wait_s=60.0)):
        (finished_group,) = finished
        assert (finished_group.uid, finished_group.outcome.reason) == ("a", "not worth it")
        assert finished_group.info is not None and finished_group.info.num_loss_tokens > 0
    assert clock() == pytest.approx(began, abs=0.1)
    await shard.remove_groups(["a"], 0)
    assert await shard.wait_for_finished(wait_s=1.0) == []


@on_shard()
async def test_find_uids_with_returns_groups_that_got_the_column(shard: QueueShard):
    await admit(shard, "a", "b", "c")
    await put(shard, *((group.lease, rollouts()) for group in await take(shard, "generate")))
    first, second, third = await take(shard, "reward")
    uids, position = await shard.find_uids_with("scores")
    assert uids == []
    await put(shard, (first.lease, SCORES))
    await shard.filter_groups([(second.lease, FilteredGroup("not worth it"))])
    for _ in range(2):  # the call may be repeated
        uids, next_position = await shard.find_uids_with("scores", position)
        assert uids == ["a"]
    assert await shard.find_uids_with("scores", next_position) == ([], next_position)
    await put(shard, (third.lease, SCORES))
    assert (await shard.find_uids_with("scores", next_position))[0] == ["c"]
    assert (await shard.find_uids_with("scores", position))[0] == ["a", "c"], "read before"
    assert (await shard.find_uids_with("scores", next_position))[0] == ["a", "c"], "another reads"
    await shard.remove_groups(["a"], 1)
    assert (await shard.find_uids_with("scores"))[0] == ["c"]


@in_virtual_time
async def test_group_is_not_granted_while_its_commit_is_written():
    shard = make_shard(log=MemoryLog(write_s=30.0))
    await admit(shard, "a", wait_s=100.0)
    (group,) = await take(shard, "generate")
    writing = asyncio.create_task(put(shard, (group.lease, rollouts())))
    await asyncio.sleep(1.0)
    assert not await take(shard, "generate", holder="you", wait_s=15.0)
    assert await shard.renew_leases([group.lease]) == [group.lease]
    assert not await take(shard, "reward"), "columns are granted only once durable"
    assert await writing == []
    scoring, reference = await take(shard, "reward"), await take(shard, "reference")
    writing = asyncio.create_task(put(shard, (scoring[0].lease, SCORES)))
    await asyncio.sleep(1.0)
    await shard.fail_groups([(reference[0].lease, DeadlineError("no"))])
    assert not await take(shard, "reward", holder="you"), "a pending commit still blocks grants"
    assert await writing == []


@in_virtual_time
async def test_commit_is_void_if_its_group_ends_while_it_is_written():
    shard = make_shard(log=MemoryLog(write_s=3.0), max_attempts=1)
    await admit(shard, *"ab", wait_s=10.0)
    await do(shard, "generate")
    references = await take(shard, "reference")
    ending, leaving = await take(shard, "reward")
    removing = asyncio.create_task(shard.remove_groups(["b"], 1))
    writing = asyncio.create_task(put(shard, *((group.lease, REFERENCE) for group in references)))
    await asyncio.sleep(1.0)
    await shard.fail_groups([(ending.lease, DeadlineError("no verdict"))])
    await removing
    await writing
    assert leaving.uid == "b" and (await shard.get_stats()).uids == ("a",)
    (ended,) = await take(shard, "train")
    assert ended.outcome == GroupOutcome("deadline", "no verdict")
    assert (await shard.get_stats()).num_bytes == 0


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({}, "stage reward committed a without \\['scores'\\]"),
        ({"scores": np.ones(3, np.float32)}, r"scores: float32\[3\], wanted float32\[2\]"),
        ({"scores": np.ones(2, np.int64)}, "scores: int64, wanted float32"),
    ],
)
@on_shard()
async def test_commit_with_undeclared_columns_raises(
    shard: QueueShard, columns: Mapping[str, Any], message: str
):
    await admit(shard, "a")
    await do(shard, "generate")
    (scoring,) = await take(shard, "reward")
    with pytest.raises(ValueError, match=message):
        await put(shard, (scoring.lease, columns))


@on_shard()
async def test_invalid_commit_leaves_valid_commits_of_the_call_retryable(shard: QueueShard):
    await admit(shard, *"ab")
    await do(shard, "generate")
    good, bad = await take(shard, "reward")
    with pytest.raises(ValueError, match="committed b without"):
        await put(shard, (good.lease, SCORES), (bad.lease, {}))
    assert await put(shard, (good.lease, SCORES), (bad.lease, SCORES)) == []


@on_shard()
async def test_extra_columns_are_kept(shard: QueueShard):
    await admit(shard, "a")
    await do(shard, "generate")
    (scoring,) = await take(shard, "reward")
    extra_columns = {**SCORES, "reward/exact": np.zeros(2, np.float32)}
    await put(shard, (scoring.lease, extra_columns))
    (blobs,) = await shard.read_columns(["a"], ["reward/exact"])
    assert len(blobs) == 1


@on_shard()
async def test_unknown_stages_and_columns_of_a_request_are_refused(shard: QueueShard):
    with pytest.raises(ContractError, match="unknown stage nope: this queue has generate, reward"):
        await take(shard, "nope")
    with pytest.raises(ContractError, match=r"stage generate requests \['scores'\]: not among"):
        await take(shard, "generate", ("scores",))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (SCORES, r"generate committed \['scores'\] for a: another"),
        ({"loss_mask": np.zeros(10, np.bool_)}, "group a: no token of it was sampled"),
        ({"policy_version": np.full(10, -1, np.int32)}, "a: a sampled token has no policy_version"),
        ({"lengths": np.array([12, -2], np.int32)}, "group a: a rollout of -2 tokens"),
        ({"lengths": np.zeros(0, np.int32)}, "group a: a rollout of 0 tokens"),
        ({"loss_mask": np.ones(9, np.bool_)}, r"policy_version\[10\], loss_mask\[9\]"),
        ({"foo": np.zeros(2, np.float32)}, "column foo: there is no such column"),
        ({7: np.zeros(2, np.float32)}, "column 7: there is no such column"),
    ],
)
@on_shard()
async def test_rollouts_that_violate_the_contract_are_refused(
    shard: QueueShard, columns: Mapping[str, Any], message: str
):
    await admit(shard, "a")
    (group,) = await take(shard, "generate")
    with pytest.raises(ContractError, match=message):
        await put(shard, (group.lease, {**rollouts(), **columns}))
    assert await put(shard, (group.lease, rollouts())) == []


@on_shard(book=ShardState(WITH_A_GREEDY_ONE))
async def test_group_columns_may_be_committed_before_rollouts(shard: QueueShard):
    greedy: Columns = {"greedy_ids": np.array([7, 8], np.int32)}
    baseline: Columns = {"baseline_scores": np.ones(2, np.float32)}
    await admit(shard, "a")
    (greedy_group,) = await take(shard, "greedy")
    with pytest.raises(ContractError, match="before its rollouts"):
        await put(shard, (greedy_group.lease, {**greedy, "reward/a": np.ones(2, np.float32)}))
    assert await put(shard, (greedy_group.lease, greedy)) == []
    assert await take(shard, "baseline", wait_s=0.0) == []
    (sampled,) = await take(shard, "generate")
    with pytest.raises(ContractError, match="stage baseline"):
        await take(shard, "baseline", ("scores",))
    assert await put(shard, (sampled.lease, rollouts())) == []
    (baseline_group,) = await take(shard, "baseline", ("greedy_ids", "lengths"))
    assert baseline_group.columns["greedy_ids"].tolist() == [7, 8]
    assert baseline_group.info is not None
    with pytest.raises(ContractError, match=r"baseline_scores: float32\[3\]"):
        await put(shard, (baseline_group.lease, {"baseline_scores": np.ones(3, np.float32)}))
    assert await put(shard, (baseline_group.lease, baseline)) == []


def make_partials(tokens: int) -> Columns:
    """Return two rollouts with a two-token prompt and `tokens` sampled tokens each."""
    rollout = make_rollout([1, 2], [5] * tokens, finish_reason=FinishReason.ABORT)
    return rollouts_to_columns([rollout, rollout])


async def lease_group(shard: QueueShard, holder: str = "a", stage: str = "generate") -> GroupLease:
    (group,) = await take(shard, stage, holder=holder)
    return group.lease


async def lease_with_partials(
    shard: QueueShard, holder: str, stage: str = "generate"
) -> tuple[GroupLease, int]:
    """Lease again; return the lease and the tokens of each partial rollout."""
    (grant,) = await shard.lease_groups(LeaseRequest(stage, holder, 1), wait_s=0.0)
    lengths = [decode_columns(blob)["lengths"] for blob in grant.partial_rollouts]
    return grant.lease, int(lengths[0][0]) - 2 if lengths else 0


@pytest.mark.parametrize("died", [True, False])
@on_shard()
async def test_next_holder_gets_the_last_partial_rollouts(shard: QueueShard, died: bool):
    await admit(shard, "0:0:0")
    lease = await lease_group(shard)
    for tokens in (1, 3):
        await shard.save_partials([commit(lease, make_partials(tokens))])
    assert await shard.release_holder("a", died=died) == 1
    lease, tokens = await lease_with_partials(shard, "b")
    assert (lease.attempt, tokens) == (1 + died, 3)


@on_shard()
async def test_partial_rollouts_count_as_bytes_until_the_commit(shard: QueueShard):
    await admit(shard, "0:0:0")
    lease = await lease_group(shard)
    assert (await shard.get_stats()).num_bytes == 0
    for tokens in (1, 2):
        await shard.save_partials([commit(lease, make_partials(tokens))])
        assert (await shard.get_stats()).num_bytes == count_blob_bytes(
            encode_columns(make_partials(tokens))
        )
    assert await shard.commit_columns([commit(lease, rollouts())]) == []
    assert (await shard.get_stats()).num_bytes == count_blob_bytes(encode_columns(rollouts()))
    await shard.save_partials([commit(lease, make_partials(2))])
    assert (await shard.get_stats()).num_bytes == count_blob_bytes(encode_columns(rollouts()))


@on_shard()
async def test_partial_rollouts_without_an_active_lease_are_ignored(shard: QueueShard):
    await admit(shard, "0:0:0")
    late = await lease_group(shard)
    await shard.release_holder("a")
    await shard.save_partials([commit(late, make_partials(3))])
    lease, tokens = await lease_with_partials(shard, "b")
    assert tokens == 0
    await shard.save_partials([commit(lease, make_partials(2)), commit(late, make_partials(3))])
    await shard.release_holder("b", died=False)
    assert (await lease_with_partials(shard, "a"))[1] == 2


@on_shard(book=ShardState(WITH_A_GREEDY_ONE))
async def test_partial_rollouts_are_kept_per_stage(shard: QueueShard):
    await admit(shard, "0:0:0")
    lease, greedy_lease = await lease_group(shard), await lease_group(shard, stage="greedy")
    await shard.save_partials([commit(lease, make_partials(3))])
    with pytest.raises(ContractError, match=r"stage greedy committed .* without"):
        await shard.save_partials([commit(greedy_lease, make_partials(3))])
    await shard.release_holder("a")
    assert (await lease_with_partials(shard, "b", "greedy"))[1] == 0
    assert (await lease_with_partials(shard, "b"))[1] == 3


@on_shard()
async def test_a_lease_is_overdue_only_once_its_partial_rollouts_no_longer_grow(shard: QueueShard):
    await admit(shard, "a")
    lease, _ = await lease_with_partials(shard, "a")
    for tokens in (1, 2, 3):
        await asyncio.sleep(7.0)
        await shard.renew_leases([lease])
        await shard.save_partials([commit(lease, make_partials(tokens))])
        assert await shard.find_overdue(5.0) == []
        assert await shard.measure_growth_age() == 0
    await asyncio.sleep(7.0)
    await shard.renew_leases([lease])
    await shard.save_partials([commit(lease, make_partials(3))])
    (overdue,) = await shard.find_overdue(5.0)
    assert overdue.age_s == pytest.approx(7.0)
    await shard.release_holder("a")
    assert await shard.measure_growth_age() == pytest.approx(7.0), "also after the lease has ended"

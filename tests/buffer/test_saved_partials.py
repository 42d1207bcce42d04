"""Saved partial rollouts: the next holder of a group resumes from them."""

import asyncio

import pytest

from streamrl.buffer import QueueShard
from streamrl.buffer.encoding import count_blob_bytes, decode_columns, encode_columns
from streamrl.buffer.group import ShardState
from streamrl.buffer.shard import LeaseRequest
from streamrl.errors import ContractError
from streamrl.messages import Columns, FinishReason, GroupLease, rollouts_to_columns
from tests.buffer.shards import WITH_A_GREEDY_ONE, admit, commit, on_shard, rollouts, take
from tests.rollouts import make_rollout


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

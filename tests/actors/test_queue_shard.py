"""Queue shard in its own process, called through its proxy."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from streamrl.actors import queue_shard
from streamrl.actors.queue_shard import RemoteShard, create_shards
from streamrl.actors.transport.rpc import RpcEndpoint
from streamrl.buffer import (
    ExperienceQueue,
    QueueConfig,
    QueueShard,
    ShardCapacity,
    ShardFiles,
    ShardPlan,
    StageSchema,
)
from streamrl.buffer.encoding import LARGE_BLOB_BYTES
from streamrl.errors import ActorLostError, ContractError
from streamrl.messages import ROLLOUT_COLUMNS, Columns, Prompt
from tests.actors.fakes import make_rollout_columns

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.usefixtures("local_ray")]

STAGES = {"generate": StageSchema((), ROLLOUT_COLUMNS), "train": StageSchema(ROLLOUT_COLUMNS, ())}
SIZES = {"0:0:0": 5, "0:1:0": LARGE_BLOB_BYTES // 13 + 1, "0:2:0": 900}
"""Tokens of each group, 13 bytes each: the second goes through the object store."""

Make = Callable[..., RemoteShard]


class Spy:
    """Actor handle that records the names of called methods."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self.called: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name == "__ray_call__":
            return self.actor.__ray_call__
        self.called.append(name)
        return getattr(self.actor, name)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    actors: list[Any] = []

    def make_shard(*, journal: bool = True, groups: int = 100) -> RemoteShard:
        name = f"shard-{len(actors)}"
        files = ShardFiles(tmp_path / name) if journal else None
        plans = {name: ShardPlan(STAGES, QueueConfig(), ShardCapacity(groups), files=files)}
        (shard,) = create_shards(plans)
        actors.append(shard.actor)
        shard.actor = Spy(shard.actor)
        return shard

    yield make_shard
    for actor in actors:
        ray.kill(actor)


def columns_of(uid: str) -> Columns:
    return make_rollout_columns(SIZES[uid])


def prompts() -> list[Prompt]:
    return [Prompt(uid, np.array([1], np.int32)) for uid in SIZES]


def assert_columns_of(columns: Columns, uid: str) -> None:
    for name, column in columns_of(uid).items():
        assert np.array_equal(columns[name], column), (uid, name)


def kill(shard: RemoteShard) -> None:
    os.kill(ray.get(shard.actor.__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)


@pytest.mark.parametrize("uid", ["0:0:0", "0:1:0"])
async def test_partial_rollouts_go_to_the_next_holder(make: Make, uid: str):
    shard = make()
    first, second = (ExperienceQueue([shard], holder) for holder in ("a", "b"))
    await first.insert_prompts([Prompt(uid, np.array([1], np.int32))], 0)
    (leased,) = await first.lease_groups("generate", max_groups=1, columns=(), wait_s=5.0)
    assert leased.partial_rollouts is None
    await first.save_partials([(leased.lease, columns_of(uid))])
    assert await second.release_holder("a", died=False) == 1
    (resumed,) = await second.lease_groups("generate", max_groups=1, columns=(), wait_s=5.0)
    assert resumed.partial_rollouts is not None and resumed.lease.attempt == 1
    assert_columns_of(resumed.partial_rollouts, uid)


@pytest.mark.parametrize("uid", ["0:0:0", "0:1:0"])
async def test_only_large_columns_take_actor_calls(make: Make, uid: str):
    shard = make()
    queue = ExperienceQueue([shard], "me")
    await queue.insert_prompts([Prompt(uid, np.array([1], np.int32))], 0)
    (leased,) = await queue.lease_groups("generate", max_groups=1, columns=(), wait_s=5.0)
    assert await queue.commit_columns([(leased.lease, columns_of(uid))]) == []
    (ready,) = await queue.lease_groups("train", max_groups=1, columns=ROLLOUT_COLUMNS, wait_s=5.0)
    assert_columns_of(ready.columns, uid)
    assert_columns_of((await queue.read_columns([uid], ROLLOUT_COLUMNS))[uid], uid)
    await queue.remove_groups([uid], 1)
    assert (await queue.get_stats()).uids == ()
    calls = [] if SIZES[uid] * 13 < LARGE_BLOB_BYTES else ["handle_request"] * 3
    assert shard.actor.called == ["get_endpoint", *calls]


async def test_large_columns_lost_with_their_shard_are_requested_again(
    make: Make, monkeypatch: pytest.MonkeyPatch
):
    uid = "0:1:0"
    queue = ExperienceQueue([make()], "me")
    await queue.insert_prompts([Prompt(uid, np.array([1], np.int32))], 0)
    (leased,) = await queue.lease_groups("generate", max_groups=1, columns=(), wait_s=5.0)
    await queue.commit_columns([(leased.lease, columns_of(uid))])
    fetch_objects, errors = queue_shard.fetch_objects, [ActorLostError("the shard died")]

    async def fail_once(*arguments: Any) -> list[Any]:
        if errors:
            raise errors.pop()
        return await fetch_objects(*arguments)

    monkeypatch.setattr(queue_shard, "fetch_objects", fail_once)
    assert_columns_of((await queue.read_columns([uid], ROLLOUT_COLUMNS))[uid], uid)
    assert not errors


async def test_an_error_of_the_shard_is_raised_in_the_caller(make: Make):
    queue = ExperienceQueue([make()], "me")
    await queue.insert_prompts(prompts(), 0)
    (leased,) = await queue.lease_groups("generate", max_groups=1, columns=(), wait_s=5.0)
    with pytest.raises(ContractError, match="token_ids"):
        await queue.commit_columns([(leased.lease, {"scores": np.zeros(2, np.float32)})])
    with pytest.raises(ContractError, match="judge"):
        await queue.lease_groups("judge", max_groups=1, columns=(), wait_s=5.0)


async def test_a_lost_connection_is_reopened_without_losing_groups(make: Make):
    shard = make()
    queue = ExperienceQueue([shard], "me")
    waiting = asyncio.create_task(
        queue.lease_groups("generate", max_groups=3, columns=(), wait_s=20.0)
    )
    await queue.get_stats()
    (await shard._get_connection())._writer.transport.abort()
    await queue.insert_prompts(prompts(), 0)
    leased = await waiting
    await queue.commit_columns([(group.lease, columns_of(group.uid)) for group in leased])
    uids = {group.uid for group in leased}
    while uids != set(SIZES):
        groups = await queue.lease_groups("generate", max_groups=3, columns=(), wait_s=5.0)
        assert groups and not uids & {group.uid for group in groups}
        uids |= {group.uid for group in groups}
    assert shard.actor.called.count("get_endpoint") == 2


async def test_requests_are_retried_until_a_dead_shard_is_back(make: Make):
    shard = make()
    queue = ExperienceQueue([shard], "me")
    await queue.insert_prompts(prompts(), 0)
    waiting = asyncio.create_task(
        queue.lease_groups("train", max_groups=1, columns=(), wait_s=150.0)
    )
    await asyncio.sleep(0.1)
    await asyncio.to_thread(kill, shard)
    leased = await queue.lease_groups("generate", max_groups=3, columns=(), wait_s=90.0)
    assert (
        await queue.commit_columns([(group.lease, columns_of(group.uid)) for group in leased]) == []
    )
    assert (await waiting)[0].uid in SIZES


async def test_a_shard_without_a_journal_is_not_restarted(make: Make):
    shard = make(journal=False)
    await shard.call(QueueShard.get_stats)
    await asyncio.to_thread(kill, shard)
    with pytest.raises(ActorLostError, match=r"shard-0\.get_endpoint: the actor died"):
        await shard.call(QueueShard.get_stats)


async def test_an_unreachable_shard_is_named_with_its_address(
    make: Make, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(queue_shard, "RECONNECT_S", 0.5)
    shard = make()

    async def nowhere(_: Any) -> RpcEndpoint:
        return RpcEndpoint("127.0.0.1", 1, bytes(32))

    replies = type("Method", (), {"remote": staticmethod(lambda: nowhere(None))})
    shard.actor = type("Actor", (), {"get_endpoint": replies})
    with pytest.raises(ActorLostError, match=r"shard-0\.get_stats: 127\.0\.0\.1:1 cannot be"):
        await shard.call(QueueShard.get_stats)


@pytest.mark.slow
async def test_a_long_call_survives_repeated_connection_losses(
    make: Make, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(queue_shard, "RECONNECT_S", 0.5)
    shard = make(groups=1)
    queue = ExperienceQueue([shard], "me")
    admitting = asyncio.create_task(queue.insert_prompts(prompts()[:2], 0))
    for _ in range(2):
        await asyncio.sleep(1.0)
        connection = await shard._get_connection()
        async with asyncio.timeout(30.0):
            while not connection._pending_replies:
                await asyncio.sleep(0.01)
        connection._writer.transport.abort()
    (first,) = (await shard.call(QueueShard.get_stats)).uids
    await queue.remove_groups([first], 1)
    await admitting
    assert {first, *(await shard.call(QueueShard.get_stats)).uids} == {"0:0:0", "0:1:0"}


def test_every_event_loop_and_process_has_its_own_connection(make: Make):
    shard = make()
    with asyncio.Runner() as first_runner, asyncio.Runner() as second_runner:
        first_runner.run(shard.call(QueueShard.admit_entries, [("0:0:0", b"", 0)], wait_s=1.0))
        for runner in (second_runner, first_runner, second_runner):
            assert runner.run(shard.call(QueueShard.get_stats)).uids == ("0:0:0",)
    assert shard.actor.called == ["get_endpoint"] * 2
    assert asyncio.run(shard.call(QueueShard.get_stats)).uids == ("0:0:0",)
    shard.actor = shard.actor.actor

    @ray.remote(num_cpus=0)
    def read_uids(shard: RemoteShard) -> Any:
        return asyncio.run(shard.call(QueueShard.get_stats)).uids

    assert ray.get(read_uids.remote(shard)) == ("0:0:0",)

"""A shard: readiness, leases, commits, bounds."""

import asyncio
import gc
import weakref
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import numpy as np
import pytest

from streamrl.buffer import Ports, QueueConfig, Shard
from streamrl.errors import ConfigError, DeadlineError, RewardError
from streamrl.messages import (
    ROLLOUT_COLUMNS,
    Columns,
    Experience,
    FinishReason,
    Prompt,
    Rollout,
    group_columns,
)
from tests.virtual_clock import run_virtual

STAGES = {
    "generate": Ports((), ROLLOUT_COLUMNS),
    "reward": Ports(ROLLOUT_COLUMNS, ("scores",)),
    "reference": Ports(("token_ids", "lengths"), ("ref_logprobs",)),
    "train": Ports((*ROLLOUT_COLUMNS, "scores", "ref_logprobs"), ()),
}


def on_shard(
    test: Callable[[Shard], Awaitable[None]], *, capacity: int = 8, **settings: Any
) -> None:
    async def main() -> None:
        config = QueueConfig(**{"lease_s": 10.0, "max_attempts": 2, **settings})
        await test(Shard(STAGES, config, capacity_groups=capacity))

    run_virtual(main())


def prompt(uid: str) -> Prompt:
    return Prompt(uid, np.array([1, 2], np.int32))


def rollouts(version: int = 0) -> dict[str, Any]:
    one = Rollout.single_turn(
        np.array([1, 2], np.int32),
        [5, 6, 7],
        logprobs=[-1.0, -2.0, -3.0],
        versions=[version] * 3,
        finish_reason=FinishReason.STOP,
    )
    return group_columns([one, one])


async def take(
    shard: Shard,
    stage: str,
    columns: tuple[str, ...] = (),
    *,
    max_groups: int = 10,
    wait_s: float = 0.0,
    holder: str = "me",
) -> list[Experience]:
    return await shard.take(
        stage, max_groups=max_groups, columns=columns, wait_s=wait_s, holder=holder
    )


SCORES: Columns = {"scores": np.ones(2, np.float32)}
REFERENCE: Columns = {"ref_logprobs": np.zeros(10, np.float32)}


def test_a_stage_sees_a_group_once_its_columns_are_there() -> None:
    async def test(shard: Shard) -> None:
        await shard.admit([(prompt("a"), 3)], wait_s=1.0)
        assert not await take(shard, "reward")
        (generating,) = await take(shard, "generate")
        assert generating.prompt is not None and generating.admitted_version == 3
        assert shard.put([(generating.lease, rollouts())]) == []
        (scoring,) = await take(shard, "reward", ("token_ids",))
        assert scoring.columns["token_ids"].tolist() == [1, 2, 5, 6, 7] * 2
        assert not await take(shard, "train")

    on_shard(test)


def test_scorers_work_on_the_same_group_side_by_side() -> None:
    async def test(shard: Shard) -> None:
        await shard.admit([(prompt("a"), 0)], wait_s=1.0)
        (generating,) = await take(shard, "generate")
        shard.put([(generating.lease, rollouts())])
        (reward,) = await take(shard, "reward")
        (reference,) = await take(shard, "reference")
        shard.put([(reference.lease, REFERENCE)])
        assert not await take(shard, "train")
        shard.put([(reward.lease, SCORES)])
        (training,) = await take(shard, "train")
        assert training.info is not None
        assert training.info.lengths == (5, 5)
        assert training.info.num_loss_tokens == 6
        shard.settle([training.lease])
        assert shard.end_step([], 1).uids == ()

    on_shard(test)


def test_a_leased_group_is_not_handed_out_twice() -> None:
    async def test(shard: Shard) -> None:
        await shard.admit([(prompt("a"), 0)], wait_s=1.0)
        assert len(await take(shard, "generate")) == 1
        assert not await take(shard, "generate")

    on_shard(test)


def test_an_expired_lease_is_redelivered_and_the_late_commit_refused() -> None:
    async def test(shard: Shard) -> None:
        await shard.admit([(prompt("a"), 0)], wait_s=1.0)
        (slow,) = await take(shard, "generate")
        await asyncio.sleep(11.0)
        (again,) = await take(shard, "generate")
        assert again.lease.attempt == 2
        assert shard.put([(slow.lease, rollouts())]) == ["a"]
        assert shard.put([(again.lease, rollouts())]) == []
        assert shard.put([(again.lease, rollouts())]) == ["a"], "a duplicate commit is refused"

    on_shard(test)


def test_whoever_waits_for_work_is_woken_by_an_expired_lease() -> None:
    async def test(shard: Shard) -> None:
        await shard.admit([(prompt("a"), 0)], wait_s=1.0)
        await take(shard, "generate")
        loop = asyncio.get_running_loop()
        assert len(await take(shard, "generate", wait_s=60.0)) == 1
        assert loop.time() == pytest.approx(10.0, abs=0.1)

    on_shard(test)


def test_those_who_wait_share_what_comes() -> None:
    async def test(shard: Shard) -> None:
        waiting = [
            asyncio.create_task(take(shard, "generate", wait_s=60.0, holder=f"generator-{i}"))
            for i in range(3)
        ]
        await asyncio.sleep(1.0)
        await shard.admit([(prompt(uid), 0) for uid in "abcdefg"], wait_s=1.0)
        taken = await asyncio.gather(*waiting)
        assert [len(groups) for groups in taken] == [3, 2, 2]
        assert [g.lease.holder for groups in taken for g in groups][2:4] == [
            "generator-0",
            "generator-1",
        ]

    on_shard(test)


def test_a_group_remembers_the_version_being_trained_when_it_became_ready() -> None:
    async def test(shard: Shard) -> None:
        await shard.admit([(prompt("a"), 4), (prompt("b"), 4)], wait_s=1.0)

        async def finish() -> None:
            (generating,) = await take(shard, "generate", max_groups=1)
            shard.put([(generating.lease, rollouts())])
            for stage, columns in (("reward", SCORES), ("reference", REFERENCE)):
                (work,) = await take(shard, stage)
                shard.put([(work.lease, columns)])

        await finish()
        shard.end_step([], 5)
        await finish()
        shard.end_step([], 6)
        assert [g.ready_version for g in await take(shard, "train")] == [4, 5]

    on_shard(test)


def test_a_group_that_fails_too_often_goes_to_the_coordinator_as_dropped() -> None:
    async def test(shard: Shard) -> None:
        await shard.admit([(prompt("a"), 0)], wait_s=1.0)
        (generating,) = await take(shard, "generate")
        shard.put([(generating.lease, rollouts())])
        for _ in range(2):
            assert not await take(shard, "train")
            (scoring,) = await take(shard, "reward")
            shard.fail([(scoring.lease, RewardError("no verdict"))])
        (dropped,) = await take(shard, "train", ("scores",))
        assert (dropped.dropped, dropped.reason) == ("reward_error", "no verdict")
        assert not await take(shard, "reference"), "nobody works on what is given up"
        shard.settle([dropped.lease])

    on_shard(test)


def test_a_full_shard_blocks_until_a_group_leaves() -> None:
    async def test(shard: Shard) -> None:
        await shard.admit([(prompt("a"), 0)], wait_s=1.0)
        blocked = asyncio.create_task(shard.admit([(prompt("b"), 0)], wait_s=60.0))
        await asyncio.sleep(5.0)
        assert not blocked.done()
        (generating,) = await take(shard, "generate")
        shard.put([(generating.lease, rollouts())])
        for stage, columns in (("reward", SCORES), ("reference", REFERENCE)):
            (work,) = await take(shard, stage)
            shard.put([(work.lease, columns)])
        (training,) = await take(shard, "train")
        shard.settle([training.lease])
        await blocked
        assert shard.end_step([], 1).uids == ("b",)

    on_shard(test, capacity=1)


def test_waiting_for_room_has_a_deadline_that_names_what_is_in_the_way() -> None:
    async def test(shard: Shard) -> None:
        await shard.admit([(prompt("a"), 0)], wait_s=1.0)
        with pytest.raises(DeadlineError, match=r"prompt b waited .* full shard of 1 .*'a'"):
            await shard.admit([(prompt("b"), 0)], wait_s=5.0)

    on_shard(test, capacity=1)


def test_waiting_for_work_ends_at_its_deadline() -> None:
    async def test(shard: Shard) -> None:
        assert await take(shard, "train", wait_s=7.0) == []
        assert asyncio.get_running_loop().time() == pytest.approx(7.0, abs=0.1)

    on_shard(test)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({}, "stage reward put no \\['scores'\\] for a"),
        ({"scores": np.ones(3, np.float32)}, r"scores: float32\[3\], wanted float32\[2\]"),
        ({"scores": np.ones(2, np.float64)}, r"scores: float64\[2\], wanted float32\[2\]"),
    ],
)
def test_columns_that_are_not_as_declared_are_refused(
    columns: Mapping[str, Any], message: str
) -> None:
    async def test(shard: Shard) -> None:
        await shard.admit([(prompt("a"), 0)], wait_s=1.0)
        (generating,) = await take(shard, "generate")
        shard.put([(generating.lease, rollouts())])
        (scoring,) = await take(shard, "reward")
        with pytest.raises(ValueError, match=message):
            shard.put([(scoring.lease, columns)])

    on_shard(test)


def test_depth_is_the_mean_over_time_not_the_moment() -> None:
    async def test(shard: Shard) -> None:
        await shard.admit([(prompt("a"), 0), (prompt("b"), 0)], wait_s=1.0)
        await asyncio.sleep(3.0)
        await take(shard, "generate")
        await asyncio.sleep(1.0)
        assert shard.end_step([], 1).depth["generate"] == pytest.approx(1.5)
        await asyncio.sleep(1.0)
        assert shard.end_step([], 1).depth["generate"] == 0.0

    on_shard(test)


def test_where_a_group_is_can_be_asked() -> None:
    async def test(shard: Shard) -> None:
        await shard.admit([(prompt("a"), 0), (prompt("b"), 0)], wait_s=1.0)
        await take(shard, "generate", max_groups=1, holder="generator-0")
        await asyncio.sleep(2.0)
        assert shard.whereabouts(["a", "b", "c"]) == {
            "a": "held by generator-0 for 2.0 s (generate, attempt 1), admitted 2.0 s ago",
            "b": "ready for generate, admitted 2.0 s ago",
        }

    on_shard(test)


@pytest.mark.parametrize(("key", "value"), [("shards", 0), ("lease_s", 0.0), ("max_attempts", 0)])
def test_impossible_queue_settings_are_refused(key: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"queue\.{key}={value}: must be"):
        QueueConfig(**{key: value})


def test_a_shard_forgets_the_groups_that_have_left() -> None:
    async def test(shard: Shard) -> None:
        left = []
        for uid in ("a", "b", "c"):
            await shard.admit([(prompt(uid), 0)], wait_s=1.0)
            for stage, columns in {"generate": rollouts(), "reward": SCORES}.items():
                (one,) = await take(shard, stage)
                shard.put([(one.lease, columns)])
            (one,) = await take(shard, "reference")
            shard.put([(one.lease, REFERENCE)])
            (one,) = await take(shard, "train")
            left.append(weakref.ref(one.lease))
            shard.settle([one.lease])
            del one
        await asyncio.sleep(11.0)
        assert not await take(shard, "train")
        gc.collect()
        assert [lease() for lease in left] == [None] * 3

    on_shard(test)

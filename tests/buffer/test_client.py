"""The queue over several shards."""

import asyncio

import pytest

from streamrl.buffer import ExperienceQueue, QueueConfig, Shard
from tests.buffer.test_shard import STAGES, prompt, rollouts
from tests.fakes import LocalShard
from tests.virtual_clock import run_virtual


def queue_of(count: int) -> ExperienceQueue:
    config = QueueConfig(shards=count)
    return ExperienceQueue(
        [LocalShard(Shard(STAGES, config, capacity_groups=100)) for _ in range(count)], "me"
    )


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_every_group_is_taken_once_wherever_it_lives(shards: int) -> None:
    async def main() -> None:
        queue = queue_of(shards)
        uids = [f"0:{i}:0" for i in range(20)]
        await queue.admit([prompt(uid) for uid in uids], 0)
        taken: list[str] = []
        while True:
            found = await queue.take("generate", max_groups=3, columns=(), wait_s=1.0)
            if not found:
                break
            assert len(found) <= 3
            taken += [experience.uid for experience in found]
        assert sorted(taken) == sorted(uids)

    run_virtual(main())


def test_a_waiting_take_is_answered_when_a_prompt_arrives_anywhere() -> None:
    async def main() -> None:
        queue = queue_of(3)
        waiting = asyncio.create_task(queue.take("generate", max_groups=4, columns=(), wait_s=60.0))
        await asyncio.sleep(5.0)
        await queue.admit([prompt("0:7:0")], 0)
        (found,) = await waiting
        assert found.uid == "0:7:0"
        assert asyncio.get_running_loop().time() < 6.0

    run_virtual(main())


def test_columns_are_read_back_by_uid() -> None:
    async def main() -> None:
        queue = queue_of(2)
        uids = [f"0:{i}:0" for i in range(6)]
        await queue.admit([prompt(uid) for uid in uids], 0)
        taken = []
        while len(taken) < 6:
            taken += await queue.take("generate", max_groups=6, columns=(), wait_s=1.0)
        assert await queue.put([(e.lease, rollouts(version=3)) for e in taken]) == []
        found = await queue.read(uids, ("policy_version", "lengths"))
        assert set(found) == set(uids)
        assert all(columns["lengths"].tolist() == [5, 5] for columns in found.values())
        stats = await queue.end_step([], 1)
        assert set(stats.uids) == set(uids)
        assert stats.depth["reward"] >= 0

    run_virtual(main())

"""Queue clients under test, over shards in the same process."""

from typing import Any

from streamrl.buffer import ExperienceQueue, QueueConfig, ShardCapacity
from streamrl.messages import Columns, Experience
from tests.buffer.shards import REFERENCE, SCORES, STAGES, rollouts
from tests.fake_shards import LocalShard, MemoryLog

UIDS = [f"0:{i}:0" for i in range(20)]


def local_shards(count: int, *, capacity: int = 100, **settings: Any) -> list[LocalShard]:
    """Make shards; `settings` are fields of QueueConfig."""
    config = QueueConfig(**{"shards": count, "lease_s": 10.0, "max_attempts": 2, **settings})
    return [
        LocalShard(STAGES, config, ShardCapacity(capacity), log=MemoryLog()) for _ in range(count)
    ]


def queue_of(count: int) -> ExperienceQueue:
    return ExperienceQueue(local_shards(count), "me")


async def lease(
    queue: ExperienceQueue,
    stage: str,
    max_groups: int = 1,
    columns: tuple[str, ...] = (),
    wait_s: float = 1.0,
) -> list[Experience]:
    return await queue.lease_groups(stage, max_groups=max_groups, columns=columns, wait_s=wait_s)


async def take_all(
    queue: ExperienceQueue, stage: str, columns: tuple[str, ...] = (), *, max_groups: int = 3
) -> list[Experience]:
    groups: list[Experience] = []
    while batch := await lease(queue, stage, max_groups, columns):
        assert len(batch) <= max_groups
        groups += batch
    return groups


async def do(queue: ExperienceQueue, stage: str, columns: Columns) -> None:
    groups = await take_all(queue, stage)
    assert await queue.commit_columns([(group.lease, columns) for group in groups]) == []


async def finish(queue: ExperienceQueue) -> None:
    await do(queue, "generate", rollouts(version=3))
    await do(queue, "reward", SCORES)
    await do(queue, "reference", REFERENCE)

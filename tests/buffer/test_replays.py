"""Groups that a shard keeps for replays: restarts, snapshots, other numbers of shards, capacity."""

import asyncio
from pathlib import Path

import pytest

from streamrl.buffer import QueueShard, ShardCapacity
from streamrl.buffer.durable_shard import SnapshotBase, recover_state, repartition_shards
from streamrl.buffer.encoding import get_shard_index
from streamrl.errors import DeadlineError, StreamError
from streamrl.messages import make_replay_uid
from tests.buffer.shards import STAGES, admit, commit, finish, on_shard, rollouts, take
from tests.buffer.test_durable_shard import checkpoint, columns, open_durable, plan, restart

SOURCE, REPLAY = "0:7:0", make_replay_uid("0:7:0", 3)


async def train(shard: QueueShard, uid: str, version: int, keep: list[str]) -> None:
    await admit(shard, uid, version=version)
    await finish(shard)
    assert [group.uid for group in await take(shard, "train")] == [uid]
    await shard.end_step([uid], version + 1, keep)


async def replay(shard: QueueShard) -> None:
    """Admit the replay; assert that it is ready for training with its group's columns."""
    await admit(shard, REPLAY, version=2)
    assert await take(shard, "generate") == []
    (group,) = await take(shard, "train")
    assert (group.uid, group.admitted_version, group.ready_version) == (REPLAY, 2, 2)
    assert group.info == commit(group.lease, rollouts()).info


@on_shard()
async def test_a_replay_takes_the_columns_of_a_kept_group(shard: QueueShard):
    await train(shard, SOURCE, 0, [SOURCE])
    await replay(shard)
    await shard.end_step([REPLAY], 3, [])
    with pytest.raises(StreamError, match="neither in the queue nor in its journal"):
        await shard.read_columns([REPLAY], ["scores"])


@on_shard()
async def test_without_its_group_a_replay_is_sampled_anew(shard: QueueShard):
    await train(shard, SOURCE, 0, [])
    await admit(shard, REPLAY)
    (group,) = await take(shard, "generate")
    assert group.uid == REPLAY


@pytest.mark.parametrize("cut", [None, 1, 2])
async def test_kept_groups_and_replays_survive_restarts_and_checkpoints(
    tmp_path: Path, cut: int | None
):
    shard = open_durable(plan(tmp_path))
    await train(shard, SOURCE, 0, [SOURCE])
    await train(shard, "0:8:0", 1, [SOURCE])
    if cut == 1:
        await checkpoint(shard, tmp_path, 1)
    shard = restart(plan(tmp_path))
    assert [*shard._state.kept_groups] == [SOURCE]
    await replay(shard)
    if cut == 2:
        await checkpoint(shard, tmp_path, 2)
    for _ in range(2):
        shard = restart(plan(tmp_path))
        assert [*shard._state.groups] == [REPLAY]
        scores = await columns(shard, REPLAY, "scores")
        assert scores["scores"].tolist() == [1.0, 1.0]
    await shard.end_step([REPLAY], 3, [])
    shard = restart(plan(tmp_path))
    assert not shard._state.kept_groups and not shard._state.kept_bytes
    # The step may be repeated.
    if cut != 2:
        assert (await columns(shard, REPLAY, "scores"))["scores"].tolist() == [1.0, 1.0]
    await shard.close()


async def test_kept_groups_move_with_their_replays_to_other_shards(tmp_path: Path):
    shard = open_durable(plan(tmp_path))
    await train(shard, SOURCE, 0, [SOURCE])
    await admit(shard, REPLAY, version=2)
    await shard.close()
    state, _ = recover_state(STAGES, tmp_path / "journal", SnapshotBase())
    targets = [tmp_path / f"moved-{i}" for i in range(3)]
    repartition_shards([state], targets)
    states = [recover_state(STAGES, target, SnapshotBase())[0] for target in targets]
    owner = states[get_shard_index(SOURCE, 3)]
    assert [[*s.groups, *s.kept_groups] for s in states if s is not owner] == [[], []]
    assert ([*owner.groups], [*owner.kept_groups]) == ([REPLAY], [SOURCE])
    assert owner.groups[REPLAY].column_names == owner.kept_groups[SOURCE].column_names
    assert owner.groups[REPLAY].num_bytes == owner.kept_bytes > 0


@on_shard(bounds=ShardCapacity(8, max_bytes=3000, reserved_group_bytes=1000))
async def test_kept_bytes_count_against_the_capacity(shard: QueueShard):
    await train(shard, SOURCE, 0, [SOURCE])
    shard._state.kept_bytes = 2500
    with pytest.raises(DeadlineError, match="full shard"):
        await admit(shard, "0:8:0", wait_s=1.0)
    waiting = asyncio.ensure_future(admit(shard, "0:8:0", wait_s=100.0))
    await asyncio.sleep(1.0)
    await shard.end_step([], 2, [])
    await asyncio.wait_for(waiting, 5.0)

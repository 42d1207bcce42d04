"""Repartition: accepted groups move to the shard of their uid's hash."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from streamrl.buffer import QueueShard, ShardCapacity
from streamrl.buffer.durable_shard import (
    SnapshotBase,
    recover_state,
    repartition_shards,
    write_snapshot,
)
from streamrl.buffer.encoding import get_shard_index
from streamrl.buffer.group import ShardState, make_finish_record
from streamrl.buffer.journal import Journal, JournalConfig, get_segment_path
from streamrl.messages import GroupOutcome
from tests.buffer import schedules
from tests.buffer.schedules import on_disk
from tests.buffer.shards import STAGES, admit, make_shard, put, rollouts, take

UIDS = [f"0:{i}:0" for i in range(12)]


async def live(journal: Path, base: Path, uids: list[str]) -> SnapshotBase:
    """Run a shard: groups in a snapshot, then a commit, a removal and a finished group."""
    log = Journal(journal, JournalConfig(fsync=False))
    shard: QueueShard = make_shard(log=log, session="run", bounds=ShardCapacity(100))
    for i, uid in enumerate(uids):
        await admit(shard, uid, version=i % 2)
    (first, second, *_) = await take(shard, "generate", max_groups=3)
    await put(shard, (first.lease, rollouts()))
    cut = await log.rotate()
    write_snapshot(STAGES, journal, SnapshotBase(), before=cut, out=base)
    log.discard_before(cut)
    await put(shard, (second.lease, rollouts()))
    await shard.remove_groups([second.uid], 2)
    shard._post_records(
        make_finish_record(uids[-1], GroupOutcome("filtered", "equal", filtered=True))
    )
    await log.close()
    return SnapshotBase(base, cut)


def facts(state: ShardState) -> dict[str, Any]:
    """Return the durable fields of all groups, removed groups included."""
    removed = {
        f"removed {uid}": {stage: on_disk(columns) for stage, columns in stage_columns.items()}
        for uid, stage_columns in state.retired_groups.items()
    }
    groups = schedules.facts(state, on_disk, leases=False)["groups"]
    return removed | {uid: fields for uid, *fields in groups}


@pytest.mark.parametrize(("shards_before", "shards_after"), [(2, 3), (3, 1), (1, 2)])
def test_repartition_moves_every_group_to_the_shard_of_its_hash(
    tmp_path: Path, shards_before: int, shards_after: int
):
    before: dict[str, Any] = {}
    sources = []
    for index in range(shards_before):
        shard_uids = [uid for uid in UIDS if get_shard_index(uid, shards_before) == index]
        journal = tmp_path / f"shard-{index}"
        base = asyncio.run(live(journal, tmp_path / f"queue-{index}", shard_uids))
        sources.append(recover_state(STAGES, journal, base)[0])
        before |= facts(sources[-1])
    targets = [tmp_path / f"shard-{index}.1" for index in range(shards_after)]
    repartition_shards(sources, targets)
    after: dict[str, Any] = {}
    for index, target in enumerate(targets):
        state, corrupt = recover_state(STAGES, target, SnapshotBase())
        assert not corrupt
        assert {
            get_shard_index(uid, shards_after) for uid in (*state.groups, *state.retired_groups)
        } <= {index}
        assert not any(group.leases for group in state.groups.values())
        versions = [
            g.admitted_version
            for g in sorted(state.groups.values(), key=lambda g: g.admission_order)
        ]
        assert versions == sorted(versions), "groups are granted in admission order"
        after |= facts(state)
    assert after == before
    assert any(name.startswith("removed") for name in after)


def test_repartition_leaves_out_damaged_records(tmp_path: Path):
    base = asyncio.run(live(tmp_path / "shard-0", tmp_path / "queue", UIDS))
    path = get_segment_path(tmp_path / "shard-0", base.first_segment)
    data = bytearray(path.read_bytes())
    data[80] ^= 1  # in the first record after the cut: the commit
    path.write_bytes(data)
    expected, corrupt = recover_state(STAGES, tmp_path / "shard-0", base)
    assert len(corrupt) == 1
    repartition_shards([expected], [tmp_path / "a", tmp_path / "b"])
    states = [recover_state(STAGES, tmp_path / name, SnapshotBase())[0] for name in ("a", "b")]
    assert facts(states[0]) | facts(states[1]) == facts(expected)

"""Durable shard: kills, restarts, snapshots, rewinds, damage."""

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from streamrl.buffer import (
    DurableShard,
    QueueConfig,
    ShardCapacity,
    ShardFiles,
    ShardPlan,
    StageSchema,
)
from streamrl.buffer.durable_shard import open_shard
from streamrl.buffer.encoding import Blob, decode_columns, join_pieces
from streamrl.buffer.journal import delete_segments_from, get_segment_path, list_segments
from streamrl.errors import JournalError, StreamError
from streamrl.run_dir.checkpoint import CheckpointState, CheckpointWriter, find_snapshot
from tests.buffer.shards import STAGES, admit, do, finish, put, rollouts, take


def plan(
    run_dir: Path,
    *,
    session: str = "run",
    enabled: bool = True,
    stages: Mapping[str, StageSchema] = STAGES,
) -> ShardPlan:
    files = ShardFiles(run_dir / "journal", lambda: find_snapshot(run_dir, "shard-0"))
    config = QueueConfig(lease_s=100.0, max_attempts=2)
    return ShardPlan(stages, config, ShardCapacity(100), session, files if enabled else None)


def open_durable(plan: ShardPlan, store: Callable[[Blob], Any] = join_pieces) -> DurableShard:
    shard = open_shard(plan, store)
    assert isinstance(shard, DurableShard)
    return shard


def restart(plan: ShardPlan, store: Callable[[Blob], Any] = join_pieces) -> DurableShard:
    """Open the shard as a new process; the one before is killed: only the disk persists."""
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
    return open_durable(plan, store)


async def columns(shard: DurableShard, uid: str, *names: str) -> dict[str, Any]:
    (blobs,) = await shard.read_columns([uid], names)
    return {name: column for blob in blobs for name, column in decode_columns(blob).items()}


async def checkpoint(shard: DurableShard, run_dir: Path, version: int) -> None:
    """Save a checkpoint like the coordinator."""
    cut = await shard.rotate_journal()
    writer = CheckpointWriter(run_dir, version)
    await shard.write_snapshot(cut, writer.queue_dir / "shard-0")
    cuts = {"shard-0": cut}
    state = CheckpointState(version=version, ledger={}, prompts={}, dials={}, cuts=cuts)
    writer.commit(state, keep=2)
    await shard.discard_before(cut)


async def test_store_is_used_before_and_after_a_restart(tmp_path: Path):
    store: dict[int, bytes] = {}

    def keep(blob: Any) -> int:
        store[len(store)] = bytes(blob)
        return len(store) - 1

    shard = restart(plan(tmp_path), keep)
    await admit(shard, "a")
    (group,) = await take(shard, "generate")
    await put(shard, (group.lease, rollouts()))
    assert await shard.read_columns(["a"], ["lengths"]) == [(0,)]

    shard = restart(plan(tmp_path), keep)
    assert await shard.read_columns(["a"], ["lengths"]) == [(1,)]
    assert store[1] == store[0]
    await shard.close()


async def test_checkpoint_replaces_the_journal_before_its_cut(tmp_path: Path):
    shard = restart(plan(tmp_path))
    await admit(shard, "trained", "ready", "fresh")
    await finish(shard, max_groups=1)
    await shard.remove_groups(["trained"], 1)
    await finish(shard, max_groups=1)
    await checkpoint(shard, tmp_path, 1)
    assert list_segments(tmp_path / "journal") == [2]
    await admit(shard, "later", version=1)

    shard = restart(plan(tmp_path))
    assert (await shard.get_stats()).uids == ("ready", "fresh", "later")
    assert (await columns(shard, "ready", "scores"))["scores"].tolist() == [1.0, 1.0]
    with pytest.raises(StreamError, match="neither in the queue nor in its journal"):
        await shard.read_columns(["trained"], ["scores"])
    await shard.remove_groups(["ready"], 2)
    assert (await columns(shard, "ready", "scores"))["scores"].tolist() == [1.0, 1.0]
    await checkpoint(shard, tmp_path, 2)
    with pytest.raises(StreamError, match="neither in the queue nor in its journal"):
        await shard.read_columns(["ready"], ["scores"])
    await shard.close()

    shard = restart(plan(tmp_path))
    assert (await shard.get_stats()).uids == ("fresh", "later")
    await shard.close()


async def test_rewound_run_keeps_its_new_records(tmp_path: Path):
    shard = restart(plan(tmp_path))
    await admit(shard, "a")
    await checkpoint(shard, tmp_path, 1)
    await admit(shard, "abandoned")
    await checkpoint(shard, tmp_path, 2)

    newest = tmp_path / "checkpoints" / "step_000002"
    newest.rename(tmp_path / "removed")
    delete_segments_from(tmp_path / "journal", find_snapshot(tmp_path, "shard-0").first_segment)
    assert list_segments(tmp_path / "journal") == []
    shard = restart(plan(tmp_path))
    assert (await shard.get_stats()).uids == ("a",)
    await admit(shard, "another")

    shard = restart(plan(tmp_path))
    assert (await shard.get_stats()).uids == ("a", "another")
    await shard.close()


def test_segments_are_deleted_from_the_end_so_that_a_crash_leaves_no_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for number in (3, 4, 5, 6):
        get_segment_path(tmp_path, number).touch()
    unlink = Path.unlink

    def dying(path: Path) -> None:
        if path.name == "00000005.journal":
            raise KeyboardInterrupt
        unlink(path)

    monkeypatch.setattr(Path, "unlink", dying)
    with pytest.raises(KeyboardInterrupt):
        delete_segments_from(tmp_path, 4)
    assert list_segments(tmp_path) == [3, 4, 5]
    monkeypatch.undo()
    delete_segments_from(tmp_path, 4)
    assert list_segments(tmp_path) == [3]


def spoil(run_dir: Path, segment: int, text: bytes) -> None:
    """Damage the first record of a segment that contains this text."""
    path = get_segment_path(run_dir / "journal", segment)
    content = path.read_bytes()
    assert text in content
    path.write_bytes(content.replace(text, text[:-1] + b"?", 1))


async def test_next_checkpoint_discards_damaged_records(tmp_path: Path):
    shard = restart(plan(tmp_path))
    await admit(shard, "a", "b")
    await do(shard, "generate", max_groups=1)
    await admit(shard, "c")

    spoil(tmp_path, 1, b"generator_logprobs")
    shard = restart(plan(tmp_path, session="resumed"))
    assert len(shard.corrupt_records) == 1
    await do(shard, "generate", max_groups=1)
    await checkpoint(shard, tmp_path, 1)

    shard = restart(plan(tmp_path, session="resumed again"))
    assert not shard.corrupt_records
    assert [group.uid for group in await take(shard, "reward")] == ["a"]
    assert [group.uid for group in await take(shard, "generate")] == ["b", "c"]
    await shard.close()


async def test_damage_detected_by_a_snapshot_raises(tmp_path: Path):
    shard = restart(plan(tmp_path))
    await admit(shard, "a")
    await do(shard, "generate")
    await admit(shard, "b")
    cut = await shard.rotate_journal()
    spoil(tmp_path, 1, b"generator_logprobs")
    with pytest.raises(JournalError, match="does not match its checksum"):
        await shard.write_snapshot(cut, tmp_path / "out")


async def test_scores_of_lost_rollouts_are_not_attached_to_new_rollouts(tmp_path: Path):
    shard = restart(plan(tmp_path))
    await admit(shard, "a")
    await finish(shard)

    spoil(tmp_path, 1, b"generator_logprobs")
    shard = restart(plan(tmp_path))
    await do(shard, "generate")
    # The shard dies before the new rollouts are scored; the journal has the old scores.

    shard = restart(plan(tmp_path))
    assert not await take(shard, "train")
    await finish(shard)
    await checkpoint(shard, tmp_path, 1)

    shard = restart(plan(tmp_path, session="resumed"))
    assert not shard.corrupt_records
    assert [group.uid for group in await take(shard, "train")] == ["a"]
    await shard.close()


async def test_fenced_process_cannot_write(tmp_path: Path):
    first, second = open_durable(plan(tmp_path)), open_durable(plan(tmp_path))
    await admit(second, "a")
    with pytest.raises(JournalError, match="another process has taken this journal over"):
        await admit(first, "b")
    await second.close()
    reopened = restart(plan(tmp_path))
    assert (await reopened.get_stats()).uids == ("a",)
    await reopened.close()


async def test_shard_without_journal_works_and_writes_no_file(tmp_path: Path):
    shard = open_shard(plan(tmp_path, enabled=False))
    await admit(shard, "a")
    await finish(shard)
    assert (await shard.get_stats()).journal_bytes == 0 and not shard.corrupt_records
    assert list(tmp_path.iterdir()) == []

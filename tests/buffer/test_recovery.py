"""Recovery: a journal restores the shard's state after any failure and from any cut."""

import asyncio
import selectors
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.buffer import QueueShard, ShardCapacity
from streamrl.buffer.durable_shard import (
    SnapshotBase,
    load_columns,
    recover_state,
    write_snapshot,
)
from streamrl.buffer.encoding import decode_columns, join_pieces
from streamrl.buffer.group import ShardState
from streamrl.buffer.journal import (
    CorruptRecord,
    Journal,
    JournalConfig,
    RecordLog,
    get_segment_path,
    list_segments,
    replay_segments,
)
from streamrl.errors import JournalError
from tests import fake_shards
from tests.buffer.schedules import Life, facts, in_memory, moves, on_disk
from tests.buffer.shards import (
    MAX_ATTEMPTS,
    WITH_A_GREEDY_ONE,
    admit,
    do,
    finish,
    make_shard,
    take,
)
from tests.fake_shards import MemoryLog
from tests.virtual_time import in_virtual_time

TIGHT: dict[str, Any] = {"bounds": ShardCapacity(1000)}


# In memory, on a virtual clock: a kill loses records of append_nowait


@given(moves)
@in_virtual_time
async def test_recovery_restores_the_shard_state(schedule: list[tuple[str, int]]):
    log, state = MemoryLog(), ShardState(WITH_A_GREEDY_ONE)
    shard = make_shard(book=state, log=log, session="run", **TIGHT)
    life = Life(shard)
    await life.live(schedule)
    await life.settle()
    await log.append([])
    recovered = fake_shards.recover(WITH_A_GREEDY_ONE, log)
    assert facts(recovered, in_memory) == facts(state, in_memory)
    # Leases survive a restart within a session, not a new session.
    make_shard(book=recovered, session="run", **TIGHT)
    assert facts(recovered, in_memory) == facts(state, in_memory)
    make_shard(book=recovered, session="other", **TIGHT)
    assert not any(group.leases for group in recovered.groups.values())
    assert facts(recovered, in_memory, leases=False) == facts(state, in_memory, leases=False)


@given(st.lists(moves, min_size=1, max_size=3))
@in_virtual_time
async def test_kill_at_any_time_loses_nothing_accepted_and_tokens_stay_unique(
    lives: list[list[tuple[str, int]]],
):
    log, uids, removed = MemoryLog(), list[str](), set[str]()
    tokens: dict[int, tuple[str, str, str]] = {}
    for schedule in lives:
        state = fake_shards.recover(WITH_A_GREEDY_ONE, log)
        life = Life(make_shard(book=state, log=log, session="run", **TIGHT))
        life.uids, life.tokens, life.removed = uids, tokens, removed
        await life.live(schedule)
        # Kill: calls in flight end, and records of append_nowait may be lost.
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        log = log.crash()
        check_accepted_columns(life, fake_shards.recover(WITH_A_GREEDY_ONE, log))


def check_accepted_columns(life: Life, recovered: ShardState) -> None:
    assert life.admitted <= recovered.groups.keys() | life.removed
    for (uid, stage), columns in life.accepted.items():
        group = recovered.groups.get(uid)
        if uid in life.removed or group is None or group.outcome is not None:
            assert uid in life.removed or group is not None
            continue
        recovered_columns = decode_columns(group.stage_columns[stage].data)
        assert all((recovered_columns[name] == column).all() for name, column in columns.items())


# On disk, with a real thread


class ImpatientSelector(selectors.SelectSelector):
    """Selector that waits briefly for the disk, then advances the clock to the next timer."""

    ahead = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(timeout if timeout is None else min(timeout, 0.001))
        if not ready and timeout:
            self.ahead += timeout
        return ready


class JumpingLoop(asyncio.SelectorEventLoop):
    """Event loop in which only threads take real time."""

    def __init__(self) -> None:
        self._impatient = ImpatientSelector()
        super().__init__(self._impatient)

    def time(self) -> float:
        return super().time() + self._impatient.ahead


def journal_of(folder: Path, **config: Any) -> Journal:
    return Journal(folder, JournalConfig(**{"fsync": False, **config}))


@given(moves, moves, moves)
def test_snapshot_and_later_segments_restore_the_shard_state(
    tmp_path_factory: pytest.TempPathFactory,
    before: list[tuple[str, int]],
    between: list[tuple[str, int]],
    after: list[tuple[str, int]],
):
    folder = tmp_path_factory.mktemp("journal")

    async def main() -> None:
        log, state = journal_of(folder), ShardState(WITH_A_GREEDY_ONE)
        life = Life(make_shard(book=state, log=log, session="run", **TIGHT))
        base = SnapshotBase()
        for i, schedule in enumerate((before, between, after)):
            await life.live(schedule)
            if i < 2:
                # Calls are in flight at the cut, and more follow before the snapshot is written.
                cut = await log.rotate()
                await life.live(after[:5])
                write_snapshot(
                    WITH_A_GREEDY_ONE, folder, base, before=cut, out=folder / f"snapshot-{i}"
                )
                base = SnapshotBase(folder / f"snapshot-{i}", cut)
        await life.settle()
        await log.append([])
        expected = facts(state, in_memory)
        for recovered, corrupt in (
            recover_state(WITH_A_GREEDY_ONE, folder, SnapshotBase()),
            recover_state(WITH_A_GREEDY_ONE, folder, base),
        ):
            assert not corrupt
            assert facts(recovered, on_disk) == expected
            load_columns(recovered, join_pieces)
            assert facts(recovered, in_memory) == expected
            assert not life.tokens or (recovered.session, recovered.incarnation) == ("run", 1)
        await log.close()

    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        runner.run(main())


async def populate_shard(journal: RecordLog) -> QueueShard:
    """Make a shard with a group in every state, named by its uid."""
    shard = make_shard(log=journal, session="run", lease_s=1000.0)
    await admit(shard, "trained", version=3)
    await finish(shard)
    await shard.remove_groups(["trained"], 4)
    await admit(shard, "ended", version=4)
    for _ in range(MAX_ATTEMPTS):
        (experience,) = await take(shard, "generate")
        await shard.release_holder("me")
    await admit(shard, "whole", version=4)
    await finish(shard)
    assert {experience.uid for experience in await take(shard, "train")} == {"ended", "whole"}
    await admit(shard, "scored", version=4)
    await do(shard, "generate", "reward")
    await admit(shard, "leased", version=4)
    (experience,) = await take(shard, "generate", holder="generator-0", request="generator-0/7")
    assert experience.uid == "leased"
    await admit(shard, "fresh", version=4)
    return shard


async def write_populated_journal(folder: Path) -> None:
    journal = journal_of(folder)
    await populate_shard(journal)
    await journal.close()


def recover(folder: Path) -> ShardState:
    """Recover from a journal without snapshot; damage is reported by `damage`."""
    return recover_state(WITH_A_GREEDY_ONE, folder, SnapshotBase())[0]


async def test_trained_group_is_readable_if_removed_after_the_restart(tmp_path: Path):
    await write_populated_journal(tmp_path)
    state = recover(tmp_path)
    load_columns(state, join_pieces)
    shard = make_shard(book=state, session="next")
    # The coordinator died after it logged the step, before it removed the group.
    await shard.remove_groups(["whole"], 5)
    (blobs,) = await shard.read_columns(["whole"], ["scores", "ref_logprobs"])
    assert [list(decode_columns(blob)) for blob in blobs] == [["scores"], ["ref_logprobs"]]
    assert all(
        stage_columns.data is None for stage_columns in state.retired_groups["whole"].values()
    ), "the memory of the columns is freed"
    await admit(shard, "new", version=5)
    await finish(shard)
    await shard.remove_groups(["new"], 6)
    assert "new" not in state.retired_groups, "only recovered groups are retired"


async def test_truncated_snapshot_raises(tmp_path: Path):
    await write_populated_journal(tmp_path)
    end = list_segments(tmp_path)[-1] + 1
    write_snapshot(WITH_A_GREEDY_ONE, tmp_path, SnapshotBase(), before=end, out=tmp_path / "out")
    file = get_segment_path(tmp_path / "out", 0)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(JournalError, match="out: the snapshot is truncated"):
        recover_state(WITH_A_GREEDY_ONE, tmp_path, SnapshotBase(tmp_path / "out", end))


async def test_journal_without_its_first_segments_raises(tmp_path: Path):
    log = journal_of(tmp_path)
    shard = make_shard(log=log)
    await admit(shard, "a")
    await log.rotate()
    await admit(shard, "b")
    await log.close()
    get_segment_path(tmp_path, 1).unlink()
    with pytest.raises(JournalError, match="segments 1 to 1 are missing"):
        recover_state(WITH_A_GREEDY_ONE, tmp_path, SnapshotBase())


# Damaged journals


def damage(folder: Path, kind: str, uid: str, **facts: Any) -> CorruptRecord:
    """Flip a byte in the only record of a kind and uid; return the report of recovery."""

    def matches(record: Any) -> bool:
        meta = record.meta
        return meta["kind"] == kind and meta["uid"] == uid and facts.items() <= meta.items()

    items = [item for item in replay_segments(folder) if not isinstance(item, CorruptRecord)]
    (position,) = (position for position, record in items if matches(record))
    path = get_segment_path(folder, position.segment)
    content = bytearray(path.read_bytes())
    content[position.offset + position.size - 1] ^= 0x01
    path.write_bytes(content)
    _, (report,) = recover_state(WITH_A_GREEDY_ONE, folder, SnapshotBase())
    assert report.position == position
    return report


async def test_damaged_record_is_reported_and_other_groups_recover(tmp_path: Path):
    await write_populated_journal(tmp_path)
    intact_state = recover(tmp_path)
    report = damage(tmp_path, "put", "scored", stage="reward")
    assert report.file == get_segment_path(tmp_path, 1)
    assert report.reason == "the record does not match its checksum"
    state = recover(tmp_path)
    scored = state.groups.pop("scored")
    assert scored.stage_columns.keys() == {"generate"}, "the group is scored again"
    del intact_state.groups["scored"]
    assert facts(state, on_disk) == facts(intact_state, on_disk)


async def test_lease_on_lost_columns_is_void(tmp_path: Path):
    journal = journal_of(tmp_path)
    shard = await populate_shard(journal)
    (active,) = await take(shard, "reference")
    await journal.close()
    damage(tmp_path, "put", active.uid, stage="generate")
    state = recover(tmp_path)
    group = state.groups[active.uid]
    assert not group.leases and not group.stage_columns and group.info is None
    shard = make_shard(book=state, session="run")
    assert await shard.renew_leases([active.lease]) == [active.lease]


async def test_group_with_a_lost_admission_is_absent(tmp_path: Path):
    await write_populated_journal(tmp_path)
    damage(tmp_path, "admit", "whole")
    state = recover(tmp_path)
    assert list(state.groups) == ["ended", "scored", "leased", "fresh"]

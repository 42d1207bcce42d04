"""Queue shard on disk: recovery from its journal, snapshots, and another number of shards.

    state of a shard = base (the snapshot in a checkpoint) + journal segments from the base's cut on

A cut is the number of a segment: a snapshot covers all lower segments. A new snapshot is the same
computation up to a later cut. Writing a snapshot reads files only, so it can run beside the live
shard.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from streamrl.buffer.config import QueueConfig, ShardCapacity, StageSchema
from streamrl.buffer.encoding import Blob, get_shard_index, join_pieces
from streamrl.buffer.group import (
    GroupState,
    RecordLocation,
    ShardState,
    StageColumns,
    make_admit_record,
    make_commit_record,
    make_finish_record,
    make_lease_record,
    make_nack_record,
    make_open_record,
    make_remove_record,
    make_seal_record,
    read_blob,
)
from streamrl.buffer.journal import (
    CorruptRecord,
    Journal,
    JournalRecord,
    check_first_segment,
    get_segment_path,
    replay_segments,
    write_segment,
)
from streamrl.buffer.shard import QueueShard
from streamrl.errors import JournalError
from streamrl.files.atomic_write import wrap_checkpoint_errors
from streamrl.files.file_proofs import FileProof, list_files, prove_files
from streamrl.messages import GroupInfo, GroupLease

SNAPSHOT_FILE = "00000000.journal"


@dataclass(frozen=True)
class SnapshotBase:
    """Start of a shard's replay: snapshot folder (None: none), first journal segment after it."""

    folder: Path | None = None
    first_segment: int = 0


def recover_state(
    stages: Mapping[str, StageSchema],
    journal: Path | None,
    base: SnapshotBase,
    *,
    before: int | None = None,
) -> tuple[ShardState, list[CorruptRecord]]:
    """Rebuild a shard's state from its snapshot and journal; return it with the damaged records.

    before: replay only journal segments with lower numbers. Loads no column data; see
    `load_columns`. Raises JournalError if a file is missing or the snapshot is truncated.
    """
    state, corrupt = ShardState(stages), []
    sources: list[tuple[Path, int, int | None]]
    sources = [(base.folder, 0, None)] if base.folder is not None else []
    if journal is not None:
        check_first_segment(journal, base.first_segment)
        sources.append((journal, base.first_segment, before))
    for folder, first, end in sources:
        for item in replay_segments(folder, first=first, before=end):
            if isinstance(item, CorruptRecord):
                corrupt.append(item)
            else:
                position, record = item
                try:
                    state.apply_record(record, location=RecordLocation(folder, position))
                except (LookupError, TypeError, ValueError, AttributeError) as error:
                    where = f"{get_segment_path(folder, position.segment)}, byte {position.offset}"
                    raise JournalError(f"{where}: not a record of a shard: {error!r}") from error
        if folder == base.folder and not state.is_sealed and not corrupt:
            raise JournalError(f"{folder}: the snapshot is truncated: it has no final record")
    state.is_damaged = bool(corrupt)
    if state.is_damaged:
        state.forget_incomplete()
        # After a repartition, groups of several shards follow each other; merge them by version.
    state.order_by_version()
    return state, corrupt


def load_columns(state: ShardState, store: Callable[[Blob], Any]) -> None:
    """Read the columns of all recovered groups from disk and put their blobs into `store`."""
    for group in (*state.kept_groups.values(), *state.groups.values()):
        for columns in group.stage_columns.values():
            if columns.data is None:  # a replay shares the columns of its group
                columns.data = store(read_blob(columns))


def write_snapshot(
    stages: Mapping[str, StageSchema],
    journal: Path,
    base: SnapshotBase,
    *,
    before: int,
    out: Path,
    known_corrupt: Sequence[CorruptRecord] = (),
) -> None:
    """Write a snapshot of a shard to the folder `out`, which `recover_state` accepts as a base.

    before: the snapshot covers all journal segments with lower numbers.
    known_corrupt: damaged records that the shard was opened without.

    A further damaged record raises JournalError, because the live shard may still have the content.
    Raises NoSpaceError if the disk is full.
    """
    state, corrupt = recover_state(stages, journal, base, before=before)
    for record in corrupt:
        if record not in known_corrupt:
            raise JournalError(f"{record.file}, byte {record.position.offset}: {record.reason}")
    with wrap_checkpoint_errors(out):
        out.mkdir(parents=True, exist_ok=True)
        write_segment(out / SNAPSHOT_FILE, _list_state_records(state))


def _list_state_records(state: ShardState) -> Iterator[JournalRecord]:
    """Yield the journal records that reproduce the state of a shard when applied in order."""
    yield make_open_record(state.session, state.incarnation)
    yield make_remove_record([], state.version)
    for group in sorted(state.groups.values(), key=lambda group: group.admission_order):
        yield from _list_group_records(group)
    yield from _list_kept_records([*state.kept_groups.values()], state.version)
    yield make_seal_record()


def _list_kept_records(groups: Sequence[GroupState], version: int) -> Iterator[JournalRecord]:
    """Yield the journal records of groups that are kept for replays.

    They follow those of the groups in the shard: a replay has columns of its own there.
    """
    for group in groups:
        group.leases.clear()
        yield from _list_group_records(group)
    uids = [group.uid for group in groups]
    yield make_remove_record(uids, version, uids)


def _list_group_records(group: GroupState) -> Iterator[JournalRecord]:
    """Yield the journal records that reproduce a group.

    These are its admission, commits, failed attempts, leases and, if it was filtered or dropped,
    its end.
    """
    yield make_admit_record(group.uid, group.prompt, group.admitted_version)
    version = group.admitted_version if group.ready_version is None else group.ready_version
    yield from _list_commit_records(
        group.uid, group.stage_columns, info=group.info, version=version
    )
    for stage, count in group.failures.items():
        for _ in range(count):
            yield make_nack_record(GroupLease(0, group.uid, stage, 0, 0.0), failed=True)
    if group.outcome is not None:
        yield make_finish_record(group.uid, group.outcome)
    for stage, active in group.leases.items():
        lease = active.lease
        grants = [(group.uid, lease.token, lease.attempt)]
        yield make_lease_record(stage, lease.holder, request=active.request_id, grants=grants)


def _list_commit_records(
    uid: str, stage_columns: Mapping[str, StageColumns], *, info: GroupInfo | None, version: int
) -> Iterator[JournalRecord]:
    for stage, columns in stage_columns.items():
        blob, names = read_blob(columns), columns.column_names
        yield make_commit_record(uid, stage, blob, names=names, info=info, version=version)


@dataclass(frozen=True)
class ShardFiles:
    """Files of a queue shard: its journal folder, and a function that finds its newest snapshot."""

    journal_dir: Path
    find_snapshot: Callable[[], SnapshotBase] = SnapshotBase


@dataclass(frozen=True)
class ShardPlan:
    """Parameters from which a process builds a queue shard; no durability without `files`."""

    stages: Mapping[str, StageSchema]
    config: QueueConfig
    capacity: ShardCapacity
    session: str = ""
    files: ShardFiles | None = None


def open_shard(plan: ShardPlan, store: Callable[[Blob], Any] = join_pieces) -> QueueShard:
    """Build the shard of a plan, on a running event loop; recover it if the plan has files."""
    if plan.files is not None:
        return DurableShard(plan, plan.files, store)
    return QueueShard(
        ShardState(plan.stages),
        plan.config,
        capacity=plan.capacity,
        session=plan.session,
        store=store,
    )


class DurableShard(QueueShard):
    """Queue shard with a journal, from which it recovers when it opens.

    store: puts a blob of columns into the object store and returns its reference.
    """

    def __init__(
        self, plan: ShardPlan, files: ShardFiles, store: Callable[[Blob], Any] = join_pieces
    ) -> None:
        self._plan = plan
        self._files = files
        base = files.find_snapshot()
        state, self.corrupt_records = recover_state(plan.stages, files.journal_dir, base)
        load_columns(state, store)
        # A lower segment would lie before the snapshot's cut and would never be replayed.
        first = max(base.first_segment, 1)
        self._journal = Journal(files.journal_dir, plan.config.journal, first=first)
        super().__init__(
            state,
            plan.config,
            capacity=plan.capacity,
            session=plan.session,
            log=self._journal,
            store=store,
        )

    async def rotate_journal(self) -> int:
        """Start a new journal segment; return its number, the cut of the next snapshot."""
        return await self._journal.rotate()

    async def write_snapshot(self, cut: int, out: Path) -> dict[Path, FileProof]:
        """Write a snapshot of the journal segments below `cut` to the folder `out`, in a thread.

        Returns the proofs of its files.
        """
        write = partial(
            write_snapshot, self._plan.stages, self._files.journal_dir, self._files.find_snapshot()
        )
        await asyncio.to_thread(write, before=cut, out=out, known_corrupt=self.corrupt_records)
        return await asyncio.to_thread(prove_files, list_files(out))

    async def discard_before(self, cut: int) -> None:
        """Delete the journal segments below `cut`.

        A durable checkpoint must have the shard's snapshot of these segments.
        """
        self._journal.discard_before(cut)
        # No training step needs the columns of removed groups for a replay now.
        self._state.retired_groups.clear()

    async def close(self) -> None:
        await self._journal.close()


METHOD_TIMEOUTS_S: Mapping[Callable[..., Any], float] = {DurableShard.write_snapshot: 600.0}
"""Deadlines of the shard methods that may run longer than other calls, seconds."""


def repartition_shards(states: Sequence[ShardState], targets: Sequence[Path]) -> None:
    """Distribute the groups of old shards over the journals of new shards.

    states: of the old shards, recovered from their files.
    targets: journal folder of each new shard; must not exist.

    Raises JournalError for unreadable files, and OSError.
    """
    for shard, target in enumerate(targets):
        target.mkdir(parents=True)
        records = _list_owned_records(states, shard=shard, count=len(targets))
        write_segment(get_segment_path(target, 1), records)


def _list_owned_records(
    states: Sequence[ShardState], *, shard: int, count: int
) -> Iterator[JournalRecord]:
    """Yield the journal records of a new shard, which owns some of the groups of old shards."""
    # The largest incarnation, so that no lease token is drawn again.
    yield make_open_record("", max(state.incarnation for state in states))
    for state in states:
        # Columns of trained groups, whose training step may be repeated; their prompts are gone.
        for uid, stage_columns in state.retired_groups.items():
            if get_shard_index(uid, count) == shard:
                yield make_admit_record(uid, b"", 0)
                yield from _list_commit_records(uid, stage_columns, info=None, version=0)
                yield make_remove_record([uid], 0)
        for group in state.groups.values():
            if get_shard_index(group.uid, count) == shard:
                group.leases.clear()  # void in a resumed run
                yield from _list_group_records(group)
    version = max(state.version for state in states)
    kept = [group for state in states for group in state.kept_groups.values()]
    yield from _list_kept_records(
        [group for group in kept if get_shard_index(group.uid, count) == shard], version
    )

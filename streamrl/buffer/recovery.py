"""Recover a shard's groups from its journal, and write snapshots of them.

state of a shard = base (the snapshot in a checkpoint) + journal segments from the base's cut on

A cut is the number of a segment: a snapshot covers all lower segments. A new snapshot is the same
computation up to a later cut. Writing a snapshot reads files only, so it can run beside the live
shard.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamrl.buffer.config import StageSchema
from streamrl.buffer.encoding.column_codec import Blob
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
)
from streamrl.buffer.log.segment_file import (
    CorruptRecord,
    JournalRecord,
    check_first_segment,
    get_segment_path,
    read_record,
    replay_segments,
    write_segment,
)
from streamrl.errors import JournalError
from streamrl.files.atomic_write import wrap_checkpoint_errors
from streamrl.messages import GroupLease


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
    state.should_keep_retired = True
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
    state.should_keep_retired = False
    state.is_damaged = bool(corrupt)
    if state.is_damaged:
        state.forget_incomplete()
        # After a repartition, groups of several shards follow each other; merge them by version.
    state.order_by_version()
    return state, corrupt


def load_columns(state: ShardState, store: Callable[[Blob], Any]) -> None:
    """Read the columns of all recovered groups from disk and put their blobs into `store`."""
    for group in state.groups.values():
        for columns in group.stage_columns.values():
            columns.data = store(read_blob(columns))


def read_blob(columns: StageColumns) -> Blob:
    assert columns.location is not None, "only recovered columns are on disk"
    return read_record(columns.location.folder, columns.location.position).payload


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


SNAPSHOT_FILE = "00000000.journal"


def _list_state_records(state: ShardState) -> Iterator[JournalRecord]:
    """Yield the journal records that reproduce the state of a shard when applied in order."""
    yield make_open_record(state.session, state.incarnation)
    yield make_remove_record([], state.version)
    for group in sorted(state.groups.values(), key=lambda group: group.admission_order):
        yield make_admit_record(group.uid, group.prompt, group.admitted_version)
        yield from _list_group_records(group)
    yield make_seal_record()


def _list_group_records(group: GroupState) -> Iterator[JournalRecord]:
    """Yield the journal records that reproduce a group after its admission.

    These are its commits, failed attempts, leases and, if it was filtered or dropped, its end.
    """
    for stage, columns in group.stage_columns.items():
        assert group.info is not None
        lease = GroupLease(0, group.uid, stage, 0, 0.0)
        version = group.admitted_version if group.ready_version is None else group.ready_version
        yield make_commit_record(
            lease, read_blob(columns), names=columns.column_names, info=group.info, version=version
        )
    for stage, count in group.failures.items():
        for _ in range(count):
            yield make_nack_record(GroupLease(0, group.uid, stage, 0, 0.0), failed=True)
    if group.outcome is not None:
        yield make_finish_record(group.uid, group.outcome)
    for stage, leases in group.leases.items():
        for active in leases:
            lease = active.lease
            grants = [(group.uid, lease.token, lease.attempt)]
            yield make_lease_record(stage, lease.holder, request=active.request_id, grants=grants)

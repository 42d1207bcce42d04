"""What a journal says: the groups of a shard as they were, and a snapshot of them.

A shard's state is what its base holds (the snapshot in a checkpoint) followed by the segments of
its journal from the base's cut on. A snapshot is the same computed up to a later cut, so it is made
from files alone, beside the running shard.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamrl.buffer.codec import Blob
from streamrl.buffer.config import StageSchema
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
    read_record,
    replay_segments,
    segment_path,
    write_segment,
)
from streamrl.errors import JournalError
from streamrl.files.atomic_write import wrap_checkpoint_errors
from streamrl.messages import GroupLease


@dataclass(frozen=True)
class SnapshotBase:
    """What a journal continues: the folder of a snapshot, and the first segment behind it."""

    folder: Path | None = None
    first_segment: int = 0


def recover_state(
    stages: Mapping[str, StageSchema],
    journal: Path | None,
    base: SnapshotBase,
    *,
    before: int | None = None,
) -> tuple[ShardState, list[CorruptRecord]]:
    """The groups as the files have them, and the records that could not be read.

    Without a `journal` they are those of the base; `before` is the cut up to which it is read. No
    payload is loaded: see `load`. Raises JournalError if a file is missing or the snapshot is not
    whole.
    """
    book, corrupt = ShardState(stages), []
    book.should_keep_retired = True
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
                    book.apply_record(record, spot=RecordLocation(folder, position))
                except (LookupError, TypeError, ValueError, AttributeError) as error:
                    place = f"{segment_path(folder, position.segment)}, byte {position.offset}"
                    raise JournalError(f"{place}: not a record of a shard: {error!r}") from error
        if folder == base.folder and not book.is_sealed and not corrupt:
            raise JournalError(f"{folder}: the snapshot has lost its end")
    book.should_keep_retired = False
    book.is_damaged = bool(corrupt)
    if book.is_damaged:
        book.forget_incomplete()
    # Groups of several shards may have been dealt to this one, those of each in turn.
    book.order_by_version()
    return book, corrupt


def load_columns(book: ShardState, store: Callable[[Blob], Any]) -> None:
    """Bring the columns of the groups in the queue back into the store."""
    for group in book.groups.values():
        for part in group.stage_columns.values():
            part.data = store(read_blob(part))


def read_blob(part: StageColumns) -> Blob:
    """The blob of a part, from the disk. Raises JournalError if it cannot be read."""
    assert part.location is not None, "only what was recovered is on the disk"
    return read_record(part.location.folder, part.location.position).payload


def write_snapshot(
    stages: Mapping[str, StageSchema],
    journal: Path,
    base: SnapshotBase,
    *,
    before: int,
    out: Path,
    known: Sequence[CorruptRecord] = (),
) -> None:
    """Write the groups as they were at a cut into a folder that `recover_state` takes as a base.

    `known` are the damaged records without which the shard was opened. Raises JournalError for any
    other: the shard may still have what the disk has lost. NoSpaceError if there is no room.
    """
    book, corrupt = recover_state(stages, journal, base, before=before)
    for bad in corrupt:
        if bad not in known:
            raise JournalError(f"{bad.file}, byte {bad.position.offset}: {bad.reason}")
    with wrap_checkpoint_errors(out):
        out.mkdir(parents=True, exist_ok=True)
        write_segment(out / SNAPSHOT_FILE, _state_records(book))


SNAPSHOT_FILE = "00000000.journal"


def _state_records(book: ShardState) -> Iterator[JournalRecord]:
    """The transitions that lead to a book's state."""
    yield make_open_record(book.session, book.incarnation)
    yield make_remove_record([], book.version)
    for group in sorted(book.groups.values(), key=lambda group: group.admission_order):
        yield make_admit_record(group.uid, group.prompt, group.admitted_version)
        yield from _group_records(group)
    yield make_seal_record()


def _group_records(group: GroupState) -> Iterator[JournalRecord]:
    for stage, part in group.stage_columns.items():
        assert group.info is not None
        lease = GroupLease(0, group.uid, stage, 0, 0.0)
        version = group.admitted_version if group.ready_version is None else group.ready_version
        yield make_commit_record(
            lease, read_blob(part), names=part.column_names, info=group.info, version=version
        )
    for stage, count in group.failures.items():
        for _ in range(count):
            yield make_nack_record(GroupLease(0, group.uid, stage, 0, 0.0), failed=True)
    if group.outcome is not None:
        yield make_finish_record(group.uid, group.outcome)
    for stage, leases in group.leases.items():
        for held in leases:
            lease = held.lease
            grants = [(group.uid, lease.token, lease.attempt)]
            yield make_lease_record(stage, lease.holder, request=held.request_id, grants=grants)

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
from streamrl.buffer.config import Ports
from streamrl.buffer.group import (
    Group,
    GroupBook,
    Part,
    Spot,
    admitted,
    committed,
    ended,
    given_back,
    leased,
    left,
    opened,
    sealed,
)
from streamrl.buffer.log.segment_file import (
    Corrupt,
    Record,
    check_begins_at,
    read_record,
    replay,
    segment_path,
    write_segment,
)
from streamrl.errors import JournalError
from streamrl.files.atomic_write import checkpoint_errors
from streamrl.messages import Lease


@dataclass(frozen=True)
class Base:
    """What a journal continues: the folder of a snapshot, and the first segment behind it."""

    folder: Path | None = None
    first: int = 0


def recover(
    stages: Mapping[str, Ports], journal: Path | None, base: Base, *, before: int | None = None
) -> tuple[GroupBook, list[Corrupt]]:
    """The groups as the files have them, and the records that could not be read.

    Without a `journal` they are those of the base; `before` is the cut up to which it is read. No
    payload is loaded: see `load`. Raises JournalError if a file is missing or the snapshot is not
    whole.
    """
    book, corrupt = GroupBook(stages), []
    book.keeps_retired = True
    sources: list[tuple[Path, int, int | None]]
    sources = [(base.folder, 0, None)] if base.folder is not None else []
    if journal is not None:
        check_begins_at(journal, base.first)
        sources.append((journal, base.first, before))
    for folder, first, end in sources:
        for item in replay(folder, first=first, before=end):
            if isinstance(item, Corrupt):
                corrupt.append(item)
            else:
                position, record = item
                try:
                    book.apply(record, spot=Spot(folder, position))
                except (LookupError, TypeError, ValueError, AttributeError) as error:
                    place = f"{segment_path(folder, position.segment)}, byte {position.offset}"
                    raise JournalError(f"{place}: not a record of a shard: {error!r}") from error
        if folder == base.folder and not book.is_sealed and not corrupt:
            raise JournalError(f"{folder}: the snapshot has lost its end")
    book.keeps_retired = False
    book.is_damaged = bool(corrupt)
    if book.is_damaged:
        book.forget_incomplete()
    # Groups of several shards may have been dealt to this one, those of each in turn.
    book.order_by_version()
    return book, corrupt


def load(book: GroupBook, store: Callable[[Blob], Any]) -> None:
    """Bring the columns of the groups in the queue back into the store."""
    for group in book.groups.values():
        for part in group.parts.values():
            part.data = store(payload(part))


def payload(part: Part) -> Blob:
    """The blob of a part, from the disk. Raises JournalError if it cannot be read."""
    assert part.spot is not None, "only what was recovered is on the disk"
    return read_record(part.spot.folder, part.spot.position).payload


def snapshot(
    stages: Mapping[str, Ports],
    journal: Path,
    base: Base,
    *,
    before: int,
    out: Path,
    known: Sequence[Corrupt] = (),
) -> None:
    """Write the groups as they were at a cut into a folder that `recover` takes as a base.

    `known` are the damaged records without which the shard was opened. Raises JournalError for any
    other: the shard may still have what the disk has lost. NoSpaceError if there is no room.
    """
    book, corrupt = recover(stages, journal, base, before=before)
    for bad in corrupt:
        if bad not in known:
            raise JournalError(f"{bad.file}, byte {bad.position.offset}: {bad.reason}")
    with checkpoint_errors(out):
        out.mkdir(parents=True, exist_ok=True)
        write_segment(out / SNAPSHOT_FILE, _records(book))


SNAPSHOT_FILE = "00000000.journal"


def _records(book: GroupBook) -> Iterator[Record]:
    """The transitions that lead to a book's state."""
    yield opened(book.session, book.incarnation)
    yield left([], book.version)
    for group in sorted(book.groups.values(), key=lambda group: group.order):
        yield admitted(group.uid, group.prompt, group.admitted_version)
        yield from _progress(group)
    yield sealed()


def _progress(group: Group) -> Iterator[Record]:
    for stage, part in group.parts.items():
        assert group.info is not None
        lease = Lease(0, group.uid, stage, 0, 0.0)
        version = group.admitted_version if group.ready_version is None else group.ready_version
        yield committed(lease, payload(part), names=part.names, info=group.info, version=version)
    for stage, count in group.failures.items():
        for _ in range(count):
            yield given_back(Lease(0, group.uid, stage, 0, 0.0), failed=True)
    if group.ended is not None:
        yield ended(group.uid, group.ended)
    for stage, leases in group.leases.items():
        for held in leases:
            lease = held.lease
            grants = [(group.uid, lease.token, lease.attempt)]
            yield leased(stage, lease.holder, request=held.request, grants=grants)

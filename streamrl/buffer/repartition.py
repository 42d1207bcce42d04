"""The groups of a run dealt to another number of shards.

What each shard has, its snapshot and its journal behind it, is read once and written as the
journals of the new ones, record by record, each to the shard that its uid hashes to now. Nothing is
computed anew, and steps that have to be made again find the columns they were made of.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from streamrl.buffer.group import left, opened
from streamrl.buffer.log.segment_file import (
    Corrupt,
    Record,
    SegmentWriter,
    check_begins_at,
    replay,
    segment_path,
)
from streamrl.buffer.recovery import Base
from streamrl.buffer.wire_types import shard_of

_OF_ONE_UID = ("admit", "put", "back", "end")


def redeal(sources: Sequence[tuple[Path, Base]], targets: Sequence[Path]) -> None:
    """Write the journals `targets`, folders that are new, from shards' journals and their bases.

    Raises JournalError for what cannot be read, and the system's errors. Records that are damaged
    are left out, as a shard does that is opened; leases are void in the run that goes on.
    """
    with ExitStack() as open_files:
        files = []
        for target in targets:
            target.mkdir(parents=True)
            files.append(open_files.enter_context(SegmentWriter(segment_path(target, 1))))
        for journal, base in sources:
            check_begins_at(journal, base.first)
            incarnation, is_damaged = 0, False
            for record in _records(journal, base):
                if isinstance(record, Corrupt):
                    is_damaged = True
                    continue
                incarnation = max(incarnation, record.meta.get("incarnation", 0))
                for place, part in _parts(record, len(files)):
                    files[place].write(part)
            if is_damaged:
                for file in files:
                    file.write(opened("", incarnation, forgets=True))


def _records(journal: Path, base: Base) -> Iterator[Record | Corrupt]:
    folders = [(base.folder, 0)] if base.folder is not None else []
    for folder, first in (*folders, (journal, base.first)):
        for item in replay(folder, first=first):
            yield item if isinstance(item, Corrupt) else item[1]


def _parts(record: Record, count: int) -> Iterator[tuple[int, Record]]:
    """What of a record each shard is to have."""
    meta = record.meta
    if meta["kind"] in _OF_ONE_UID:
        yield shard_of(meta["uid"], count), record
    elif meta["kind"] == "leave":
        for place in range(count):
            uids = [uid for uid in meta["uids"] if shard_of(uid, count) == place]
            yield place, left(uids, meta["version"])
    elif meta["kind"] == "open":
        yield from ((place, record) for place in range(count))

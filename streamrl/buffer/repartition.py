"""Repartition the groups of a run to another number of shards.

Every record of each shard's snapshot and journal is read once and written to the journal of the
shard that its uid hashes to now. Nothing is computed again, and replayed training steps still find
their columns.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from streamrl.buffer.encoding.wire_types import get_shard_index
from streamrl.buffer.group import make_open_record, make_remove_record
from streamrl.buffer.log.segment_file import (
    CorruptRecord,
    JournalRecord,
    SegmentWriter,
    check_first_segment,
    get_segment_path,
    replay_segments,
)
from streamrl.buffer.recovery import SnapshotBase

_SINGLE_UID_KINDS = ("admit", "put", "back", "end")


def repartition_journals(
    sources: Sequence[tuple[Path, SnapshotBase]], targets: Sequence[Path]
) -> None:
    """Distribute the groups in the journals of old shards over the journals of new shards.

    sources: journal folder and snapshot of each old shard.
    targets: journal folder of each new shard; must not exist.

    Leaves out damaged records, as opening a shard does, and leases, which are void in a resumed
    run. Raises JournalError for unreadable files, and OSError.
    """
    with ExitStack() as open_files:
        files = []
        for target in targets:
            target.mkdir(parents=True)
            files.append(open_files.enter_context(SegmentWriter(get_segment_path(target, 1))))
        for journal, base in sources:
            check_first_segment(journal, base.first_segment)
            incarnation, is_damaged = 0, False
            for record in _read_records(journal, base):
                if isinstance(record, CorruptRecord):
                    is_damaged = True
                    continue
                incarnation = max(incarnation, record.meta.get("incarnation", 0))
                for shard, shard_record in _split_record(record, len(files)):
                    files[shard].write(shard_record)
            if is_damaged:
                for file in files:
                    file.write(make_open_record("", incarnation, forgets=True))


def _read_records(journal: Path, base: SnapshotBase) -> Iterator[JournalRecord | CorruptRecord]:
    """Yield all records of a shard: those of its snapshot, then those of its journal."""
    folders = [(base.folder, 0)] if base.folder is not None else []
    for folder, first in (*folders, (journal, base.first_segment)):
        for item in replay_segments(folder, first=first):
            yield item if isinstance(item, CorruptRecord) else item[1]


def _split_record(record: JournalRecord, count: int) -> Iterator[tuple[int, JournalRecord]]:
    """Yield (index of a new shard, record for its journal) from the record of an old shard.

    count: number of new shards. Divides records of several groups; leaves out leases.
    """
    meta = record.meta
    if meta["kind"] in _SINGLE_UID_KINDS:
        yield get_shard_index(meta["uid"], count), record
    elif meta["kind"] == "leave":
        for shard in range(count):
            uids = [uid for uid in meta["uids"] if get_shard_index(uid, count) == shard]
            yield shard, make_remove_record(uids, meta["version"])
    elif meta["kind"] == "open":
        yield from ((shard, record) for shard in range(count))

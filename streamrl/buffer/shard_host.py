"""A shard and its files: opened from what a predecessor left, snapshot beside its work."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from streamrl.buffer.codec import Blob, join_pieces
from streamrl.buffer.config import QueueConfig, ShardCapacity, StageSchema
from streamrl.buffer.group import ShardState
from streamrl.buffer.log.journal import Journal
from streamrl.buffer.log.segment_file import CorruptRecord, list_segments, segment_path
from streamrl.buffer.recovery import SnapshotBase, load_columns, recover_state, write_snapshot
from streamrl.buffer.shard import QueueShard
from streamrl.errors import StreamError


@dataclass(frozen=True)
class ShardFiles:
    """Where a shard's journal is, and how to find the newest snapshot it continues."""

    journal_dir: Path
    find_snapshot: Callable[[], SnapshotBase] = SnapshotBase


@dataclass(frozen=True)
class ShardPlan:
    """All a shard is made from. Without `files` it forgets everything when it dies."""

    stages: Mapping[str, StageSchema]
    config: QueueConfig
    capacity: ShardCapacity
    session: str = ""
    files: ShardFiles | None = None


class ShardHost:
    """Hosts one shard of a plan; needs a running loop. `store` is as in Shard."""

    def __init__(self, plan: ShardPlan, store: Callable[[Blob], Any] = join_pieces) -> None:
        self._plan = plan
        self._journal: Journal | None = None
        self.corrupt_records: list[CorruptRecord] = []
        book = ShardState(plan.stages)
        if plan.files is not None:
            base = plan.files.find_snapshot()
            book, self.corrupt_records = recover_state(plan.stages, plan.files.journal_dir, base)
            load_columns(book, store)
            # Not below the cut of the snapshot, or what is written would not be read again.
            first = max(base.first_segment, 1)
            self._journal = Journal(plan.files.journal_dir, plan.config.journal, first=first)
        self.shard = QueueShard(
            book,
            plan.config,
            bounds=plan.capacity,
            session=plan.session,
            log=self._journal,
            store=store,
        )

    async def rotate_journal(self) -> int:
        """Mark a moment: what happens from now on lies behind the cut that is returned."""
        return await self._require_journal().rotate()

    async def write_snapshot(self, cut: int, out: Path) -> None:
        """Write the groups as they were at a cut; the shard works on meanwhile."""
        plan = self._plan
        self._require_journal()
        assert plan.files is not None
        base = plan.files.find_snapshot()
        write = partial(write_snapshot, plan.stages, plan.files.journal_dir, base)
        await asyncio.to_thread(write, before=cut, out=out, known=self.corrupt_records)

    def discard_before(self, cut: int) -> None:
        """A checkpoint holds the snapshot of this cut: what lies before it is not needed."""
        self._require_journal().discard_before(cut)
        self.shard.forget_retired()

    async def close(self) -> None:
        """Write what is left."""
        if self._journal is not None:
            await self._journal.close()

    def _require_journal(self) -> Journal:
        if self._journal is None:
            raise StreamError("this shard has no journal (queue.journal.enabled=false)")
        return self._journal


def delete_segments_from(journal: Path, first: int) -> None:
    """Remove the segments from `first` on: the run goes on from before them, another way."""
    # The last first, so that a crash leaves no gap.
    for number in reversed(list_segments(journal)):
        if number >= first:
            segment_path(journal, number).unlink()

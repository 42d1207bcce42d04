"""Host of a queue shard: opens its journal and writes snapshots beside the running shard."""

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


class ShardHost:
    """Builds a queue shard, recovering it from its files; needs a running event loop.

    store: puts a blob of columns into the object store and returns its reference.
    """

    def __init__(self, plan: ShardPlan, store: Callable[[Blob], Any] = join_pieces) -> None:
        self._plan = plan
        self._journal: Journal | None = None
        self.corrupt_records: list[CorruptRecord] = []
        state = ShardState(plan.stages)
        if plan.files is not None:
            base = plan.files.find_snapshot()
            state, self.corrupt_records = recover_state(plan.stages, plan.files.journal_dir, base)
            load_columns(state, store)
            # A lower segment would lie before the snapshot's cut and would never be replayed.
            first = max(base.first_segment, 1)
            self._journal = Journal(plan.files.journal_dir, plan.config.journal, first=first)
        self.shard = QueueShard(
            state,
            plan.config,
            capacity=plan.capacity,
            session=plan.session,
            log=self._journal,
            store=store,
        )

    async def rotate_journal(self) -> int:
        """Start a new journal segment; return its number, the cut of the next snapshot."""
        return await self._require_journal().rotate()

    async def write_snapshot(self, cut: int, out: Path) -> None:
        """Write a snapshot of the journal segments below `cut` to the folder `out`, in a thread."""
        plan = self._plan
        self._require_journal()
        assert plan.files is not None
        base = plan.files.find_snapshot()
        write = partial(write_snapshot, plan.stages, plan.files.journal_dir, base)
        await asyncio.to_thread(write, before=cut, out=out, known_corrupt=self.corrupt_records)

    def discard_before(self, cut: int) -> None:
        """Delete the journal segments below `cut`.

        A durable checkpoint must have the shard's snapshot of these segments.
        """
        self._require_journal().discard_before(cut)
        self.shard.forget_retired()

    async def close(self) -> None:
        if self._journal is not None:
            await self._journal.close()

    def _require_journal(self) -> Journal:
        if self._journal is None:
            raise StreamError("this shard has no journal (queue.journal.enabled=false)")
        return self._journal


def delete_segments_from(journal: Path, first: int) -> None:
    """Delete journal segments from number `first` on: a resumed run rewrites history from there."""
    # Descending, so that a crash leaves no gap.
    for number in reversed(list_segments(journal)):
        if number >= first:
            segment_path(journal, number).unlink()

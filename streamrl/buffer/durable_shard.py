"""Queue shard on disk: recovers from its journal, and writes snapshots while it runs."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from streamrl.buffer.config import QueueConfig, ShardCapacity, StageSchema
from streamrl.buffer.encoding.column_codec import Blob, join_pieces
from streamrl.buffer.group import ShardState
from streamrl.buffer.log.journal import Journal
from streamrl.buffer.recovery import SnapshotBase, load_columns, recover_state, write_snapshot
from streamrl.buffer.shard import QueueShard
from streamrl.files.file_proofs import FileProof, list_files, prove_files


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

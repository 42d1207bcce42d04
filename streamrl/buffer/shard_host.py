"""A shard and its files: opened from what a predecessor left, snapshot beside its work."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from streamrl.buffer.codec import Blob, join
from streamrl.buffer.config import Bounds, Ports, QueueConfig
from streamrl.buffer.group import GroupBook
from streamrl.buffer.log.journal import Journal
from streamrl.buffer.log.segment_file import Corrupt, segment_path, segments
from streamrl.buffer.recovery import Base, load, recover, snapshot
from streamrl.buffer.shard import Shard
from streamrl.errors import StreamError


@dataclass(frozen=True)
class Files:
    """Where a shard's journal is, and how to find the newest snapshot it continues."""

    journal: Path
    find_base: Callable[[], Base] = Base


@dataclass(frozen=True)
class ShardPlan:
    """All a shard is made from. Without `files` it forgets everything when it dies."""

    stages: Mapping[str, Ports]
    config: QueueConfig
    bounds: Bounds
    session: str = ""
    files: Files | None = None


class ShardKeeper:
    """Hosts one shard of a plan; needs a running loop. `store` is as in Shard."""

    def __init__(self, plan: ShardPlan, store: Callable[[Blob], Any] = join) -> None:
        self._plan = plan
        self._journal: Journal | None = None
        self.corrupt: list[Corrupt] = []
        book = GroupBook(plan.stages)
        if plan.files is not None:
            base = plan.files.find_base()
            book, self.corrupt = recover(plan.stages, plan.files.journal, base)
            load(book, store)
            # Not below the cut of the snapshot, or what is written would not be read again.
            first = max(base.first, 1)
            self._journal = Journal(plan.files.journal, plan.config.journal, first=first)
        self.shard = Shard(
            book,
            plan.config,
            bounds=plan.bounds,
            session=plan.session,
            log=self._journal,
            store=store,
        )

    async def cut(self) -> int:
        """Mark a moment: what happens from now on lies behind the cut that is returned."""
        return await self._files_journal().rotate()

    async def snapshot(self, cut: int, out: Path) -> None:
        """Write the groups as they were at a cut; the shard works on meanwhile."""
        plan = self._plan
        self._files_journal()
        assert plan.files is not None
        base = plan.files.find_base()
        write = partial(snapshot, plan.stages, plan.files.journal, base)
        await asyncio.to_thread(write, before=cut, out=out, known=self.corrupt)

    def discard_before(self, cut: int) -> None:
        """A checkpoint holds the snapshot of this cut: what lies before it is not needed."""
        self._files_journal().discard_before(cut)
        self.shard.forget_retired()

    async def close(self) -> None:
        """Write what is left."""
        if self._journal is not None:
            await self._journal.close()

    def _files_journal(self) -> Journal:
        if self._journal is None:
            raise StreamError("this shard has no journal (queue.journal.enabled=false)")
        return self._journal


def forget_from(journal: Path, first: int) -> None:
    """Remove the segments from `first` on: the run goes on from before them, another way."""
    # The last first, so that a crash leaves no gap.
    for number in reversed(segments(journal)):
        if number >= first:
            segment_path(journal, number).unlink()

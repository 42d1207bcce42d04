"""What the coordinator keeps on the disk: the log of the books, and checkpoints.

A cut is taken while no prompt is being booked and between two steps, so that ledger, prompts,
shards and weights of a checkpoint agree. What the snapshots hold is read from the journals up to
the cut, beside the stream.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from streamrl.actors.trainer_group import TrainerGroup
from streamrl.actors.transport.ray_calls import all_answered
from streamrl.actors.transport.shard_proxy import RemoteShard
from streamrl.buffer import Books, Ledger
from streamrl.buffer.log.journal import Journal, NoLog
from streamrl.config import RunConfig
from streamrl.config.resume_checks import draw_again, recover_run_books
from streamrl.data import PromptStream
from streamrl.errors import CheckpointError, StreamError
from streamrl.run_dir.checkpoint import (
    BOOKS,
    CheckpointWriter,
    State,
    forget_old_shards,
    journal_dir,
    read_layout,
)
from streamrl.stream.run_state import Control

STEPS_WITHOUT_ROOM = 10
"""Steps after a checkpoint found no room, in which none is tried for the size of the journals."""
SNAPSHOT_TIMEOUT_S = 600.0
"""Longest a shard may take to write its snapshot, s."""


class Durability:
    """Opens the books of a run and saves it. `state` is that of the checkpoint it goes on from."""

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        shards: Sequence[RemoteShard],
        state: Mapping[str, Any] | None,
    ) -> None:
        self._config = config
        self._run_dir = run_dir
        self._shards = shards
        self._state = state
        self._journal: Journal | None = None
        self._layout = read_layout(run_dir, shards=len(shards))
        self._early_from = 0

    async def open_books(self, prompts: PromptStream) -> Books:
        """The books as they were; `prompts` goes on behind the last one that was admitted."""
        state, debug = self._state, self._config.run.debug
        if state is not None:
            prompts.load_state_dict(state["prompts"])
        if not self._config.queue.journal.enabled:
            ledger = Ledger(debug=debug)
            if state is not None:
                ledger = Ledger.from_state(state["ledger"], debug=debug)
            return Books(ledger, NoLog())
        found = recover_run_books(self._run_dir, state, debug=debug)
        await prompts.ready(len(found.drawn))
        draw_again(prompts, found.drawn, self._run_dir)
        folder = journal_dir(self._run_dir, BOOKS)
        first = state["cuts"][BOOKS] if state is not None else 0
        self._journal = Journal(folder, self._config.queue.journal, first=max(first, 1))
        books = Books(found.ledger, self._journal, found.steps)
        await books.open(0 if state is None else state["version"])
        return books

    def is_due(self, version: int, journal_bytes: int) -> bool:
        """Whether a checkpoint is to be written: every so many steps, or as journals have grown."""
        every = self._config.checkpoint.every
        is_large = journal_bytes > self._config.queue.journal.max_mb << 20
        return bool(every and version % every == 0) or (is_large and version >= self._early_from)

    async def save(
        self,
        control: Control,
        trainers: Sequence[TrainerGroup],
        reported: Callable[[], Awaitable[None]],
    ) -> Path | None:
        """Write a checkpoint of the current version; it counts once all steps are reported, too.

        None while steps are made again: the last checkpoint and the journals hold more than that.
        Raises NoSpaceError once nothing of it is left: the last checkpoint stays, and all goes on.
        """
        if control.books.steps:
            return None
        version = control.admission.version
        try:
            writer = CheckpointWriter(self._run_dir, version)
            path, cuts = await self._write(writer, control, trainers, reported)
        except CheckpointError:
            self._early_from = version + STEPS_WITHOUT_ROOM
            raise
        await asyncio.gather(
            *(shard.discard_before(cuts[name]) for name, shard in self._kept_shards())
        )
        await asyncio.to_thread(forget_old_shards, self._run_dir, self._layout)
        return path

    async def _write(
        self,
        writer: CheckpointWriter,
        control: Control,
        trainers: Sequence[TrainerGroup],
        reported: Callable[[], Awaitable[None]],
    ) -> tuple[Path, Mapping[str, int]]:
        """Fill a checkpoint, or leave nothing of it; where it is, and its cuts."""
        try:
            async with control.booking:
                cuts = await self._cut()
                state = State(
                    version=control.admission.version,
                    ledger=control.admission.ledger.state_dict(),
                    prompts=control.prompts.state_dict(),
                    dials=control.dials.state_dict(),
                    cuts=cuts,
                )
            saves = [trainer.save(writer) for trainer in trainers]
            await all_answered(*saves, self._snapshot(cuts, writer.queue_dir), reported())
            path = await asyncio.to_thread(writer.commit, state, keep=self._config.checkpoint.keep)
        except StreamError as error:
            # On a full disk it would take what others need.
            await asyncio.to_thread(writer.discard)
            if isinstance(error, CheckpointError):
                raise writer.with_its_name(error) from error
            raise
        return path, cuts

    async def _cut(self) -> dict[str, int]:
        if self._journal is None:
            return {}
        cuts = await asyncio.gather(*(shard.cut() for _, shard in self._kept_shards()))
        names = (name for name, _ in self._kept_shards())
        return {**dict(zip(names, cuts, strict=True)), BOOKS: await self._journal.rotate()}

    async def _snapshot(self, cuts: Mapping[str, int], folder: Path) -> None:
        await all_answered(
            *(
                shard.snapshot(cuts[name], folder / name, timeout_s=SNAPSHOT_TIMEOUT_S)
                for name, shard in self._kept_shards()
            )
        )

    def _kept_shards(self) -> list[tuple[str, RemoteShard]]:
        """The shards that have a journal, by its folder: all or none."""
        return list(zip(self._layout.names, self._shards, strict=True)) if self._journal else []

    async def close(self) -> None:
        """Write what is left of all journals."""
        if self._journal is not None:
            await asyncio.gather(*(shard.close() for _, shard in self._kept_shards()))
            await self._journal.close()

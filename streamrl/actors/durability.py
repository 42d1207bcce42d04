"""What the coordinator keeps on the disk: the log of the books, and checkpoints.

A cut is taken while no prompt is being booked and between two steps, so that ledger, prompts,
shards and weights of a checkpoint agree. What the snapshots hold is read from the journals up to
the cut, beside the stream.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from streamrl.actors.remote_shard import RemoteShard
from streamrl.actors.trainer_group import TrainerGroup
from streamrl.buffer import Books, Ledger
from streamrl.buffer.books import read_log, recover_books
from streamrl.buffer.journal import Journal, NoLog
from streamrl.checkpoint import BOOKS, CheckpointWriter, State, journal_dir
from streamrl.config import RunConfig
from streamrl.control import Control
from streamrl.data import PromptStream
from streamrl.errors import JournalError

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
        folder = journal_dir(self._run_dir, BOOKS)
        first = state["cuts"][BOOKS] if state is not None else 0
        ledger_state = state["ledger"] if state is not None else None
        found = recover_books(read_log(folder, first=first), ledger_state, debug=debug)
        await prompts.ready(len(found.drawn))
        self._go_behind(prompts, found.drawn)
        self._journal = Journal(folder, self._config.queue.journal, first=max(first, 1))
        books = Books(found.ledger, self._journal, found.steps)
        await books.open(0 if state is None else state["version"])
        return books

    def _go_behind(self, prompts: PromptStream, drawn: Sequence[str]) -> None:
        """Draw what the log says was drawn since the checkpoint."""
        again = [prompt.uid for prompt in prompts.draw(len(drawn))]
        if again != list(drawn):
            was, now = next(pair for pair in zip(drawn, again, strict=True) if pair[0] != pair[1])
            folder = journal_dir(self._run_dir, BOOKS)
            raise JournalError(f"{folder}: prompt {was} was admitted, the data gives {now}")

    async def save(
        self,
        control: Control,
        trainers: Sequence[TrainerGroup],
        reported: Callable[[], Awaitable[None]],
    ) -> Path | None:
        """Write a checkpoint of the current version; it counts once all steps are reported, too.

        None while steps are made again: the last checkpoint and the journals hold more than that.
        """
        if control.books.steps:
            return None
        version = control.admission.version
        async with control.booking:
            cuts = await self._cut()
            state = State(
                version=version,
                ledger=control.admission.ledger.state_dict(),
                prompts=control.prompts.state_dict(),
                dials=control.dials.state_dict(),
                cuts=cuts,
            )
        writer = CheckpointWriter(self._run_dir, version)
        saves = [trainer.save(writer) for trainer in trainers]
        await asyncio.gather(*saves, self._snapshot(cuts, writer.queue_dir), reported())
        path = await asyncio.to_thread(writer.commit, state, keep=self._config.checkpoint.keep)
        await asyncio.gather(
            *(shard.discard_before(cuts[name]) for name, shard in self._kept_shards())
        )
        return path

    async def _cut(self) -> dict[str, int]:
        if self._journal is None:
            return {}
        cuts = await asyncio.gather(*(shard.cut() for _, shard in self._kept_shards()))
        names = (name for name, _ in self._kept_shards())
        return {**dict(zip(names, cuts, strict=True)), BOOKS: await self._journal.rotate()}

    async def _snapshot(self, cuts: Mapping[str, int], folder: Path) -> None:
        await asyncio.gather(
            *(
                shard.snapshot(cuts[name], folder / name, timeout_s=SNAPSHOT_TIMEOUT_S)
                for name, shard in self._kept_shards()
            )
        )

    def _kept_shards(self) -> list[tuple[str, RemoteShard]]:
        """The shards that have a journal: all or none."""
        return [(shard.name, shard) for shard in self._shards] if self._journal else []

    async def close(self) -> None:
        """Write what is left of all journals."""
        if self._journal is not None:
            await asyncio.gather(*(shard.close() for _, shard in self._kept_shards()))
            await self._journal.close()

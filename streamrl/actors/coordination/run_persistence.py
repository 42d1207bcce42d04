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
from streamrl.actors.transport.ray_calls import gather_replies
from streamrl.actors.transport.shard_proxy import RemoteShard
from streamrl.buffer import Ledger, RunLog
from streamrl.buffer.log.journal import Journal, NullRecordLog
from streamrl.config import RunConfig
from streamrl.config.resume_checks import load_run_log, redraw_prompts
from streamrl.data import PromptStream
from streamrl.errors import CheckpointError, StreamError
from streamrl.run_dir.checkpoint import (
    RUN_LOG_FOLDER,
    CheckpointState,
    CheckpointWriter,
    get_journal_dir,
    read_layout,
    remove_old_shards,
)
from streamrl.stream.run_state import RunState

NO_SPACE_RETRY_STEPS = 10
"""Steps after a checkpoint found no room, in which none is tried for the size of the journals."""
SNAPSHOT_TIMEOUT_S = 600.0
"""Longest a shard may take to write its snapshot, s."""


class RunPersistence:
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
        self._retry_version = 0

    async def open_run_log(self, prompts: PromptStream) -> RunLog:
        """The books as they were; `prompts` goes on behind the last one that was admitted."""
        state, debug = self._state, self._config.run.debug
        if state is not None:
            prompts.load_state_dict(state["prompts"])
        if not self._config.queue.journal.enabled:
            ledger = Ledger(debug=debug)
            if state is not None:
                ledger = Ledger.from_state(state["ledger"], debug=debug)
            return RunLog(ledger, NullRecordLog())
        found = load_run_log(self._run_dir, state, debug=debug)
        await prompts.prefetch_prompts(len(found.drawn_uids))
        redraw_prompts(prompts, found.drawn_uids, self._run_dir)
        folder = get_journal_dir(self._run_dir, RUN_LOG_FOLDER)
        first = state["cuts"][RUN_LOG_FOLDER] if state is not None else 0
        self._journal = Journal(folder, self._config.queue.journal, first=max(first, 1))
        books = RunLog(found.ledger, self._journal, found.steps_to_replay)
        await books.record_start(0 if state is None else state["version"])
        return books

    def is_due(self, version: int, journal_bytes: int) -> bool:
        """Whether a checkpoint is to be written: every so many steps, or as journals have grown."""
        every = self._config.checkpoint.every
        is_large = journal_bytes > self._config.queue.journal.max_mb << 20
        return bool(every and version % every == 0) or (is_large and version >= self._retry_version)

    async def save_checkpoint(
        self,
        control: RunState,
        trainers: Sequence[TrainerGroup],
        reported: Callable[[], Awaitable[None]],
    ) -> Path | None:
        """Write a checkpoint of the current version; it counts once all steps are reported, too.

        None while steps are made again: the last checkpoint and the journals hold more than that.
        Raises NoSpaceError once nothing of it is left: the last checkpoint stays, and all goes on.
        """
        if control.run_log.steps_to_replay:
            return None
        version = control.admission.version
        try:
            writer = CheckpointWriter(self._run_dir, version)
            path, cuts = await self._write_checkpoint(writer, control, trainers, reported)
        except CheckpointError:
            self._retry_version = version + NO_SPACE_RETRY_STEPS
            raise
        await asyncio.gather(
            *(shard.discard_before(cuts[name]) for name, shard in self._list_journaled_shards())
        )
        await asyncio.to_thread(remove_old_shards, self._run_dir, self._layout)
        return path

    async def _write_checkpoint(
        self,
        writer: CheckpointWriter,
        control: RunState,
        trainers: Sequence[TrainerGroup],
        reported: Callable[[], Awaitable[None]],
    ) -> tuple[Path, Mapping[str, int]]:
        """Fill a checkpoint, or leave nothing of it; where it is, and its cuts."""
        try:
            async with control.run_log_lock:
                cuts = await self._cut_journals()
                state = CheckpointState(
                    version=control.admission.version,
                    ledger=control.admission.ledger.state_dict(),
                    prompts=control.prompt_source.state_dict(),
                    dials=control.adaptive_params.state_dict(),
                    cuts=cuts,
                )
            saves = [trainer.save_checkpoint(writer) for trainer in trainers]
            await gather_replies(*saves, self._snapshot_shards(cuts, writer.queue_dir), reported())
            path = await asyncio.to_thread(writer.commit, state, keep=self._config.checkpoint.keep)
        except StreamError as error:
            # On a full disk it would take what others need.
            await asyncio.to_thread(writer.discard)
            if isinstance(error, CheckpointError):
                raise writer.rename_in_error(error) from error
            raise
        return path, cuts

    async def _cut_journals(self) -> dict[str, int]:
        if self._journal is None:
            return {}
        cuts = await asyncio.gather(
            *(shard.rotate_journal() for _, shard in self._list_journaled_shards())
        )
        names = (name for name, _ in self._list_journaled_shards())
        return {**dict(zip(names, cuts, strict=True)), RUN_LOG_FOLDER: await self._journal.rotate()}

    async def _snapshot_shards(self, cuts: Mapping[str, int], folder: Path) -> None:
        await gather_replies(
            *(
                shard.write_snapshot(cuts[name], folder / name, timeout_s=SNAPSHOT_TIMEOUT_S)
                for name, shard in self._list_journaled_shards()
            )
        )

    def _list_journaled_shards(self) -> list[tuple[str, RemoteShard]]:
        """The shards that have a journal, by its folder: all or none."""
        return (
            list(zip(self._layout.shard_names, self._shards, strict=True)) if self._journal else []
        )

    async def close(self) -> None:
        """Write what is left of all journals."""
        if self._journal is not None:
            await asyncio.gather(*(shard.close() for _, shard in self._list_journaled_shards()))
            await self._journal.close()

"""Persistence of the coordinator: the run log, and checkpoints.

A checkpoint cuts all journals at once (each starts a new segment), between two steps and while no
admission is being logged, so that ledger, prompts, shards and weights agree. Each shard then writes
its snapshot from its journal up to the cut, concurrently with the stream.
"""

import asyncio
import math
import zlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from streamrl.actors.coordination.trainer_group import TrainerGroup
from streamrl.actors.queue_shard import RemoteShard
from streamrl.actors.transport.ray_calls import gather_replies
from streamrl.buffer import DurableShard, Ledger, RunLog
from streamrl.buffer.journal import Journal, RecordLog
from streamrl.config.resume_checks import load_run_log, redraw_prompts
from streamrl.config.run_config import RunConfig
from streamrl.data.prompt_stream import PromptStream
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
"""Steps without checkpoints for large journals, after a checkpoint failed for lack of space."""


class RunPersistence:
    """Opens the run log at the start of a run and writes its checkpoints.

    state: contents of the checkpoint's state.json to resume from; None for a new run.
    last_evaluation: version and mean score of the last evaluation.
    """

    last_evaluation: tuple[int, float] | None = None

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
        """Load the run log of earlier processes of this run, and continue it.

        Advances `prompts` past the last prompt that the run log admitted.
        """
        state = self._state
        if state is not None:
            prompts.load_state_dict(state["prompts"])
        if not self._config.queue.journal.enabled:
            ledger = Ledger() if state is None else Ledger.from_state(state["ledger"])
            return RunLog(ledger, RecordLog())
        loaded = load_run_log(self._run_dir, state)
        await asyncio.to_thread(redraw_prompts, prompts, loaded.stream_events, self._run_dir)
        folder = get_journal_dir(self._run_dir, RUN_LOG_FOLDER)
        first_segment = state["cuts"][RUN_LOG_FOLDER] if state is not None else 0
        self._journal = Journal(folder, self._config.queue.journal, first=max(first_segment, 1))
        run_log = RunLog(loaded.ledger, self._journal, loaded.steps_to_replay)
        await run_log.record_start(0 if state is None else state["version"])
        return run_log

    def is_due(self, version: int, journal_bytes: int) -> bool:
        """Return whether to write a checkpoint at this version.

        True at the configured step interval, and when the journals exceed JournalConfig.max_mb.
        """
        every = self._config.checkpoint.every
        is_large = journal_bytes > self._config.queue.journal.max_mb << 20
        return bool(every and version % every == 0) or (is_large and version >= self._retry_version)

    async def save_checkpoint(
        self,
        run_state: RunState,
        trainers: Sequence[TrainerGroup],
        wait_until_reported: Callable[[], Awaitable[None]],
    ) -> Path | None:
        """Write a checkpoint of the current version; return its path.

        The checkpoint becomes valid only after `wait_until_reported` returns. Returns None while a
        resumed run replays logged steps: the last checkpoint and the journals already hold later
        state. Raises NoSpaceError after removing the partial checkpoint; the last checkpoint stays
        valid.
        """
        if run_state.run_log.steps_to_replay:
            return None
        version = run_state.admission.version
        try:
            writer = CheckpointWriter(self._run_dir, version)
            path, cuts = await self._write_checkpoint(
                writer, run_state, trainers, wait_until_reported
            )
        except CheckpointError:
            self._retry_version = version + NO_SPACE_RETRY_STEPS
            raise
        await asyncio.gather(
            *(
                shard.call(DurableShard.discard_before, cuts[name])
                for name, shard in self._list_journaled_shards()
            )
        )
        await asyncio.to_thread(remove_old_shards, self._run_dir, self._layout)
        return path

    async def _write_checkpoint(
        self,
        writer: CheckpointWriter,
        run_state: RunState,
        trainers: Sequence[TrainerGroup],
        wait_until_reported: Callable[[], Awaitable[None]],
    ) -> tuple[Path, Mapping[str, int]]:
        """Write all files of a checkpoint, then commit; on an error remove the files.

        Returns the path, and for each journal the first segment that the checkpoint does not cover.
        """
        try:
            async with run_state.run_log_lock:
                cuts = await self._cut_journals()
                state = CheckpointState(
                    version=run_state.admission.version,
                    ledger=run_state.admission.ledger.state_dict(),
                    prompts=run_state.prompt_source.state_dict(),
                    dials=run_state.adaptive_params.state_dict(),
                    cuts=cuts,
                )
            match self.last_evaluation:
                case (version, score) if version == state["version"] and math.isfinite(score):
                    settings = hash_evaluation_settings(self._config)
                    state["evaluation"] = {"mean": score, "settings": settings}
            saves = [trainer.save_checkpoint(writer) for trainer in trainers]
            await gather_replies(*saves, self._snapshot_shards(cuts, writer), wait_until_reported())
            path = await asyncio.to_thread(writer.commit, state, keep=self._config.checkpoint.keep)
        except StreamError as error:
            # A partial checkpoint on a full disk would keep the space that journals need.
            await asyncio.to_thread(writer.discard)
            if isinstance(error, CheckpointError):
                raise writer.rename_in_error(error) from error
            raise
        return path, cuts

    async def _cut_journals(self) -> dict[str, int]:
        """Start a new segment in every journal; return its number by shard folder or run log."""
        if self._journal is None:
            return {}
        cuts = await asyncio.gather(
            *(shard.call(DurableShard.rotate_journal) for _, shard in self._list_journaled_shards())
        )
        names = (name for name, _ in self._list_journaled_shards())
        return {**dict(zip(names, cuts, strict=True)), RUN_LOG_FOLDER: await self._journal.rotate()}

    async def _snapshot_shards(self, cuts: Mapping[str, int], writer: CheckpointWriter) -> None:
        """Let every shard write its state at the cut into a folder of the checkpoint."""
        snapshots = (
            shard.call(DurableShard.write_snapshot, cuts[name], writer.queue_dir / name)
            for name, shard in self._list_journaled_shards()
        )
        for proofs in await gather_replies(*snapshots):
            writer.add_proofs(proofs)

    def _list_journaled_shards(self) -> list[tuple[str, RemoteShard]]:
        """Return each shard with the name of its journal folder; [] without journals."""
        return (
            list(zip(self._layout.shard_names, self._shards, strict=True)) if self._journal else []
        )

    async def close(self) -> None:
        if self._journal is not None:
            await asyncio.gather(
                *(shard.call(DurableShard.close) for _, shard in self._list_journaled_shards())
            )
            await self._journal.close()


def hash_evaluation_settings(config: RunConfig) -> int:
    """Hash the settings that the scores of an evaluation depend on."""
    evaluation = replace(config.evaluation, every=0, at_start=True, at_end=True)
    scores = (config.rewards, config.environment)
    parts = (evaluation, config.data.eval, config.generator.max_new_tokens, *scores)
    return zlib.crc32(repr(parts).encode())

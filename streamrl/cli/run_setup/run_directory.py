"""Run directory: created atomically, or cut back to the checkpoint of a resume."""

import contextlib
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from streamrl.cli.run_setup.resume import RunDirClaim, claim_new_run, is_fork
from streamrl.config.resume_checks import repartition_queue
from streamrl.config.run_config import RunConfig, dump_config
from streamrl.errors import ConfigError
from streamrl.files.atomic_write import wrap_os_errors, write_atomic
from streamrl.run_dir.checkpoint import QueueLayout, ResumePoint, find_resume_point, link_checkpoint
from streamrl.run_dir.run_config_file import CONFIG_FILE
from streamrl.run_dir.run_lock import RunLock, acquire_run_lock
from streamrl.telemetry.rollout_log import RolloutLog
from streamrl.telemetry.sinks import METRICS_FILE


@contextlib.contextmanager
def open_run_directory(
    config: RunConfig, resume: ResumePoint | None, layout: QueueLayout, claim: RunDirClaim
) -> Iterator[tuple[RolloutLog, ResumePoint | None]]:
    """Create the directory of a new run or a fork, or cut a resumed run back to its checkpoint.

    Yields the rollout log in the directory, and the resume point (None for a new run). If the run
    is refused or interrupted before its first step, a new directory is removed, and the run
    directory that it replaced is restored.
    """
    folder, recording = config.run_dir, config.telemetry.rollouts
    max_bytes = recording.max_gib * 2**30
    log = RolloutLog(folder, every=recording.every, max_bytes=max_bytes)
    replaced = folder.with_name(f".{folder.name}.replaced")
    is_new = resume is None or is_fork(config, resume)
    with wrap_os_errors(f"run directory {folder}", ConfigError):
        if is_new:
            resume = _make_run_dir(config, resume, layout, claim, replaced)
        else:
            assert resume is not None
            claim.run_lock = claim.run_lock or acquire_run_lock(folder)
            resume.discard_later()
            _repartition_queue(config, resume, layout)
            write_atomic(folder / CONFIG_FILE, dump_config(config))
    try:
        yield log, resume
    except BaseException as error:
        metrics = folder / METRICS_FILE
        has_steps = metrics.exists() and metrics.stat().st_size
        is_refused = isinstance(error, ConfigError | KeyboardInterrupt)
        if is_new and not has_steps and (is_refused or replaced.exists()):
            shutil.rmtree(folder)
            if replaced.exists():
                replaced.rename(folder)
        shutil.rmtree(replaced, ignore_errors=True)
        raise
    shutil.rmtree(replaced, ignore_errors=True)


def _make_run_dir(
    config: RunConfig,
    resume: ResumePoint | None,
    layout: QueueLayout,
    claim: RunDirClaim,
    replaced: Path,
) -> ResumePoint | None:
    """Create and lock the directory of a new run (returns None) or a fork (its resume point).

    The directory is filled under a temporary name and then renamed, so other processes never see
    an incomplete directory. A replaced run is moved aside to the path `replaced`.
    """
    folder = config.run_dir
    partial_dir = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.partial")
    partial_dir.mkdir(parents=True)
    lock: RunLock | None = None
    try:
        lock = acquire_run_lock(partial_dir)
        if resume is not None:
            assert resume.checkpoint is not None
            forked = ResumePoint(partial_dir, link_checkpoint(resume.checkpoint, partial_dir))
            (partial_dir / "journal").mkdir()
            layout.write(partial_dir)
            _repartition_queue(config, forked, layout)
        write_atomic(partial_dir / CONFIG_FILE, dump_config(config))
        if folder.exists():
            # Another process created the folder after this command had checked.
            if claim.run_lock is None:
                claim_new_run(replace(config, run=replace(config.run, overwrite=False)), claim)
            shutil.rmtree(replaced, ignore_errors=True)
            folder.rename(replaced)
        partial_dir.rename(folder)
    except BaseException:
        if lock is not None:
            lock.release()
        shutil.rmtree(partial_dir, ignore_errors=True)
        if replaced.exists() and not folder.exists():
            replaced.rename(folder)
        raise
    if claim.run_lock is not None:
        claim.run_lock.close()
    lock.set_folder(folder)
    claim.run_lock = lock
    claim.source_locks.close()
    return None if resume is None else find_resume_point(folder)


def _repartition_queue(config: RunConfig, resume: ResumePoint, layout: QueueLayout) -> None:
    """Spread the groups in journals over the configured number of shards, if it changed."""
    if config.queue.journal.enabled and layout.shards != config.queue.shards:
        repartition_queue(config, resume, layout)

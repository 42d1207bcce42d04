"""Decide between a new run, a resume and a fork; lock the run directories involved."""

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from streamrl.config.resume_overrides import check_overrides
from streamrl.config.run_config import RunConfig, RunSettings, iter_path_sections, load_config
from streamrl.errors import ConfigError, extend_errors
from streamrl.run_dir.checkpoint import (
    ResumePoint,
    find_resume_point,
    find_run_dir,
    link_best_checkpoint,
)
from streamrl.run_dir.discarded import DISCARDED, restore_discarded
from streamrl.run_dir.run_config_file import check_run_dir
from streamrl.run_dir.run_lock import InUseError, RunLock, acquire_run_lock, lock_for_reading


@dataclass
class RunDirClaim:
    """Locks on run directories that a command holds: on its own, and on the source of a fork."""

    run_lock: RunLock | None = None
    source_locks: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def release(self) -> None:
        self.source_locks.close()
        if self.run_lock is not None:
            self.run_lock.release()


def begin_run(arguments: Sequence[str], claim: RunDirClaim) -> RunConfig:
    """Load the config of a new run, and lock the run directory that the run replaces, if any.

    arguments: config file and key=value overrides of the command line. claim: receives the lock.
    """
    if not arguments or "=" in arguments[0]:
        raise ConfigError("train: name a config file first, or --resume a run")
    config = load_config(Path(arguments[0]), arguments[1:])
    claim_new_run(config, claim)
    return config


def claim_new_run(config: RunConfig, claim: RunDirClaim) -> None:
    """Lock the existing run directory that a new run replaces, if any.

    claim: receives the lock. Raises ConfigError if the directory exists and run.overwrite=false, or
    if another process uses the directory.
    """
    folder = config.run_dir
    if not folder.exists():
        return
    if config.run.overwrite:
        _check_replaceable(config)
    try:
        if config.run.overwrite:
            claim.run_lock = acquire_run_lock(folder, status=_print_status)
            return
        with lock_for_reading(folder, status=_print_status):
            raise ConfigError(
                f"run directory {folder} exists: --resume it, choose another (run.name=...),"
                " or replace it (run.overwrite=true)"
            )
    except InUseError as error:
        raise ConfigError(f"{error}, or choose another run.name") from None


def _print_status(text: str) -> None:
    print(f"streamrl: {text}", file=sys.stderr, flush=True)


def _check_replaceable(config: RunConfig) -> None:
    """Raise ConfigError if the existing folder of the run must not be replaced.

    Called with run.overwrite=true. The folder must be a run directory without an input of the new
    run (model, data, code).
    """
    folder = config.run_dir
    with extend_errors("run.overwrite=true: ", "; delete it yourself or choose another run.name"):
        check_run_dir(folder)
    sections = dict(iter_path_sections(config))
    inputs = {f"{key}.path": settings.get("path", "") for key, settings in sections.items()}
    inputs["data.pretrain"] = config.data.pretrain
    inputs |= {f"data.train[{i}]": file.path for i, file in enumerate(config.data.train_files)}
    inputs |= {f"data.eval[{i}]": file.path for i, file in enumerate(config.data.eval_files)}
    for key, path in inputs.items():
        if path and folder.resolve() in Path(path).resolve().parents:
            raise ConfigError(
                f"{key}={path}: lies inside the run that run.overwrite=true would replace"
            )


def is_fork(config: RunConfig, resume: ResumePoint) -> bool:
    """Return whether a run continues a checkpoint of another run directory in its own directory."""
    return config.run_dir.resolve() != resume.run_dir.resolve()


def resume_run(
    path: Path, overrides: Sequence[str], claim: RunDirClaim
) -> tuple[RunConfig, ResumePoint]:
    """Load the config and the resume point of a run to resume or fork; lock its directories.

    path: run directory or checkpoint. overrides: key=value each. claim: receives the locks. Raises
    ConfigError if the overrides contradict the checkpoint, or if the run has no steps left.
    """
    if overrides and "=" not in overrides[0]:
        raise ConfigError(
            f"--resume uses the run's own config; remove {overrides[0]} (only key=value may follow)"
        )
    folder = find_run_dir(path)
    config = load_config(check_run_dir(folder), overrides)
    config = replace(config, run=_relocate_run(config, folder, overrides))
    is_forking = config.run_dir.resolve() != folder
    if is_forking:
        claim.source_locks.enter_context(lock_for_reading(folder, status=_print_status))
        _check_not_nested(config, folder)
        claim_new_run(config, claim)
    else:
        claim.run_lock = acquire_run_lock(folder, status=_print_status)
        if (folder / DISCARDED).exists():
            restore_discarded(folder)
            link_best_checkpoint(folder / "checkpoints")
    # Look for the checkpoint under the lock, when no other process can write there.
    resume = find_resume_point(path)
    if is_forking:
        if resume.checkpoint is None:
            raise ConfigError(
                f"--resume {path} run.name={config.run.name}: no checkpoint to fork from"
            )
        resume = replace(resume, should_keep_journal=False)
    stored = load_config(folder, skips_dry_run=True)
    check_overrides(stored, config, resume.checkpoint)
    if resume.version >= config.run.steps:
        raise ConfigError(
            f"run.steps={config.run.steps}: the checkpoint is at step {resume.version};"
            f" increase run.steps"
        )
    return config, resume


def _relocate_run(config: RunConfig, folder: Path, overrides: Sequence[str]) -> RunSettings:
    """Return the section `run` with the folder in which the run continues.

    folder: may have moved since its config was written. overrides: run.name or run.dir among
    them may fork the run. A fork does not inherit run.overwrite=true.
    """
    overridden = {override.partition("=")[0] for override in overrides}
    run = config.run
    name = run.name if "run.name" in overridden else folder.name
    parent = run.dir if "run.dir" in overridden else str(folder.parent)
    is_forking = (Path(parent) / name).resolve() != folder
    overwrite = run.overwrite and not (is_forking and "run.overwrite" not in overridden)
    return replace(run, name=name, dir=parent, overwrite=overwrite)


def _check_not_nested(config: RunConfig, folder: Path) -> None:
    target = config.run_dir.resolve()
    if folder in target.parents or target in folder.parents:
        raise ConfigError(
            f"run.name={config.run.name}: {target} and {folder} must not contain each other"
        )

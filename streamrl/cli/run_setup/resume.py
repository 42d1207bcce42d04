"""Decide between a new run, a resume and a fork; lock the run directories involved."""

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from streamrl.algorithms.adaptive_params import AdaptiveParams
from streamrl.config.run_config import RunConfig, RunSettings, load_config
from streamrl.dataflow import CRITIC, POLICY, CallKind
from streamrl.engines.reference_config import LEGACY_REFERENCE_FILE, REFERENCE_FILE
from streamrl.errors import ConfigError
from streamrl.run_dir.checkpoint import Checkpoint, ResumePoint, find_resume_point, find_run_dir
from streamrl.run_dir.run_lock import InUseError, RunLock, acquire_run_lock, lock_for_reading

FIXED_TRAINER_SETTINGS = ("lora_rank", "lora_alpha", "lora_targets")
"""Trainer settings that determine the parameters in a checkpoint."""
TRAINER_LAYOUT_SETTINGS = ("backend", "world_size", "tensor_parallel", "zero_stage")
"""Settings that must not change for checkpoints of the old per-rank format (rank_*.pt)."""


@dataclass
class RunDirClaim:
    """Locks on run directories that a command holds: on its own, and on the source of a fork."""

    run_lock: RunLock | None = None
    source_locks: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def release(self) -> None:
        self.source_locks.close()
        if self.run_lock is not None:
            self.run_lock.release()


def begin_run(words: Sequence[str], claim: RunDirClaim) -> RunConfig:
    """Load the config of a new run; `claim` receives the lock on the run it replaces, if any."""
    if not words or "=" in words[0]:
        raise ConfigError("train: name a config file first, or --resume a run")
    config = load_config(Path(words[0]), words[1:])
    claim_new_run(config, claim)
    return config


def claim_new_run(config: RunConfig, claim: RunDirClaim) -> None:
    """Lock the existing run directory that a new run replaces, if any; `claim` gets the lock."""
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


def claim_run(config: RunConfig, resume: ResumePoint | None, claim: RunDirClaim) -> RunDirClaim:
    """Lock the directory that a new run or a fork replaces, unless `claim` already holds a lock.

    Returns `claim`.
    """
    if claim.run_lock is None and (resume is None or is_fork(config, resume)):
        claim_new_run(config, claim)
    return claim


def _print_status(text: str) -> None:
    print(f"streamrl: {text}", file=sys.stderr, flush=True)


def _check_replaceable(config: RunConfig) -> None:
    """Raise ConfigError unless run.overwrite=true may replace the existing folder of the run.

    The folder must be a run directory without an input of the new run (model, data, code).
    """
    folder = config.run_dir
    if not (folder / "config.yaml").is_file():
        raise ConfigError(
            f"run.overwrite=true: {folder} is not a run directory; delete it yourself or choose"
            " another run.name"
        )
    inputs = {"model.path": config.model.path, "data.pretrain": config.data.pretrain}
    inputs |= {f"data.train[{i}]": file.path for i, file in enumerate(config.data.train_files)}
    inputs |= {f"data.eval[{i}]": file.path for i, file in enumerate(config.data.eval_files)}
    inputs |= {"critic.path": config.critic.path, "algorithm.path": config.algorithm.path}
    inputs |= {"filter.path": config.filter.options.get("path", "")}
    for section, entries in (("rewards", config.rewards), ("costs", config.costs)):
        for i, entry in enumerate(entries):
            inputs[f"{section}[{i}].path"] = str(entry.options.get("path", ""))
    for key, path in inputs.items():
        if path and folder.resolve() in Path(path).resolve().parents:
            raise ConfigError(
                f"{key}={path}: lies inside the run that run.overwrite=true would replace"
            )


def is_fork(config: RunConfig, resume: ResumePoint) -> bool:
    """Return whether a run continues a checkpoint of another run directory in its own directory."""
    return config.run_dir.resolve() != resume.run_dir.resolve()


def resume_run(
    path: Path, words: Sequence[str], claim: RunDirClaim
) -> tuple[RunConfig, ResumePoint]:
    """Load the config and the resume point of a run to resume or fork; lock its directories.

    path: run directory or checkpoint. words: key=value overrides. claim: receives the locks. Raises
    ConfigError if the overrides contradict the checkpoint, or if the run has no steps left.
    """
    if words and "=" not in words[0]:
        raise ConfigError(
            f"--resume uses the run's own config; remove {words[0]} (only key=value may follow)"
        )
    folder = find_run_dir(path)
    if not (folder / "config.yaml").is_file():
        find_resume_point(path)  # raises an error that names the missing file
    config = load_config(folder / "config.yaml", words)
    config = replace(config, run=_relocate_run(config, folder, words))
    is_forking = config.run_dir.resolve() != folder
    if is_forking:
        claim.source_locks.enter_context(lock_for_reading(folder, status=_print_status))
        _check_not_nested(config, folder)
        claim_new_run(config, claim)
    else:
        claim.run_lock = acquire_run_lock(folder, status=_print_status)
    # Look for the checkpoint under the lock, when no other process can write there.
    resume = find_resume_point(path)
    if is_forking:
        if resume.checkpoint is None:
            raise ConfigError(
                f"--resume {path} run.name={config.run.name}: no checkpoint to fork from"
            )
        resume = replace(resume, should_keep_journal=False)
    checkpoint = resume.checkpoint
    stored = load_config(folder / "config.yaml", is_rehearsed=True)
    _check_fixed_settings(stored, config)
    if checkpoint is not None:
        roles = [call.role for call in config.dataflow.select_calls(CallKind.TRAIN)]
        _check_role_files(checkpoint, roles)
        _check_legacy_layout(checkpoint, stored, config, roles)
        _check_ema_reference(checkpoint, config.reference.every)
    if resume.version >= config.run.steps:
        raise ConfigError(
            f"run.steps={config.run.steps}: the checkpoint is at step {resume.version};"
            f" increase run.steps"
        )
    return config, resume


def _relocate_run(config: RunConfig, folder: Path, words: Sequence[str]) -> RunSettings:
    """Return the section `run` with the folder in which the run continues.

    folder: may have moved since its config was written. words: overrides; run.name or run.dir
    among them may fork the run. A fork does not inherit run.overwrite=true.
    """
    overridden = {word.partition("=")[0] for word in words}
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


def _check_role_files(checkpoint: Checkpoint, roles: Sequence[str]) -> None:
    for folder in (folder for role in roles for folder in checkpoint.get_role_dirs(role)):
        if not folder.is_dir() or not any(folder.iterdir()):
            place = folder.relative_to(checkpoint.path)
            raise ConfigError(f"--resume {checkpoint.path}: {place}/ is missing or empty")


def _check_legacy_layout(
    checkpoint: Checkpoint, stored: RunConfig, config: RunConfig, roles: Sequence[str]
) -> None:
    """Raise ConfigError if the trainer layout of a role with an old per-rank checkpoint changes.

    Files rank_*.pt load only with the backend, ranks, tensor parallelism and ZeRO stage that wrote
    them.
    """
    for role in roles:
        if not list(checkpoint.get_role_dirs(role)[1].glob("rank_*.pt")):
            continue
        section = "trainer" if role == POLICY else f"{role}.trainer"
        old, new = (vars(c.get_trainer_config(role)) for c in (stored, config))
        for name in TRAINER_LAYOUT_SETTINGS:
            if new[name] != old[name]:
                raise ConfigError(
                    f"{section}.{name}={new[name]}: {checkpoint.path} has an old format that only"
                    f" loads with {old[name]}; checkpoints written from now on load with any value"
                )


def _check_ema_reference(checkpoint: Checkpoint, every: int) -> None:
    """Raise ConfigError unless the run has an EMA reference exactly if the checkpoint has."""
    state = checkpoint.get_role_dirs(POLICY)[1]
    was_saved = any((state / name).is_file() for name in (REFERENCE_FILE, LEGACY_REFERENCE_FILE))
    if was_saved and not every:
        raise ConfigError(
            f"reference.every={every}: the reference of {checkpoint.path} has moved; a resumed run"
            " must keep it moving (reference.every above 0)"
        )
    if every and not was_saved:
        raise ConfigError(
            f"reference.every={every}: {checkpoint.path} has no moving reference; a resumed run"
            " must keep reference.every=0"
        )


def _check_fixed_settings(stored: RunConfig, config: RunConfig) -> None:
    """Raise ConfigError if an override changes a setting on which the checkpoint depends."""
    trained = stored.dataflow.trained_roles
    for section, role in (("trainer", POLICY), ("critic.trainer", CRITIC)):
        if role not in trained or role not in config.dataflow.trained_roles:
            continue
        old, new = (vars(c.get_trainer_config(role)) for c in (stored, config))
        for name in FIXED_TRAINER_SETTINGS:
            if new[name] != old[name]:
                raise ConfigError(
                    f"{section}.{name}={new[name]}: a resumed run must keep {old[name]}"
                )
    fixed = {
        "pipeline.groups_per_step": lambda c: c.pipeline.groups_per_step,
        "critic.shared_coef": lambda c: c.critic.shared_coef,
        "critic.warmup_alone": lambda c: c.critic.warmup_alone,
        "algorithm.group_size": lambda c: c.algorithm.group_size,
        "algorithm.epochs": lambda c: c.algorithm.epochs,
        "algorithm.mini_batches": lambda c: c.algorithm.mini_batches,
        "queue.journal.enabled": lambda c: c.queue.journal.enabled,
    }
    for key, value in fixed.items():
        if value(config) != value(stored):
            raise ConfigError(f"{key}={value(config)}: a resumed run must keep {value(stored)}")
    old_params, new_params = (
        AdaptiveParams(c.algorithm.spec, c.algorithm_settings).values for c in (stored, config)
    )
    for name in old_params.keys() & new_params.keys():
        if new_params[name] != old_params[name]:
            key = f"params.{name}" if name in stored.algorithm_settings.params else name
            raise ConfigError(
                f"algorithm.{key}={new_params[name]}: this value adapts during training and is"
                " restored from the checkpoint; it cannot be set on resume"
            )
    before, now = stored.pipeline.max_staleness, config.pipeline.max_staleness
    if now < before:
        raise ConfigError(
            f"pipeline.max_staleness={now}: a resumed run has prompts in flight for {before};"
            " the bound may only grow"
        )

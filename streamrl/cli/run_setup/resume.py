"""Which run a command goes on with, forks or begins, and its claim to the directories."""

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from streamrl.algorithms.adaptive_params import AdaptiveParams
from streamrl.config import RunConfig, RunSettings, load_config
from streamrl.dataflow import CRITIC, POLICY, CallKind
from streamrl.engines.reference_config import LEGACY_REFERENCE_FILE, REFERENCE_FILE
from streamrl.errors import ConfigError
from streamrl.run_dir.checkpoint import Checkpoint, ResumePoint, find_resume_point, find_run_dir
from streamrl.run_dir.run_lock import InUseError, RunLock, acquire_run_lock, lock_for_reading

FIXED_TRAINER_SETTINGS = ("lora_rank", "lora_alpha", "lora_targets")
"""Settings of a trainer that the state in a checkpoint is made for."""
TRAINER_LAYOUT_SETTINGS = ("backend", "world_size", "tensor_parallel", "zero_stage")
"""And those of the state that backends once wrote by themselves."""


@dataclass
class RunDirClaim:
    """What a command holds of run directories: its own, if it is there, and one it forks from."""

    run_lock: RunLock | None = None
    source_locks: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def release(self) -> None:
        """Give all of it up."""
        self.source_locks.close()
        if self.run_lock is not None:
            self.run_lock.release()


def begin_run(words: Sequence[str], claim: RunDirClaim) -> RunConfig:
    """The config of a new run from the words of the command line."""
    if not words or "=" in words[0]:
        raise ConfigError("train: name a config file first, or --resume a run")
    config = load_config(Path(words[0]), words[1:])
    claim_new_run(config, claim)
    return config


def claim_new_run(config: RunConfig, claim: RunDirClaim) -> None:
    """Own what stands where a new run is to be, if it may be replaced; raises ConfigError if not.

    Nothing may stand there otherwise.
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
                f"run directory {folder} exists: --resume it, name another (run.name=...),"
                " or replace it (run.overwrite=true)"
            )
    except InUseError as error:
        raise ConfigError(f"{error}, or name another run (run.name=...)") from None


def claim_run(config: RunConfig, resume: ResumePoint | None, claim: RunDirClaim) -> RunDirClaim:
    """Own what stands where a new run or a fork is to be, unless that has been done."""
    if claim.run_lock is None and (resume is None or is_fork(config, resume)):
        claim_new_run(config, claim)
    return claim


def _print_status(text: str) -> None:
    print(f"streamrl: {text}", file=sys.stderr, flush=True)


def _check_replaceable(config: RunConfig) -> None:
    """Refuse to replace what is no run, or a run that the new one reads from."""
    folder = config.run_dir
    if not (folder / "config.yaml").is_file():
        raise ConfigError(f"run.overwrite=true: {folder} is no run directory; left alone")
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
            raise ConfigError(f"{key}={path}: lies in the run that run.overwrite=true replaces")


def is_fork(config: RunConfig, resume: ResumePoint) -> bool:
    """Tell whether a run goes on in another directory than the one it comes from."""
    return config.run_dir.resolve() != resume.run_dir.resolve()


def resume_run(
    path: Path, words: Sequence[str], claim: RunDirClaim
) -> tuple[RunConfig, ResumePoint]:
    """Config of a run that is to go on, or to be forked, and where it does."""
    if words and "=" not in words[0]:
        raise ConfigError(f"--resume goes on with the run's own config; {words[0]} is one too many")
    folder = find_run_dir(path)
    if not (folder / "config.yaml").is_file():
        find_resume_point(path)  # which says what there is not
    config = load_config(folder / "config.yaml", words)
    config = replace(config, run=_relocate_run(config, folder, words))
    forks = config.run_dir.resolve() != folder
    if forks:
        claim.source_locks.enter_context(lock_for_reading(folder, status=_print_status))
        _check_not_nested(config, folder)
        claim_new_run(config, claim)
    else:
        claim.run_lock = acquire_run_lock(folder, status=_print_status)
    # Only now nobody else writes there.
    resume = find_resume_point(path)
    if forks:
        if resume.checkpoint is None:
            raise ConfigError(f"--resume {path} run.name={config.run.name}: there is no checkpoint")
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
            " give a larger run.steps to go on"
        )
    return config, resume


def _relocate_run(config: RunConfig, folder: Path, words: Sequence[str]) -> RunSettings:
    """The run's settings with the directory it is in now, or the one it is to be forked into.

    That the original was allowed to replace a run says nothing of a fork.
    """
    given = {word.partition("=")[0] for word in words}
    run = config.run
    name = run.name if "run.name" in given else folder.name
    where = run.dir if "run.dir" in given else str(folder.parent)
    forks = (Path(where) / name).resolve() != folder
    overwrite = run.overwrite and not (forks and "run.overwrite" not in given)
    return replace(run, name=name, dir=where, overwrite=overwrite)


def _check_not_nested(config: RunConfig, folder: Path) -> None:
    """Raise ConfigError if a fork would lie in the run it comes from, or the other way round."""
    target = config.run_dir.resolve()
    if folder in target.parents or target in folder.parents:
        raise ConfigError(f"run.name={config.run.name}: {target} and {folder} lie in each other")


def _check_role_files(checkpoint: Checkpoint, roles: Sequence[str]) -> None:
    """Raise ConfigError unless there are a model and a trainer's state of each role."""
    for part in (part for role in roles for part in checkpoint.get_role_dirs(role)):
        if not part.is_dir() or not any(part.iterdir()):
            place = part.relative_to(checkpoint.path)
            raise ConfigError(f"--resume {checkpoint.path}: {place}/ is missing or empty")


def _check_legacy_layout(
    checkpoint: Checkpoint, stored: RunConfig, config: RunConfig, roles: Sequence[str]
) -> None:
    """Of a state that backends wrote by themselves the layout has to stay; raises ConfigError."""
    for role in roles:
        if not list(checkpoint.get_role_dirs(role)[1].glob("rank_*.pt")):
            continue
        section = "trainer" if role == POLICY else f"{role}.trainer"
        was, wanted = (vars(one.get_trainer_config(role)) for one in (stored, config))
        for name in TRAINER_LAYOUT_SETTINGS:
            if wanted[name] != was[name]:
                raise ConfigError(
                    f"{section}.{name}={wanted[name]}: {checkpoint.path} is of an old form, whose"
                    f" {was[name]} has to stay; a checkpoint written from now on goes on with any"
                )


def _check_ema_reference(checkpoint: Checkpoint, every: int) -> None:
    """Raise ConfigError unless the run goes on with a moving reference just if one was saved."""
    state = checkpoint.get_role_dirs(POLICY)[1]
    was_saved = any((state / name).is_file() for name in (REFERENCE_FILE, LEGACY_REFERENCE_FILE))
    if was_saved and not every:
        raise ConfigError(
            f"reference.every={every}: the reference of {checkpoint.path} has moved; a resumed run"
            " goes on with it"
        )
    if every and not was_saved:
        raise ConfigError(
            f"reference.every={every}: {checkpoint.path} has no reference that moves; a resumed"
            " run keeps its 0"
        )


def _check_fixed_settings(stored: RunConfig, config: RunConfig) -> None:
    """Refuse overrides under which the saved state would mean something else."""
    trained = stored.dataflow.trained_roles
    for section, role in (("trainer", POLICY), ("critic.trainer", CRITIC)):
        if role not in trained or role not in config.dataflow.trained_roles:
            continue
        was, wanted = (vars(one.get_trainer_config(role)) for one in (stored, config))
        for name in FIXED_TRAINER_SETTINGS:
            if wanted[name] != was[name]:
                raise ConfigError(
                    f"{section}.{name}={wanted[name]}: a resumed run keeps its {was[name]}"
                )
    kept = {
        "pipeline.groups_per_step": lambda c: c.pipeline.groups_per_step,
        "critic.shared_coef": lambda c: c.critic.shared_coef,
        "critic.warmup_alone": lambda c: c.critic.warmup_alone,
        "algorithm.group_size": lambda c: c.algorithm.group_size,
        "algorithm.epochs": lambda c: c.algorithm.epochs,
        "algorithm.mini_batches": lambda c: c.algorithm.mini_batches,
        "queue.journal.enabled": lambda c: c.queue.journal.enabled,
    }
    for key, value in kept.items():
        if value(config) != value(stored):
            raise ConfigError(f"{key}={value(config)}: a resumed run keeps its {value(stored)}")
    began, begins = (
        AdaptiveParams(one.algorithm.spec, one.algorithm_settings).values
        for one in (stored, config)
    )
    for name in began.keys() & begins.keys():
        if begins[name] != began[name]:
            key = f"params.{name}" if name in stored.algorithm_settings.params else name
            raise ConfigError(
                f"algorithm.{key}={begins[name]}: a resumed run goes on with what it had come to"
            )
    before, now = stored.pipeline.max_staleness, config.pipeline.max_staleness
    if now < before:
        raise ConfigError(
            f"pipeline.max_staleness={now}: a resumed run has prompts in flight for {before};"
            " it may only grow"
        )

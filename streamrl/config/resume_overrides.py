"""Checks of a resume's config: overrides that the stored run or its checkpoint rules out."""

from collections.abc import Iterator, Sequence
from typing import Any

from streamrl.algorithms.adaptive_params import AdaptiveParams
from streamrl.config.run_config import RunConfig
from streamrl.dataflow import CRITIC, POLICY, CallKind
from streamrl.engines.trainer_config import REFERENCE_FILE
from streamrl.errors import ConfigError
from streamrl.files.file_proofs import compute_digest
from streamrl.files.typed_settings import Conflict, check_conflicts, get_setting
from streamrl.run_dir.checkpoint import Checkpoint

FIXED_TRAINER_SETTINGS = ("lora_rank", "lora_alpha")
"""Trainer settings that determine the parameters in a checkpoint."""

FIXED_SETTINGS = (
    "pipeline.groups_per_step",
    "critic.shared_coef",
    "critic.warmup_alone",
    "algorithm.group_size",
    "algorithm.epochs",
    "algorithm.mini_batches",
    "queue.journal.enabled",
)
"""Settings that determine the columns and steps in a checkpoint, a queue and a run log."""

_LAYOUT_SETTINGS = (
    *("backend", "world_size", "tensor_parallel", "sequence_parallel", "zero_stage", "threads"),
)
"""Trainer settings that change the order of sums, but not what is learned."""


def describe_training(config: RunConfig) -> dict[str, str]:
    """Return hashes of what repeated steps depend on: `objective`, and `layout` for rounding."""
    trainers = [{**vars(config.get_trainer_config(role))} for role in config.dataflow.trained_roles]
    layout = [[trainer.pop(name) for name in _LAYOUT_SETTINGS] for trainer in trainers]
    objective = (
        *(trainers, config.algorithm, config.reference, config.critic.shared_coef),
        *(config.rewards, config.costs),
    )
    texts = {"objective": repr(objective), "layout": repr((layout, config.placement))}
    return {name: compute_digest(text.encode()) for name, text in texts.items()}


def check_overrides(stored: RunConfig, config: RunConfig, checkpoint: Checkpoint | None) -> None:
    """Raise ConfigError if the overrides of a resume contradict the run or its checkpoint.

    stored: config saved with the run. config: the same with overrides. checkpoint: None if the run
    was killed before its first.
    """
    _check_fixed_settings(stored, config)
    if checkpoint is not None:
        roles = [call.role for call in config.dataflow.select_calls(CallKind.TRAIN)]
        _check_role_files(checkpoint, roles)
        _check_ema_reference(checkpoint, config.reference.every)


def _check_role_files(checkpoint: Checkpoint, roles: Sequence[str]) -> None:
    """Raise ConfigError if the checkpoint lacks the model or the trainer state of a role."""
    for folder in (folder for role in roles for folder in checkpoint.get_role_dirs(role)):
        if not folder.is_dir() or not any(folder.iterdir()):
            location = folder.relative_to(checkpoint.path)
            raise ConfigError(f"--resume {checkpoint.path}: {location}/ is missing or empty")


def _check_ema_reference(checkpoint: Checkpoint, every: int) -> None:
    """Raise ConfigError unless the resumed run has an EMA reference exactly if the checkpoint has.

    every: reference.every of the resumed run; above 0 with an EMA reference.
    """
    state = checkpoint.get_role_dirs(POLICY)[1]
    was_saved = (state / REFERENCE_FILE).is_file()
    if was_saved and not every:
        raise ConfigError(
            f"reference.every={every}: {checkpoint.path} has an EMA reference; a resumed run must"
            " keep reference.every above 0"
        )
    if every and not was_saved:
        raise ConfigError(
            f"reference.every={every}: {checkpoint.path} has no EMA reference; a resumed run must"
            " keep reference.every=0"
        )


def _check_fixed_settings(stored: RunConfig, config: RunConfig) -> None:
    """Raise ConfigError if an override changes a setting on which the checkpoint's state depends.

    stored: config saved with the run. config: the same with overrides.
    """
    for section, role in (("trainer", POLICY), ("critic.trainer", CRITIC)):
        if role in stored.dataflow.trained_roles and role in config.dataflow.trained_roles:
            old, new = (vars(c.get_trainer_config(role)) for c in (stored, config))
            rows = _iter_changes(FIXED_TRAINER_SETTINGS, old, new)
            check_conflicts(new, rows, f"{section}.")
    check_conflicts(config, _iter_changes(FIXED_SETTINGS, stored, config))
    _check_kind_of_rollouts(stored, config)
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
    rule = f"a resumed run has prompts in flight for {before}; the bound may only grow"
    check_conflicts(config, [(now < before, "pipeline.max_staleness", rule)])


def _iter_changes(keys: Sequence[str], old: Any, new: Any) -> Iterator[Conflict]:
    """Yield the rule that a resumed run keeps these settings."""
    for key in keys:
        before = get_setting(old, key)
        yield get_setting(new, key) != before, key, f"a resumed run must keep {before}"


def _check_kind_of_rollouts(stored: RunConfig, config: RunConfig) -> None:
    """Raise ConfigError if groups in the queue would not suit the environments.

    An override may add an environment to several, but not to none.
    """
    old, new = stored.environment, config.environment
    both_enabled = old.is_enabled and new.is_enabled
    if both_enabled and (old.max_samples > 1) != (new.max_samples > 1):
        rule = "keep 1" if old.max_samples == 1 else "stay above 1"
        raise ConfigError(
            f"environment.max_samples={new.max_samples}: must {rule} in a resumed run: groups in"
            " its queue would not have the same columns"
        )
    if old.is_enabled == new.is_enabled and old.specs.keys() <= new.specs.keys():
        return
    groups = "have no episodes"
    if old.is_enabled:
        groups = f"name {', '.join(old.named)}" if old.named else "have episodes without a name"
    raise ConfigError(
        f"{new.settings_text}: a resumed run must keep {old.settings_text}: groups in its queue"
        f" {groups}"
    )

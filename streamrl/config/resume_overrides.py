"""Checks of a resume's config: overrides that the stored run or its checkpoint rules out."""

from collections.abc import Iterator, Sequence
from typing import Any

from streamrl.algorithms.adaptive_params import AdaptiveParams
from streamrl.config.run_config import RunConfig
from streamrl.dataflow import CRITIC, POLICY, CallKind
from streamrl.engines.trainer_config import REFERENCE_FILE
from streamrl.environments.config import EnvironmentConfig
from streamrl.errors import ConfigError
from streamrl.files.file_proofs import compute_digest
from streamrl.files.typed_settings import (
    Conflict,
    check_conflicts,
    format_value,
    get_setting,
    list_fixed_settings,
)
from streamrl.run_dir.checkpoint import Checkpoint, get_role_dirs

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
    check_conflicts(config, _iter_changes(stored, config))
    if all(CRITIC in c.dataflow.trained_roles for c in (stored, config)):
        old, new = (c.get_trainer_config(CRITIC) for c in (stored, config))
        check_conflicts(new, _iter_changes(old, new), "critic.trainer.")
    check_conflicts(config, _iter_lost_state(stored, config))
    _check_environments(stored.environment, config.environment)
    if checkpoint is not None:
        roles = [call.role for call in config.dataflow.select_calls(CallKind.TRAIN)]
        _check_role_files(checkpoint, roles)
        state = get_role_dirs(checkpoint.path, POLICY)[1]
        was_saved = (state / REFERENCE_FILE).is_file()
        rule = (
            f"a resumed run must keep it {'above' if was_saved else 'at'} 0, as {checkpoint.path}"
        )
        check_conflicts(
            config, [(bool(config.reference.every) != was_saved, "reference.every", rule)]
        )


def _check_role_files(checkpoint: Checkpoint, roles: Sequence[str]) -> None:
    """Raise ConfigError if the checkpoint lacks the model or the trainer state of a role."""
    for folder in (folder for role in roles for folder in get_role_dirs(checkpoint.path, role)):
        if not folder.is_dir() or not any(folder.iterdir()):
            location = folder.relative_to(checkpoint.path)
            raise ConfigError(f"--resume {checkpoint.path}: {location}/ is missing or empty")


def _iter_changes(old: Any, new: Any) -> Iterator[Conflict]:
    """Yield the rule that a resumed run keeps the settings marked so."""
    for key in list_fixed_settings(type(new)):
        before = get_setting(old, key)
        rule = f"a resumed run must keep {format_value(before)}"
        yield get_setting(new, key) != before, key, rule


def _iter_lost_state(stored: RunConfig, config: RunConfig) -> Iterator[Conflict]:
    """Yield the rules on settings that the state of the run or its queue rules out."""
    old_params, new_params = (
        AdaptiveParams(c.algorithm.spec, c.algorithm_settings).values for c in (stored, config)
    )
    for name in old_params.keys() & new_params.keys():
        is_param = name in stored.algorithm_settings.params
        yield (
            new_params[name] != old_params[name],
            "algorithm.params" if is_param else f"algorithm.{name}",
            f"{name} adapts during training, and the checkpoint restores it; it cannot be set",
        )
    before = stored.pipeline.max_staleness
    yield (
        config.pipeline.max_staleness < before,
        "pipeline.max_staleness",
        f"a resumed run has prompts in flight for {before}; the bound may only grow",
    )
    widths, new_widths = stored.column_widths, config.column_widths
    yield (
        any(new_widths[name] != widths[name] for name in widths.keys() & new_widths.keys()),
        "algorithm.params",
        f"top_k: a resumed run must keep {stored.algorithm_settings.params.get('top_k')}, as groups"
        " in its queue have columns of that width",
    )
    old, new = stored.environment, config.environment
    yield (
        (old.max_samples > 1) != (new.max_samples > 1),
        "environment.max_samples",
        f"a resumed run must keep it {'above' if old.max_samples > 1 else 'at'} 1, as groups in its"
        " queue have the columns for that",
    )


def _check_environments(old: EnvironmentConfig, new: EnvironmentConfig) -> None:
    """Raise ConfigError unless the environments remain; more may join several, but not none."""
    if old.is_enabled != new.is_enabled or not old.specs.keys() <= new.specs.keys():
        raise ConfigError(
            f"{new.settings_text}: a resumed run must keep {old.settings_text}, as groups in its"
            " queue were sampled so"
        )

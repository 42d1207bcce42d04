"""Columns that an algorithm needs under the settings of a run."""

from streamrl.algorithms.algorithm import Algorithm, AlgorithmSettings
from streamrl.messages import COMPONENT_PREFIX, ROLLOUT_COLUMNS

ALL_COMPONENTS = COMPONENT_PREFIX + "*"


def list_required_columns(row: Algorithm, settings: AlgorithmSettings) -> tuple[str, ...]:
    """Return the columns that a group must have before training can start on it.

    Reward components are not listed: they arrive together with the scores.
    """
    columns = [name for name in row.columns if name != ALL_COMPONENTS]
    reference = ("ref_logprobs",) if settings.kl_coef else ()
    return tuple(dict.fromkeys((*ROLLOUT_COLUMNS, "scores", *columns, *reference)))


def list_derivation_columns(row: Algorithm, settings: AlgorithmSettings) -> tuple[str, ...]:
    """Return the columns that `derive_group_columns` reads to compute advantages and the like."""
    columns: list[str] = []
    for name in row.columns:
        is_all = name == ALL_COMPONENTS
        columns += [COMPONENT_PREFIX + c for c in settings.reward_weights] if is_all else [name]
    penalty = settings.kl_coef and settings.kl_in == "reward"
    kl = ("generator_logprobs", "ref_logprobs") if penalty else ()
    return tuple(dict.fromkeys(("lengths", "loss_mask", "finish_reason", "scores", *columns, *kl)))

"""Which columns a row needs under the settings of a run."""

from streamrl.algorithms.algorithm import Algorithm, AlgorithmSettings
from streamrl.messages import COMPONENT_PREFIX, ROLLOUT_COLUMNS

ALL_COMPONENTS = COMPONENT_PREFIX + "*"


def list_required_columns(row: Algorithm, settings: AlgorithmSettings) -> tuple[str, ...]:
    """The columns a group must have before it is trained on; reward components come with scores."""
    named = [name for name in row.columns if name != ALL_COMPONENTS]
    reference = ("ref_logprobs",) if settings.kl_coef else ()
    return tuple(dict.fromkeys((*ROLLOUT_COLUMNS, "scores", *named, *reference)))


def list_derivation_columns(row: Algorithm, settings: AlgorithmSettings) -> tuple[str, ...]:
    """The columns `derive_group_columns` reads, of all groups of its scope."""
    named: list[str] = []
    for name in row.columns:
        is_all = name == ALL_COMPONENTS
        named += [COMPONENT_PREFIX + c for c in settings.reward_weights] if is_all else [name]
    penalty = settings.kl_coef and settings.kl_in == "reward"
    kl = ("generator_logprobs", "ref_logprobs") if penalty else ()
    return tuple(dict.fromkeys(("lengths", "loss_mask", "finish_reason", "scores", *named, *kl)))

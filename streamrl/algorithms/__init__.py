"""Advantages, losses and divergences as pure tensor functions; an algorithm is a row of a table."""

from streamrl.algorithms.advantages import (
    best_of_group,
    decoupled_reward_normalization,
    generalized_advantages,
    gpg,
    greedy_baseline,
    group_relative,
    leave_one_out,
    length_weighted_baseline,
    reward_to_go,
    whiten,
)
from streamrl.algorithms.algorithm import Algorithm, Settings, Tokens
from streamrl.algorithms.config import AlgorithmConfig
from streamrl.algorithms.kl import adapt_coefficient, kl_estimate
from streamrl.algorithms.losses import aggregate, aggregate_sum, clipped_surrogate, normaliser
from streamrl.algorithms.objective import (
    columns_derived_from,
    columns_needed,
    derive,
    policy_loss,
    shared_value_loss,
    step_normaliser,
    summarise,
)
from streamrl.algorithms.table import ALGORITHMS

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "AlgorithmConfig",
    "Settings",
    "Tokens",
    "adapt_coefficient",
    "aggregate",
    "aggregate_sum",
    "best_of_group",
    "clipped_surrogate",
    "columns_derived_from",
    "columns_needed",
    "decoupled_reward_normalization",
    "derive",
    "generalized_advantages",
    "gpg",
    "greedy_baseline",
    "group_relative",
    "kl_estimate",
    "leave_one_out",
    "length_weighted_baseline",
    "normaliser",
    "policy_loss",
    "reward_to_go",
    "shared_value_loss",
    "step_normaliser",
    "summarise",
    "whiten",
]

"""Advantages, losses and divergences as pure tensor functions; an algorithm is a row of a table."""

from streamrl.algorithms.advantages import group_relative
from streamrl.algorithms.kl import kl_estimate
from streamrl.algorithms.losses import aggregate, aggregate_sum, clipped_surrogate, normaliser
from streamrl.algorithms.objective import policy_loss, summarise
from streamrl.algorithms.table import (
    ALGORITHMS,
    Algorithm,
    AlgorithmConfig,
    Settings,
    columns_needed,
)

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "AlgorithmConfig",
    "Settings",
    "aggregate",
    "aggregate_sum",
    "clipped_surrogate",
    "columns_needed",
    "group_relative",
    "kl_estimate",
    "normaliser",
    "policy_loss",
    "summarise",
]

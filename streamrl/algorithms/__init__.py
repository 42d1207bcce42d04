"""RL algorithms: rows of a table, built from pure tensor functions (advantages, losses, KL)."""

from streamrl.algorithms.algorithm import (
    Algorithm,
    AlgorithmSettings,
    TokenLossInput,
    list_derivation_columns,
    list_required_columns,
)
from streamrl.algorithms.config import AlgorithmConfig
from streamrl.algorithms.math.kl import adapt_kl_coef, kl_estimate
from streamrl.algorithms.math.step_metrics import (
    loss_denominator,
    step_loss_denominator,
    summarise_policy,
)
from streamrl.algorithms.table import ALGORITHMS

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "AlgorithmConfig",
    "AlgorithmSettings",
    "TokenLossInput",
    "adapt_kl_coef",
    "kl_estimate",
    "list_derivation_columns",
    "list_required_columns",
    "loss_denominator",
    "step_loss_denominator",
    "summarise_policy",
]

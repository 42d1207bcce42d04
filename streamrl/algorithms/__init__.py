"""RL algorithms: rows of a table, built from pure tensor functions (advantages, losses, KL)."""

from streamrl.algorithms.algorithm import (
    Algorithm,
    AlgorithmSettings,
    TokenLossInput,
    list_derivation_columns,
    list_required_columns,
)
from streamrl.algorithms.config import AlgorithmConfig
from streamrl.algorithms.math.training_metrics import summarize_policy
from streamrl.algorithms.table import ALGORITHMS

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "AlgorithmConfig",
    "AlgorithmSettings",
    "TokenLossInput",
    "list_derivation_columns",
    "list_required_columns",
    "summarize_policy",
]

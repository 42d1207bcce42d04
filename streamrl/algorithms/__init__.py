"""Advantages, losses and divergences as pure tensor functions; an algorithm is a row of a table."""

from streamrl.algorithms.algorithm import Algorithm, Settings, Tokens
from streamrl.algorithms.columns import columns_derived_from, columns_needed
from streamrl.algorithms.config import AlgorithmConfig
from streamrl.algorithms.math.kl import adapt_coefficient, kl_estimate
from streamrl.algorithms.math.step_metrics import normaliser, step_normaliser, summarise
from streamrl.algorithms.table import ALGORITHMS

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "AlgorithmConfig",
    "Settings",
    "Tokens",
    "adapt_coefficient",
    "columns_derived_from",
    "columns_needed",
    "kl_estimate",
    "normaliser",
    "step_normaliser",
    "summarise",
]

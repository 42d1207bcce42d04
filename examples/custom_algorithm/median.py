"""GRPO with the group's median as the baseline instead of its mean: one function and one row.

A single high score raises the mean and lowers the advantages of all other rollouts. The median
barely changes.
"""

import torch

from streamrl.algorithms import ALGORITHMS
from streamrl.algorithms.table import variant


def subtract_median(columns, group_ids, settings):
    """Return score minus the median of the group's scores: [B]."""
    scores = columns["scores"]
    advantages = torch.empty_like(scores)
    for group in group_ids.unique():
        rows = group_ids == group
        advantages[rows] = scores[rows] - scores[rows].quantile(0.5)
    return advantages


MEDIAN_GRPO = variant(
    "median_grpo",
    "this example",
    ALGORITHMS["grpo"],
    advantages=subtract_median,
    defaults={"advantage_scale": "none"},
)

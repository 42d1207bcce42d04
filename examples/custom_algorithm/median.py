"""GRPO against the median of the group in the place of its mean: one function and one row.

A single lucky rollout pulls the mean up and makes all the others look bad; it does not move the
median.
"""

import torch

from streamrl.algorithms import ALGORITHMS
from streamrl.algorithms.table import variant


def against_the_median(columns, group_ids, settings):
    """Score minus the median of the group's scores: [B]."""
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
    advantages=against_the_median,
    defaults={"advantage_scale": "none"},
)

"""Sums that measure the difference between sampling policy and trained policy.

Quantiles of micro-batches do not add up, but counts do: log-ratios are counted in bins, narrow near
0 and wider farther out, and quantiles are read from the counts of the whole step.
"""

import torch
from torch import Tensor

from streamrl.algorithms.math.log_ratio_bounds import LOG_RATIO_LIMIT
from streamrl.algorithms.math.losses import probability_ratio
from streamrl.algorithms.math.masks import apply_mask, masked_row_sum
from streamrl.algorithms.math.step_metrics import LOG_BIN_WIDTH, MIN_LOG_RATIO, NUM_BINS_PER_SIDE


def divergence_sums(log_ratio: Tensor, loss_mask: Tensor) -> dict[str, Tensor]:
    """Return sums over a micro-batch from which `summarise_divergence` computes a step's metrics.

    `log_ratio` [B, T] is trained minus sampling policy, without gradient.
    """
    weights = apply_mask(probability_ratio(log_ratio), loss_mask)
    sequence_ratios = probability_ratio(masked_row_sum(log_ratio, loss_mask))[loss_mask.any(-1)]
    token_log_ratios = log_ratio[loss_mask]
    bins = torch.bincount(_bin_index(token_log_ratios), minlength=2 * NUM_BINS_PER_SIDE + 1)
    return {
        "ratio_sum": weights.sum(),
        "ratio_squared_sum": weights.square().sum(),
        "log_ratio_sum": token_log_ratios.sum(),
        "num_sequences": loss_mask.any(-1).sum(),
        "sequence_ratio_squared_sum": sequence_ratios.double().square().sum(),
    } | {f"log_ratio_bin_{i}": count for i, count in enumerate(bins)}


def _bin_index(log_ratio: Tensor) -> Tensor:
    """Return the index of each log-ratio's bin; log-ratio 0 is in the middle bin."""
    bounded = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    bin_position = (bounded.abs() / MIN_LOG_RATIO).log1p() / LOG_BIN_WIDTH
    return (bounded.sign() * bin_position).round().long() + NUM_BINS_PER_SIDE

"""How far the policy that sampled is from the one that is trained, in sums that add up.

Quantiles do not add up, counts do: the log-ratios are counted in bins, narrow around 0 and wider
the farther out, and a quantile is read off the counts of the whole step.
"""

import torch
from torch import Tensor

from streamrl.algorithms.math.log_ratio_bounds import LOG_RATIO_LIMIT
from streamrl.algorithms.math.losses import probability_ratio
from streamrl.algorithms.math.masks import apply_mask, masked_row_sum
from streamrl.algorithms.math.step_metrics import LOG_BIN_WIDTH, MIN_LOG_RATIO, NUM_BINS_PER_SIDE


def divergence_sums(log_ratio: Tensor, loss_mask: Tensor) -> dict[str, Tensor]:
    """Sums over tokens and rollouts of a micro-batch, for `summarise_divergence`.

    `log_ratio` [B, T] is trained minus sampling policy, without gradient.
    """
    weights = apply_mask(probability_ratio(log_ratio), loss_mask)
    whole = probability_ratio(masked_row_sum(log_ratio, loss_mask))[loss_mask.any(-1)]
    known = log_ratio[loss_mask]
    bins = torch.bincount(_bin_index(known), minlength=2 * NUM_BINS_PER_SIDE + 1)
    return {
        "ratio_sum": weights.sum(),
        "ratio_squared_sum": weights.square().sum(),
        "log_ratio_sum": known.sum(),
        "num_sequences": loss_mask.any(-1).sum(),
        "sequence_ratio_squared_sum": whole.double().square().sum(),
    } | {f"log_ratio_bin_{i}": count for i, count in enumerate(bins)}


def _bin_index(log_ratio: Tensor) -> Tensor:
    bounded = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    place = (bounded.abs() / MIN_LOG_RATIO).log1p() / LOG_BIN_WIDTH
    return (bounded.sign() * place).round().long() + NUM_BINS_PER_SIDE

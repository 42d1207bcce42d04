"""How far the policy that sampled is from the one that is trained, in sums that add up.

Quantiles do not add up, counts do: the log-ratios are counted in bins, narrow around 0 and wider
the farther out, and a quantile is read off the counts of the whole step.
"""

import itertools
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from streamrl.algorithms.losses import LOG_RATIO_LIMIT, ratio
from streamrl.algorithms.masks import keep, row_sum

HALF_BINS = 40
FINEST = 1e-3
"""Log-ratios below this are not told from 0."""
_STEP = math.log1p(LOG_RATIO_LIMIT / FINEST) / HALF_BINS
QUANTILES = {"p01": 0.01, "p50": 0.5, "p99": 0.99}


def divergence_sums(log_ratio: Tensor, loss_mask: Tensor) -> dict[str, Tensor]:
    """Sums over tokens and rollouts of a micro-batch, for `summarise_divergence`.

    `log_ratio` [B, T] is trained minus sampling policy, without gradient.
    """
    weights = keep(ratio(log_ratio), loss_mask)
    whole = ratio(row_sum(log_ratio, loss_mask))[loss_mask.any(-1)]
    known = log_ratio[loss_mask]
    bins = torch.bincount(_bin(known), minlength=2 * HALF_BINS + 1)
    return {
        "ratio_sum": weights.sum(),
        "ratio_squared_sum": weights.square().sum(),
        "log_ratio_sum": known.sum(),
        "num_sequences": loss_mask.any(-1).sum(),
        "sequence_ratio_squared_sum": whole.double().square().sum(),
    } | {f"log_ratio_bin_{i}": count for i, count in enumerate(bins)}


def summarise_divergence(sums: Mapping[str, float], num_tokens: float) -> dict[str, float]:
    """Metrics of a step from the sums of its micro-batches.

    ess is the effective share of the sample, (sum r)^2 / (n sum r^2); kl the divergence of the
    sampling policy from the trained one per token (k1, the mean of -log r); chi2 the mean of r^2
    minus 1, over tokens and over whole rollouts; ratio_* quantiles of r, to about a tenth of log r.
    """
    counts = [sums[f"log_ratio_bin_{i}"] for i in range(2 * HALF_BINS + 1)]
    return {
        "policy/ratio_mean": sums["ratio_sum"] / num_tokens,
        "policy/ess": sums["ratio_sum"] ** 2 / (num_tokens * sums["ratio_squared_sum"]),
        "correction/kl": -sums["log_ratio_sum"] / num_tokens,
        "correction/chi2_token": sums["ratio_squared_sum"] / num_tokens - 1,
        "correction/chi2_sequence": sums["sequence_ratio_squared_sum"] / sums["num_sequences"] - 1,
    } | {f"correction/ratio_{name}": _quantile(counts, q) for name, q in QUANTILES.items()}


def _bin(log_ratio: Tensor) -> Tensor:
    bounded = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    place = (bounded.abs() / FINEST).log1p() / _STEP
    return (bounded.sign() * place).round().long() + HALF_BINS


def _quantile(counts: list[float], q: float) -> float:
    """The ratio below which a share q of the tokens lies, at the middle of its bin."""
    reached = itertools.accumulate(counts)
    place = next(i for i, seen in enumerate(reached) if seen >= q * sum(counts)) - HALF_BINS
    size = FINEST * math.expm1(abs(place) * _STEP)
    return math.exp(math.copysign(size, place))

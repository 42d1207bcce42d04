"""Off-policy correction: weights and masks for tokens sampled by a different policy; its metrics.

Three policies assign a logprob to a token: the sampling policy (behavior: `generator_logprobs`, an
older version in another engine), the policy at the start of the step (proximal), and the trained
policy. The loss clips the trained policy against the proximal one and weighs tokens by proximal
over behavior: decoupled PPO (Hilton et al. 2021; AReaL, Fu et al. 2025).

    behavior --importance weights, rejection--> proximal --clip--> trained

Shapes: `log_ratio` [B, T] is proximal (or trained) minus behavior logprobs, `loss_mask` bool.
Weights and masks have no gradient; outside `loss_mask` they are 0 and false, whatever the input.
"""

import torch
from torch import Tensor

from streamrl.algorithms.math.tokens import (
    LOG_RATIO_LIMIT,
    apply_mask,
    masked_row_mean,
    masked_row_sum,
    probability_ratio,
)
from streamrl.algorithms.math.training_metrics import (
    LOG_BIN_WIDTH,
    MIN_LOG_RATIO,
    NUM_BINS_PER_SIDE,
)

MIN_ODDS = 1e-6
"""Smallest probability that `binary_kl` counts with, of a token and of all others."""


def importance_weights(
    log_ratio: Tensor,
    loss_mask: Tensor,
    *,
    level: str,
    low: float | None = None,
    high: float | None = None,
    mode: str = "truncate",
) -> Tensor:
    """Return importance weights of proximal over behavior policy, with bounded variance: [B, T].

    `level` "token" uses each token's ratio, "sequence" the product over its rollout, "geometric"
    the geometric mean. `mode` "truncate" clamps the weight to [low, high] (TIS: Yao et al. 2025),
    "mask" sets it to 0 outside (IcePop: Ling Team 2025); None is no bound.
    """
    masked_log_ratio = apply_mask(log_ratio.detach(), loss_mask)
    if level == "sequence":
        masked_log_ratio = masked_row_sum(masked_log_ratio, loss_mask).expand_as(masked_log_ratio)
    elif level == "geometric":
        masked_log_ratio = masked_row_mean(masked_log_ratio, loss_mask).expand_as(masked_log_ratio)
    weights = probability_ratio(masked_log_ratio)
    bounded = weights.clamp(low, high) if (low, high) != (None, None) else weights
    if mode == "mask":
        bounded = torch.where(bounded == weights, weights, 0.0)
    return apply_mask(bounded, loss_mask)


def weight_sums(weights: Tensor, loss_mask: Tensor, *, level: str) -> Tensor:
    """Return sum and number of a micro-batch's importance weights, for their mean over a step: [2].

    `weights` [B, T] of `importance_weights` at `level`: each token counts at "token", otherwise
    each row with tokens, whose weights are equal. The division by the step's mean is
    self-normalized importance sampling (Owen 2013, Monte Carlo theory, section 9.2).
    """
    counted = loss_mask
    if level != "token":
        weights, counted = masked_row_mean(weights, loss_mask), loss_mask.any(-1, keepdim=True)
    return torch.stack([apply_mask(weights, counted).double().sum(), counted.double().sum()])


def rejection_mask(  # noqa: PLR0913
    log_ratio: Tensor,
    loss_mask: Tensor,
    *,
    kind: str,
    level: str,
    low: float | None = None,
    high: float | None = None,
    sampling: Tensor | None = None,
) -> Tensor:
    """Return the mask of tokens close enough to train on: bool [B, T], a subset of `loss_mask`.

    `kind` "k1" bounds the probability ratio by [low, high]; "k2", "k3" and "binary_kl" are
    divergences with only the bound `high`. "binary_kl" is the larger one of the KL divergences,
    both ways, between the policies' distributions over two events: this token or another one. It
    reads `sampling` [B, T], the behavior logprobs. `level` "token" judges each token; "sum", "mean"
    and "max" judge whole rollouts: the mean of k1 is the geometric mean of the ratios, "max"
    requires all tokens to be within the bounds. Bounds are inclusive. Source: Liu et al. 2025 (When
    Speed Kills Stability); "binary_kl" Guo et al. 2026 (KPop).
    """
    masked_log_ratio = apply_mask(log_ratio.detach(), loss_mask)
    if kind == "binary_kl":
        assert sampling is not None
        x = _binary_kl(masked_log_ratio, apply_mask(sampling, loss_mask))
    else:
        x = _estimate_divergence(masked_log_ratio, kind)
    if level in ("sum", "mean"):
        x = (masked_row_sum if level == "sum" else masked_row_mean)(x, loss_mask)
    if kind == "k1":
        low, high = _log_bound(low), _log_bound(high)
    inside = torch.ones_like(x, dtype=torch.bool)
    if low is not None:
        inside = inside & (x >= low)
    if high is not None:
        inside = inside & (x <= high)
    if level == "max":
        inside = (inside | ~loss_mask).all(-1, keepdim=True)
    return inside & loss_mask


def off_policy_sequence_mask(
    log_ratio: Tensor, advantages: Tensor, loss_mask: Tensor, *, threshold: float
) -> Tensor:
    """Return `loss_mask` without tokens of negative advantage in unlikely rollouts: bool [B, T].

    A rollout is unlikely if its mean log-ratio is below -threshold. Source: DeepSeek-AI 2025
    (DeepSeek-V3.2).
    """
    is_unlikely = -masked_row_mean(log_ratio.detach(), loss_mask) > threshold
    return loss_mask & ~(is_unlikely & (advantages < 0))


def second_moment_limit(squares: Tensor, *, threshold: float) -> float:
    """Return the largest of `squares` [N] such that values up to it have a mean below `threshold`.

    Returns -1, below all values, if even the smallest is too large. Example: squares 1, 2, 9 with
    threshold 2 give 2 (means 1, 1.5, 4). Requires the squared log-ratios of all tokens of the step:
    the mean of a micro-batch differs. Source: Zheng et al. 2025 (M2PO).
    """
    ordered = squares.double().sort().values
    means = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1, device=ordered.device)
    # Equal values are kept or dropped together: the mean up to the last of them decides.
    last_of_ties = torch.ones(len(ordered), dtype=torch.bool, device=ordered.device)
    last_of_ties[:-1] = ordered[1:] > ordered[:-1]
    allowed = ordered[(means < threshold) & last_of_ties]
    return float(allowed.max()) if len(allowed) else -1.0


def high_entropy_limit(entropies: Tensor, *, share: float) -> float:
    """Return the entropy from which a `share` of `entropies` [N] lies, one value at least.

    Example: entropies 4, 1, 2, 3 with share 0.4 give 3, the second largest. Requires the entropies
    of all tokens of the step. Source: Wang et al. 2025 (Beyond the 80/20 Rule, arXiv:2506.01939).
    """
    if not len(entropies):
        return 0.0
    # Rounding may leave a product just below a whole number.
    index = int(share * (len(entropies) - 1) + 1e-9)
    return float(entropies.sort(descending=True).values[index])


def interpolated_proximal(
    logprobs: Tensor, generator_logprobs: Tensor, policy_version: Tensor, *, version: int
) -> Tensor:
    """Interpolate the proximal policy's logprobs instead of computing a forward pass: [B, T].

    A token sampled by version v_b and trained at `version` v gets the weight (v - v_b) / (v + 1 -
    v_b) of the current logprobs and the rest of the generator's; v_b are `policy_version` [B, T]. A
    token sampled by `version` itself keeps the generator's logprob. Example: v = 5, v_b = 3 give
    generator + 2/3 (current - generator). Source: Fu et al. 2025 (AReaL), log-linear.
    """
    staleness = (version - policy_version).clamp(min=0).to(logprobs.dtype)
    weight = staleness / (staleness + 1)
    return generator_logprobs + weight * (logprobs.detach() - generator_logprobs)


def divergence_sums(log_ratio: Tensor, loss_mask: Tensor) -> dict[str, Tensor]:
    """Return sums over a micro-batch from which `summarize_divergence` computes a step's metrics.

    `log_ratio` [B, T] is trained minus sampling policy, without gradient. Quantiles of
    micro-batches do not add up, but counts do: log-ratios are counted in bins, narrow near 0 and
    wider farther out, and quantiles are read from the counts of the whole step.
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
    """Return the index of each log-ratio's bin: 0 in the middle bin, NaN in the outermost."""
    bounded = log_ratio.nan_to_num(LOG_RATIO_LIMIT).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    bin_position = (bounded.abs() / MIN_LOG_RATIO).log1p() / LOG_BIN_WIDTH
    return (bounded.sign() * bin_position).round().long() + NUM_BINS_PER_SIDE


def _estimate_divergence(log_ratio: Tensor, kind: str) -> Tensor:
    """Return the estimate `kind` (k1, k2 or k3) of each token; k1 is the log-ratio itself."""
    if kind == "k2":
        return log_ratio.square() / 2
    return probability_ratio(log_ratio) - 1 - log_ratio if kind == "k3" else log_ratio


def _binary_kl(log_ratio: Tensor, sampling: Tensor) -> Tensor:
    """Return the larger KL divergence between the two policies' odds of each token: [B, T].

    Probabilities are bounded by MIN_ODDS on both sides, so that no divergence is infinite.
    """
    p, q = ((x.exp()).clamp(MIN_ODDS, 1 - MIN_ODDS) for x in (sampling + log_ratio, sampling))
    of_token, of_others = (p / q).log(), ((1 - p) / (1 - q)).log()
    return torch.maximum(p * of_token + (1 - p) * of_others, -q * of_token - (1 - q) * of_others)


def _log_bound(bound: float | None) -> float | None:
    """Return the logarithm of a bound on a ratio; None for no bound."""
    if bound is None:
        return None
    return float(torch.tensor(bound, dtype=torch.float64).log())

"""Metrics of a training step and the loss denominator of an update.

Both are computed from sums over micro-batches and ranks: plain floats, no tensors.
"""

import itertools
import math
from collections.abc import Mapping

from streamrl.algorithms.math.tokens import LOG_RATIO_LIMIT

NUM_BINS_PER_SIDE = 40
MIN_LOG_RATIO = 1e-3
"""Log-ratios below this count as 0."""
LOG_BIN_WIDTH = math.log1p(LOG_RATIO_LIMIT / MIN_LOG_RATIO) / NUM_BINS_PER_SIDE
QUANTILES = {"p01": 0.01, "p50": 0.5, "p99": 0.99}
SHARED_CRITIC_PREFIX = "critic_"
"""Prefix of the names of a critic's sums if policy and critic share a model."""
CRITIC_LOSS_METRICS = {"critic": "loss/value", "cost_critic": "loss/cost_value"}


def compute_loss_denominator(
    mode: str,
    *,
    num_tokens: float,
    num_sequences: float,
    num_groups: float,
    num_turns: float,
    max_length: int,
) -> float:
    """Return the divisor of the sum of `aggregate_loss_sum` over a whole update.

    Counts are over all micro-batches and ranks of the update: counted tokens, and rollouts, turns
    and groups with counted tokens. `max_length`, the longest possible completion, divides with
    seq-mean-token-sum-norm (Liu et al. 2025, Dr. GRPO); a constant, because the padded width would
    make the loss depend on the micro-batches. Raises KeyError on an unknown mode.
    """
    denominators = {
        "token-mean": num_tokens,
        "token-sum": 1,
        "turn-mean": num_turns,
        "prompt-mean": num_groups,
        "seq-mean-token-sum": num_sequences,
        "seq-mean-token-mean": num_sequences,
        "seq-mean-token-sum-norm": num_sequences * max_length,
    }
    return float(denominators[mode])


def summarize_policy(sums: Mapping[str, float], denominator: float) -> dict[str, float]:
    """Return the policy's metrics of a training step; empty if no token was sampled.

    `sums`: sums of `policy_loss` over the step; `denominator`: divisor of its losses. `loss/*` are
    the terms of the minimized loss, weights included; `policy/*` are means over tokens;
    `correction/*` measure the distance between sampling and trained policy. policy/kl_ref and
    loss/kl exist only with a reference, routing/mismatch_frac only if experts were compared.
    """
    num_sampled = sums.get("num_sampled", 0.0)
    if not num_sampled:
        return {}
    metrics = summarize_divergence(sums, num_sampled) | {
        "policy/clip_frac": sums["clipped_sum"] / num_sampled,
        "policy/entropy": sums["entropy_sum"] / num_sampled,
        "correction/rejected_frac": 1 - sums["num_kept"] / num_sampled,
    }
    if "right_pairs" in sums:
        metrics["policy/pair_accuracy"] = sums["right_pairs"] / sums["num_rollouts"]
    if sums.get("num_routed"):
        metrics["routing/mismatch_frac"] = sums["num_rerouted"] / sums["num_routed"]
    if "kl_ref_sum" in sums:
        metrics["policy/kl_ref"] = sums["kl_ref_sum"] / num_sampled
    if not denominator:
        return metrics
    parts = [part for part in ("policy", "entropy", "kl") if f"loss_{part}_sum" in sums]
    return metrics | {
        "correction/weight_mean": sums["weight_sum"] / sums["num_kept"],
        **{f"loss/{part}": sums[f"loss_{part}_sum"] / denominator for part in parts},
    }


def summarize_divergence(sums: Mapping[str, float], num_tokens: float) -> dict[str, float]:
    """Return metrics of the distance between sampling and trained policy in a training step.

    r is the probability ratio of trained over sampling policy. ess is the effective share of the
    sample, (sum r)^2 / (n sum r^2); kl the divergence of the sampling policy from the trained one
    per token (k1, the mean of -log r); chi2 the mean of r^2 minus 1, over tokens and over whole
    rollouts; ratio_* quantiles of r, exact to about a tenth of log r.
    """
    counts = [sums[f"log_ratio_bin_{i}"] for i in range(2 * NUM_BINS_PER_SIDE + 1)]
    return {
        "policy/ratio_mean": sums["ratio_sum"] / num_tokens,
        "policy/ess": sums["ratio_sum"] ** 2 / (num_tokens * sums["ratio_squared_sum"]),
        "correction/kl": -sums["log_ratio_sum"] / num_tokens,
        "correction/chi2_token": sums["ratio_squared_sum"] / num_tokens - 1,
        "correction/chi2_sequence": sums["sequence_ratio_squared_sum"] / sums["num_sequences"] - 1,
    } | {f"correction/ratio_{name}": _read_quantile(counts, q) for name, q in QUANTILES.items()}


def _read_quantile(counts: list[float], q: float) -> float:
    """Return the ratio below which a share `q` of the tokens lies, at the middle of its bin.

    `counts`: tokens in each bin of the log-ratio.
    """
    cumulative = itertools.accumulate(counts)
    bin_index = (
        next(i for i, count in enumerate(cumulative) if count >= q * sum(counts))
        - NUM_BINS_PER_SIDE
    )
    log_ratio = MIN_LOG_RATIO * math.expm1(abs(bin_index) * LOG_BIN_WIDTH)
    return math.exp(math.copysign(log_ratio, bin_index))


def summarize_critic(sums: Mapping[str, float], role: str) -> dict[str, float]:
    """Return a critic's metrics of a training step; empty if the critic trained no token.

    `sums`: sums of `critic_token_losses` over the step; `role`: critic or cost_critic.
    explained_variance is 1 - var(returns - values) / var(returns): 1 for a perfect critic, 0 for a
    critic that predicts only the mean.
    """
    count = sums.get("num_tokens", 0.0)
    if not count:
        return {}
    metrics = {
        CRITIC_LOSS_METRICS[role]: sums["loss_value_sum"] / count,
        f"{role}/value_mean": sums["value_sum"] / count,
        f"{role}/clip_frac": sums["value_clipped_sum"] / count,
    }
    variance = _compute_variance(sums, "return", count)
    if variance > 0:
        metrics[f"{role}/explained_variance"] = (
            1 - _compute_variance(sums, "error", count) / variance
        )
    return metrics


def _compute_variance(sums: Mapping[str, float], name: str, count: float) -> float:
    """Return the variance of the values with this name, from their sums and `count`."""
    mean = sums[f"{name}_sum"] / count
    return max(sums[f"{name}_squared_sum"] / count - mean * mean, 0.0)

"""Basics of token maths: masked reductions, ratios of probabilities, the KL divergence.

Reductions are safe for NaN outside the mask.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def apply_mask(values: "Tensor", mask: "Tensor") -> "Tensor":
    """Return `values` inside the mask, 0 outside; unlike a product, this drops NaN."""
    return values.where(mask, 0.0)


def masked_row_sum(values: "Tensor", mask: "Tensor") -> "Tensor":
    """Return each row's sum over the mask: [B, T] -> [B, 1]."""
    return apply_mask(values, mask).sum(-1, keepdim=True)


def masked_row_mean(values: "Tensor", mask: "Tensor") -> "Tensor":
    """Return each row's mean over the mask, 0 if the row's mask is empty: [B, T] -> [B, 1]."""
    return masked_row_sum(values, mask) / mask.sum(-1, keepdim=True).clamp(min=1)


LOG_RATIO_LIMIT = 20.0
"""Log-ratio from which `probability_ratio` is linear: float32 holds sums of squares up to there."""
MAX_RELATIVE_ERROR = 0.2
"""Relative deviation from kl_target beyond which the update of kl_coef is clamped."""
KL_HORIZON = 10_000
"""Rollouts over which the KL coefficient changes by at most 20 %."""


def probability_ratio(log_ratio: "Tensor") -> "Tensor":
    """Return exp(log_ratio), beyond L = LOG_RATIO_LIMIT its tangent exp(L) (1 + log_ratio - L).

    exp() alone overflows in float32, and so do squares of ratios and of gradients. The tangent
    keeps the gradient's direction, which a clamp would set to 0. Small ratios underflow to 0.
    """
    excess = (log_ratio - LOG_RATIO_LIMIT).relu()
    return log_ratio.clamp(max=LOG_RATIO_LIMIT).exp() * (1 + excess)


def _ratio_minus_one(log_ratio: "Tensor") -> "Tensor":
    """Return probability_ratio(log_ratio) - 1, exact for small log-ratios, too."""
    excess = (log_ratio - LOG_RATIO_LIMIT).relu()
    return log_ratio.clamp(max=LOG_RATIO_LIMIT).expm1() * (1 + excess) + excess


def kl_estimate(logprobs: "Tensor", ref_logprobs: "Tensor", kind: str) -> "Tensor":
    """Estimate KL(policy || reference) at tokens sampled from the policy: same shape.

    With x = logprobs - ref_logprobs: k1 is x, k2 is x^2 / 2, k3 is exp(-x) + x - 1, abs is
    |x|. A trailing + uses the value of the estimator and the gradient of k2, which on-policy
    is the gradient of the KL divergence (k2+ equals k2). The gradient of k1 is 0 in expectation,
    and that of k3 belongs to a different divergence.

    Source: Schulman 2020, "Approximating KL divergence". Raises ValueError on an unknown kind.
    """
    x = logprobs - ref_logprobs
    if kind.endswith("+"):
        k2 = x.square() / 2
        return _estimate_kl(x, kind.removesuffix("+")).detach() + (k2 - k2.detach())
    return _estimate_kl(x, kind)


def _estimate_kl(x: "Tensor", kind: str) -> "Tensor":
    """Return the estimate k1, k2, k3 or abs of log-ratios `x`."""
    if kind == "k2":
        return x.square() / 2
    if kind == "k3":
        return _ratio_minus_one(-x) + x
    if kind not in ("k1", "abs"):
        raise ValueError(f"kl kind {kind!r}: no such estimator")
    return x.abs() if kind == "abs" else x


def adapt_kl_coef(coef: float, kl: float, *, target: float, num_rollouts: float) -> float:
    """Return the KL coefficient of the next step, given this step's mean KL divergence per token.

    The coefficient grows if `kl` is above `target` and shrinks if below, by at most 20 % over
    KL_HORIZON rollouts. Source: Ziegler et al. 2019, section 2.2.
    """
    error = min(max(kl / target - 1, -MAX_RELATIVE_ERROR), MAX_RELATIVE_ERROR)
    return coef * (1 + error * min(num_rollouts / KL_HORIZON, 1))

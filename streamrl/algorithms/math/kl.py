"""Estimates of the divergence from a reference, and what holds it at a target."""

from typing import TYPE_CHECKING

from streamrl.algorithms.math.log_ratio_bounds import LOG_RATIO_LIMIT

if TYPE_CHECKING:
    from torch import Tensor

K3_LIMIT = 10.0
KL_KINDS = ("k1", "k2", "k3", "abs", "k1+", "k2+", "k3+", "abs+")
MAX_RELATIVE_ERROR = 0.2
"""How far one step may be from the target, in parts of it, for the coefficient to follow."""


def kl_estimate(logprobs: "Tensor", ref_logprobs: "Tensor", kind: str) -> "Tensor":
    """Estimate of KL(policy || reference) at tokens sampled from the policy: same shape.

    With x = logprobs - ref_logprobs: k1 x, k2 x^2 / 2, k3 exp(-x) + x - 1 (at most 10), abs |x|.
    A trailing + takes the value of that estimate and the gradient of k2, which on-policy is the
    gradient of the divergence (k2+ is k2); that of k1 is 0 on average, that of k3 is another
    divergence's.
    Source: Schulman 2020, "Approximating KL divergence". Raises ValueError on an unknown kind.
    """
    if kind not in KL_KINDS:
        raise ValueError(f"kl kind {kind!r}: no such estimator")
    x = logprobs - ref_logprobs
    if kind.endswith("+"):
        k2 = x.square() / 2
        return _estimate_kl(x, kind.removesuffix("+")).detach() + (k2 - k2.detach())
    return _estimate_kl(x, kind)


def _estimate_kl(x: "Tensor", kind: str) -> "Tensor":
    if kind == "k2":
        return x.square() / 2
    if kind == "k3":
        bounded = x.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        return ((-bounded).exp() + bounded - 1).clamp(max=K3_LIMIT)
    return x.abs() if kind == "abs" else x


def adapt_kl_coef(
    coef: float, kl: float, *, target: float, horizon: float, num_rollouts: int
) -> float:
    """The coefficient of the next step, from the divergence `kl` that this one showed.

    It grows where `kl` is above `target` and shrinks below, by at most a fifth in `horizon`
    rollouts. Source: Ziegler et al. 2019, section 2.2.
    """
    error = min(max(kl / target - 1, -MAX_RELATIVE_ERROR), MAX_RELATIVE_ERROR)
    return coef * (1 + error * num_rollouts / horizon)

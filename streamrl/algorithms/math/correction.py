"""Correction for tokens that another policy sampled than the one that is trained.

Three policies sign a token: the one that sampled it (behaviour: `generator_logprobs`, an older
version in another engine), the one at the start of the step (proximal) and the one in training.
The loss clips the last against the proximal policy and weighs by proximal over behaviour: decoupled
PPO (Hilton et al. 2021, AReaL: Fu et al. 2025). What is here weighs and rejects, and tells how far
apart they are.

Shapes: `log_ratio` [B, T] is proximal (or trained) minus behaviour logprobs, `loss_mask` bool.
Weights and masks have no gradient; outside `loss_mask` they are 0 and false whatever stands there.
"""

import torch
from torch import Tensor

from streamrl.algorithms.math.log_ratio_bounds import LOG_RATIO_LIMIT
from streamrl.algorithms.math.losses import probability_ratio
from streamrl.algorithms.math.masks import apply_mask, masked_row_mean, masked_row_sum
from streamrl.algorithms.options import (
    REJECTION_KINDS,
    REJECTION_LEVELS,
    WEIGHT_LEVELS,
    WEIGHT_MODES,
)


def importance_weights(
    log_ratio: Tensor,
    loss_mask: Tensor,
    *,
    level: str,
    low: float | None = None,
    high: float | None = None,
    mode: str = "truncate",
) -> Tensor:
    """Weights that make up for the behaviour policy, with bounded variance: [B, T].

    `level` "token" takes each token's ratio, "sequence" the product over its rollout, "geometric"
    the geometric mean. `mode` "truncate" holds the weight within [low, high] (TIS: Yao et al.
    2025), "mask" makes it 0 outside of them (IcePop: Ling Team 2025); None is no bound. Raises
    ValueError on an unknown level or mode.
    """
    if level not in WEIGHT_LEVELS:
        raise ValueError(f"level={level!r}: must be one of {', '.join(WEIGHT_LEVELS)}")
    if mode not in WEIGHT_MODES:
        raise ValueError(f"mode={mode!r}: must be one of {', '.join(WEIGHT_MODES)}")
    known = apply_mask(log_ratio.detach(), loss_mask)
    if level == "sequence":
        known = masked_row_sum(known, loss_mask).expand_as(known)
    elif level == "geometric":
        known = masked_row_mean(known, loss_mask).expand_as(known)
    weights = probability_ratio(known)
    bounded = weights.clamp(low, high) if (low, high) != (None, None) else weights
    if mode == "mask":
        bounded = torch.where(bounded == weights, weights, 0.0)
    return apply_mask(bounded, loss_mask)


def rejection_mask(
    log_ratio: Tensor,
    loss_mask: Tensor,
    *,
    kind: str,
    level: str,
    low: float | None = None,
    high: float | None = None,
) -> Tensor:
    """The tokens that are near enough to be trained on: bool [B, T], part of `loss_mask`.

    `kind` "k1" bounds the probability ratio by [low, high]; "k2" and "k3" are divergences, which
    only `high` bounds. `level` "token" judges each token; the others judge whole rollouts by the
    "sum", "mean" or "max" of its tokens: the mean of k1 is the geometric mean of the ratio, its max
    asks that all of them are within. Bounds count as inside. Source: Liu et al. 2025 (When Speed
    Kills Stability). Raises ValueError on an unknown kind or level, or `low` for a divergence.
    """
    if kind not in REJECTION_KINDS:
        raise ValueError(f"kind={kind!r}: must be one of {', '.join(REJECTION_KINDS)}")
    if level not in REJECTION_LEVELS:
        raise ValueError(f"level={level!r}: must be one of {', '.join(REJECTION_LEVELS)}")
    if kind != "k1" and low is not None:
        raise ValueError(f"low={low}: {kind} is a divergence, which only high bounds")
    x = _estimate_divergence(apply_mask(log_ratio.detach(), loss_mask), kind)
    if level in ("sum", "mean"):
        x = (masked_row_sum if level == "sum" else masked_row_mean)(x, loss_mask)
    bounds = [_log_bound(bound) if kind == "k1" else bound for bound in (low, high)]
    inside = torch.ones_like(x, dtype=torch.bool)
    if bounds[0] is not None:
        inside = inside & (x >= bounds[0])
    if bounds[1] is not None:
        inside = inside & (x <= bounds[1])
    if level == "max":
        inside = (inside | ~loss_mask).all(-1, keepdim=True)
    return inside & loss_mask


def off_policy_sequence_mask(
    log_ratio: Tensor, advantages: Tensor, loss_mask: Tensor, *, threshold: float
) -> Tensor:
    """All but the tokens of bad rollouts the policy has left behind: bool [B, T].

    A token is left out if its advantage is negative and its rollout has become less likely than
    exp(-threshold) per token, on average. Source: DeepSeek-AI 2025 (DeepSeek-V3.2).
    """
    left_behind = -masked_row_mean(log_ratio.detach(), loss_mask) > threshold
    return loss_mask & ~(left_behind & (advantages < 0))


def second_moment_mask(log_ratio: Tensor, loss_mask: Tensor, *, threshold: float) -> Tensor:
    """As many tokens as can stay with a mean squared log-ratio below `threshold`: bool [B, T].

    The farthest go first; of the whole step, as the mean of a chunk is another one. Source: Zheng
    et al. 2025 (M2PO).
    """
    squares = apply_mask(log_ratio.detach().double(), loss_mask).square()
    limit = second_moment_limit(squares[loss_mask], threshold=threshold)
    return loss_mask & (squares <= limit)


def second_moment_limit(squares: Tensor, *, threshold: float) -> float:
    """The largest of `squares` [N] such that those up to it have a mean below `threshold`.

    Below all of them, -1, if even the smallest is too large.
    """
    ordered = squares.double().sort().values
    means = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1, device=ordered.device)
    # Ties stand or fall together: the mean up to the last of them decides.
    last_of_ties = torch.ones(len(ordered), dtype=torch.bool, device=ordered.device)
    last_of_ties[:-1] = ordered[1:] > ordered[:-1]
    allowed = ordered[(means < threshold) & last_of_ties]
    return float(allowed.max()) if len(allowed) else -1.0


def interpolated_proximal(
    logprobs: Tensor, generator_logprobs: Tensor, policy_version: Tensor, *, version: int
) -> Tensor:
    """The proximal policy's logprobs without a forward pass, between the two known: [B, T].

    A token sampled by version v_b, trained towards `version` + 1, is (version - v_b) of (version +
    1 - v_b) steps along the line between the logprobs; v_b are `policy_version` [B, T]. One sampled
    by `version` itself has its generator's. Source: Fu et al. 2025 (AReaL), log-linear.
    """
    behind = (version - policy_version).clamp(min=0).to(logprobs.dtype)
    share = behind / (behind + 1)
    return generator_logprobs + share * (logprobs.detach() - generator_logprobs)


def _estimate_divergence(log_ratio: Tensor, kind: str) -> Tensor:
    x = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if kind == "k2":
        return x.square() / 2
    return x.exp() - 1 - x if kind == "k3" else x


def _log_bound(bound: float | None) -> float | None:
    if bound is None:
        return None
    return float(torch.tensor(bound, dtype=torch.float64).log())

"""Token losses, and apart from them how they become one number.

Shapes: B rows (rollouts), T positions, V vocabulary. `log_ratio` is the trained policy's logprobs
minus those of the policy it is compared with, `advantages` [B, T] or [B, 1], `loss_mask` bool. A
loss is per token, [B, T], with the gradient through `log_ratio` or `logprobs`; a position that
`loss_mask` leaves out never counts, but must hold numbers: NaN is masked before it comes here.

The reduction is in two halves. `aggregate_loss_sum` adds up what a micro-batch contributes;
`normaliser` is the one number the sum over a whole step is divided by. So a step may be cut into
micro-batches and ranks at will: their sums add up to the same loss and the same gradient.
"""

import torch
from torch import Tensor

from streamrl.algorithms.math.log_ratio_bounds import LOG_RATIO_LIMIT
from streamrl.algorithms.math.masks import apply_mask, masked_row_mean
from streamrl.algorithms.math.step_metrics import loss_denominator
from streamrl.algorithms.options import validate_aggregation

DIVERGENCE_KINDS = ("tv", "kl")
SEQUENCE_LOG_RATIO_LIMIT = 10.0
"""The same for the ratio of a whole sequence."""


def probability_ratio(log_ratio: Tensor) -> Tensor:
    """Probability ratio of two policies, kept finite: same shape."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def outside_clip_mask(
    log_ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """Where the clip takes the gradient away (the ratio has gone its way already): bool [B, T]."""
    r = probability_ratio(log_ratio)
    too_high = (advantages > 0) & (r > 1 + clip_high)
    return too_high | ((advantages < 0) & (r < 1 - clip_low))


def clipped_surrogate_loss(
    log_ratio: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Tensor:
    """The clipped policy loss, max(-A r, -A clip(r, 1 - low, 1 + high)): [B, T].

    With `dual_clip` c a loss under a negative advantage is at most -A c. Source: Schulman et al.
    2017 (PPO), equation 7; low != high: Yu et al. 2025 (DAPO); c: Ye et al. 2020.
    """
    return _clip_loss(probability_ratio(log_ratio), advantages, clip_low, clip_high, dual_clip)


def sequence_clipped_surrogate_loss(
    log_ratio: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> Tensor:
    """`clipped_surrogate` with one ratio per rollout, the geometric mean of its tokens': [B, T].

    The ratio of token t is that of the rollout in value and token t's own in gradient (GSPO-token);
    under advantages that are equal over a rollout the sum over its tokens is GSPO's. Source: Zheng
    et al. 2025 (GSPO).
    """
    return _clip_loss(_sequence_ratio(log_ratio, loss_mask), advantages, clip_low, clip_high, None)


def clipped_importance_loss(
    log_ratio: Tensor,
    advantages: Tensor,
    *,
    logprobs: Tensor,
    clip_low: float,
    clip_high: float,
) -> Tensor:
    """-clip(r, 1 - low, 1 + high) A log pi, with no gradient through the ratio: [B, T].

    No token loses its gradient, its weight is bounded. Source: MiniMax 2025 (CISPO, MiniMax-M1).
    """
    weights = probability_ratio(log_ratio).clamp(1 - clip_low, 1 + clip_high)
    return -weights.detach() * advantages * logprobs


def geometric_mean_loss(
    log_ratio: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> Tensor:
    """-A times the geometric mean of a rollout's clipped ratios, on each of its tokens: [B, T].

    Clipped in log space, to [-low, high], where the clip makes the objective smaller. A is the mean
    of the rollout's advantages. With seq-mean-token-mean this is the paper's loss. Source: Zhao et
    al. 2025 (GMPO).
    """
    clipped = log_ratio.clamp(-clip_low, clip_high)
    pessimistic = torch.where(
        advantages > 0,
        torch.minimum(log_ratio, clipped),
        torch.maximum(log_ratio, clipped),
    )
    mean = masked_row_mean(pessimistic, loss_mask)
    return (
        -masked_row_mean(advantages.expand_as(log_ratio), loss_mask) * probability_ratio(mean)
    ).expand_as(log_ratio)


def soft_adaptive_loss(
    log_ratio: Tensor,
    advantages: Tensor,
    *,
    temperature_positive: float = 1.0,
    temperature_negative: float = 1.05,
) -> Tensor:
    """-A sigmoid(tau (r - 1)) 4 / tau: a soft gate in the place of the clip: [B, T].

    tau is `temperature_positive` under a positive advantage, else `temperature_negative`; at r = 1
    the gradient is that of the unclipped loss. Source: Gao et al. 2025 (SAPO).
    """
    # Not torch.where of two numbers: that is float32 whatever the advantages are.
    tau = torch.full_like(advantages, temperature_negative)
    tau = tau.masked_fill(advantages > 0, temperature_positive)
    return -advantages * torch.sigmoid(tau * (probability_ratio(log_ratio) - 1)) * 4 / tau


def covariance_clip_loss(
    log_ratio: Tensor, advantages: Tensor, *, chosen: Tensor, clip_low: float, clip_high: float
) -> Tensor:
    """`clipped_surrogate`, and nothing at all on the `chosen` tokens: [B, T].

    `chosen` bool [B, T] is `covariance_band`'s. Source: Cui et al. 2025 (Clip-Cov).
    """
    loss = clipped_surrogate_loss(log_ratio, advantages, clip_low=clip_low, clip_high=clip_high)
    return torch.where(chosen, 0.0, loss)


def covariance_kl_loss(
    log_ratio: Tensor, advantages: Tensor, *, chosen: Tensor, coef: float
) -> Tensor:
    """The unclipped loss, and on the `chosen` tokens `coef` |log_ratio| on top of it: [B, T].

    `chosen` bool [B, T] is `covariance_top`'s. Source: Cui et al. 2025 (KL-Cov).
    """
    return -advantages * probability_ratio(log_ratio) + torch.where(
        chosen, coef * log_ratio.abs(), 0.0
    )


def token_covariances(logprobs: Tensor, advantages: Tensor, loss_mask: Tensor) -> Tensor:
    """(A - mean A) (log pi - mean log pi), means over all tokens that count: [B, T], 0 elsewhere.

    Of the whole step: the covariance of a chunk is another one.
    """
    count = loss_mask.sum().clamp(min=1)
    centred = []
    for values in (advantages.expand_as(logprobs).double(), logprobs.double()):
        kept = apply_mask(values, loss_mask)
        centred.append(kept - kept.sum() / count)
    return apply_mask(centred[0] * centred[1], loss_mask)


def covariance_band_mask(
    logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    low: float,
    high: float,
    fraction: float,
    lots: Tensor | None = None,
) -> Tensor:
    """A random `fraction` of all tokens, from those whose covariance is in (low, high): [B, T].

    At least one, if there is one; those with the smallest of `lots` [B, T], which are drawn here
    unless they are given. Source: Cui et al. 2025 (Clip-Cov). Raises ValueError on an empty band.
    """
    if low >= high:
        raise ValueError(f"covariances from {low} to {high}: there are none")
    values = token_covariances(logprobs, advantages, loss_mask)
    inside = ((values > low) & (values < high) & loss_mask).flatten().nonzero()[:, 0]
    count = max(1, int(fraction * int(loss_mask.sum())))
    drawn = torch.rand(loss_mask.shape, device=loss_mask.device) if lots is None else lots
    order = drawn.flatten()[inside].argsort(stable=True)[:count]
    chosen = torch.zeros(loss_mask.numel(), dtype=torch.bool, device=loss_mask.device)
    chosen[inside[order]] = True
    return chosen.view_as(loss_mask)


def covariance_top_mask(
    logprobs: Tensor, advantages: Tensor, loss_mask: Tensor, *, fraction: float
) -> Tensor:
    """The `fraction` of all tokens with the largest covariance, at least one: bool [B, T].

    Source: Cui et al. 2025 (KL-Cov).
    """
    values = token_covariances(logprobs, advantages, loss_mask)[loss_mask]
    chosen = torch.zeros_like(loss_mask)
    if len(values):
        count = max(1, int(fraction * len(values)))
        picked = torch.zeros(len(values), dtype=torch.bool, device=values.device)
        picked[values.topk(count).indices] = True
        chosen[loss_mask] = picked
    return chosen


def divergence_masked_loss(
    log_ratio: Tensor,
    advantages: Tensor,
    *,
    logprobs: Tensor,
    kind: str,
    low: float,
    high: float,
    cap: float,
) -> Tensor:
    """-min(r, cap) A log pi where the token's probability may still move, else 0: [B, T].

    No gradient through the ratio. A token is left out if its update would take it further and it
    has come too far: beyond `high` under a positive advantage, `low` otherwise. `kind` "tv"
    measures the difference of the two probabilities, "kl" the divergence of the two choices "this
    token or another". Source: Qi et al. 2026 (DPPO). Raises ValueError on an unknown `kind`.
    """
    moving = _trainable_mask(log_ratio.detach(), advantages, logprobs.detach(), kind, (low, high))
    weights = probability_ratio(log_ratio).detach().clamp(max=cap)
    return torch.where(moving, -weights * advantages * logprobs, 0.0)


def _trainable_mask(
    log_ratio: Tensor, advantages: Tensor, logprobs: Tensor, kind: str, bounds: tuple[float, float]
) -> Tensor:
    if kind not in DIVERGENCE_KINDS:
        raise ValueError(f"kind={kind!r}: must be one of {', '.join(DIVERGENCE_KINDS)}")
    p, q = logprobs.exp(), (logprobs - log_ratio).exp()
    low, high = bounds
    if kind == "tv":
        return torch.where(advantages > 0, p - q <= high, p - q >= -low)
    # 1e-8: a token that was certain leaves nothing for the others.
    others = (1 - q) * torch.log((1 - q + 1e-8) / (1 - p + 1e-8))
    divergence = -q * log_ratio + others
    rising = (divergence <= high) | (p <= q)
    return torch.where(advantages > 0, rising, (divergence <= low) | (p >= q))


def score_function_loss(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """-A log pi, the loss of REINFORCE: [B, T]. Source: Williams 1992."""
    return -advantages * logprobs


def value_loss(
    values: Tensor, returns: Tensor, old_values: Tensor, *, clip: float | None = None
) -> Tensor:
    """Half the squared error of the critic, [B, T]; with `clip` the larger of two such.

    The other is that of `values` held within `clip` of `old_values`. Source: Schulman et al. 2017
    (PPO), equation 9; clipping as in its published code.
    """
    loss = (values - returns).square()
    if clip is not None:
        near = old_values + (values - old_values).clamp(-clip, clip)
        loss = torch.maximum(loss, (near - returns).square())
    return loss / 2


def entropy_from_logits(logits: Tensor) -> Tensor:
    """Entropy in nats of the distributions softmax(logits): [..., V] -> [...]."""
    # Of a token that cannot be (-inf), 0 times the logprob is to be 0.
    logprobs = logits.log_softmax(-1).clamp(min=torch.finfo(logits.dtype).min)
    return -(logprobs.exp() * logprobs).sum(-1)


def aggregate_loss(
    token_loss: Tensor,
    loss_mask: Tensor,
    *,
    mode: str,
    num_tokens: int | None = None,
    num_sequences: int | None = None,
    max_length: int | None = None,
    group_ids: Tensor | None = None,
) -> Tensor:
    """One loss from those of the tokens: `aggregate_loss_sum` over `normaliser`.

    The counts are of the whole step; left out, they are those of this batch (rows without a token
    that counts are no sequences). prompt-mean needs `group_ids` [B], and the batch to hold its
    groups whole. 0 where nothing counts. Raises what `normaliser` and `aggregate_loss_sum` raise.
    """
    num_groups, group_tokens = None, None
    if group_ids is not None:
        _, index = torch.unique(group_ids, return_inverse=True)
        counts = torch.zeros(len(group_ids), dtype=torch.long, device=loss_mask.device)
        counts = counts.index_add(0, index, loss_mask.sum(-1))
        num_groups, group_tokens = int((counts > 0).sum()), counts[index]
    if num_tokens is None:
        num_tokens = int(loss_mask.sum())
    if num_sequences is None:
        num_sequences = int(loss_mask.any(-1).sum())
    divisor = loss_denominator(
        mode,
        num_tokens=num_tokens,
        num_sequences=num_sequences,
        num_groups=num_groups,
        max_length=max_length,
    )
    summed = aggregate_loss_sum(token_loss, loss_mask, mode=mode, group_tokens=group_tokens)
    return summed / (divisor or 1.0)


def aggregate_loss_sum(
    token_loss: Tensor, loss_mask: Tensor, *, mode: str, group_tokens: Tensor | None = None
) -> Tensor:
    """What a batch adds to the sum that `normaliser` divides: scalar.

    `token_loss` [B, T] or what broadcasts to it. Sum over tokens; in seq-mean-token-mean every row
    is divided by its number of tokens first, in prompt-mean by `group_tokens` [B], the number of
    its whole group. Raises ValueError on an unknown mode, or where prompt-mean lacks them.
    """
    validate_aggregation(mode)
    kept = apply_mask(token_loss, loss_mask)
    if mode == "seq-mean-token-mean":
        return (kept.sum(-1) / loss_mask.sum(-1).clamp(min=1)).sum()
    if mode == "prompt-mean":
        if group_tokens is None:
            raise ValueError("prompt-mean needs the groups: the tokens of each row's whole group")
        return (kept.sum(-1) / group_tokens.clamp(min=1)).sum()
    return kept.sum()


def _clip_loss(
    r: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> Tensor:
    clipped = -advantages * r.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(-advantages * r, clipped)
    if dual_clip is None:
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -advantages * dual_clip), loss)


def _sequence_ratio(log_ratio: Tensor, loss_mask: Tensor) -> Tensor:
    """A rollout's geometric mean ratio, with each token's own gradient."""
    own = log_ratio - log_ratio.detach()
    mean = masked_row_mean(log_ratio.detach(), loss_mask)
    return (mean + own).clamp(max=SEQUENCE_LOG_RATIO_LIMIT).exp()

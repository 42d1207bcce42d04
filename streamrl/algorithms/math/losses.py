"""Token losses of all algorithms, and their aggregation.

Shapes: B rows (rollouts), T positions, V vocabulary. `log_ratio` is the trained policy's logprobs
minus those of the policy to compare with, `advantages` [B, T] or [B, 1], `loss_mask` bool. A loss
is per token, [B, T], with gradients through `log_ratio` or `logprobs`. Positions outside
`loss_mask` have no effect but must be finite: callers mask NaN.

Aggregation has two halves. `aggregate_loss_sum` sums the contribution of a micro-batch;
`compute_loss_denominator` returns the divisor for the sum over a whole update. So the
division of a step into micro-batches and ranks changes neither the loss nor the gradient.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from streamrl.algorithms.math.tokens import (
    apply_mask,
    masked_row_mean,
    masked_row_sum,
    probability_ratio,
)


def outside_clip_mask(
    log_ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """Return the tokens whose gradient PPO's clip removes: bool [B, T].

    True if the ratio is beyond the clip in the direction that the advantage favors.
    """
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
    """Return the clipped policy loss, max(-A r, -A clip(r, 1 - low, 1 + high)): [B, T].

    With `dual_clip` c the loss under a negative advantage is at most -A c. Example with low = high
    = 0.2: A = 1, r = 1.5 gives -1.2 without gradient; A = -1, r = 1.5 gives 1.5 with gradient.
    Source: Schulman et al. 2017 (PPO), equation 7; low != high: Yu et al. 2025 (DAPO); c: Ye et al.
    2020.
    """
    return _clip_loss(probability_ratio(log_ratio), advantages, clip_low, clip_high, dual_clip)


def sequence_clipped_surrogate_loss(
    log_ratio: Tensor, advantages: Tensor, loss_mask: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """Return the clipped loss with a ratio per rollout, the geometric mean over its tokens: [B, T].

    The ratio at token t has the rollout's value and token t's gradient (GSPO-token). If advantages
    are equal over a rollout, the sum over its tokens is GSPO's loss. Source: Zheng et al. 2025
    (GSPO).
    """
    return _clip_loss(_sequence_ratio(log_ratio, loss_mask), advantages, clip_low, clip_high, None)


def clipped_importance_loss(
    log_ratio: Tensor, advantages: Tensor, *, logprobs: Tensor, clip_low: float, clip_high: float
) -> Tensor:
    """Return -clip(r, 1 - low, 1 + high) A log pi, without gradient through the ratio: [B, T].

    Every token keeps its gradient, with a bounded weight. Source: MiniMax 2025 (CISPO, MiniMax-M1).
    """
    weights = probability_ratio(log_ratio).clamp(1 - clip_low, 1 + clip_high)
    return -weights.detach() * advantages * logprobs


def geometric_mean_loss(
    log_ratio: Tensor, advantages: Tensor, loss_mask: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """Return -A times the geometric mean of a rollout's clipped ratios, on each token: [B, T].

    Ratios are clipped in log space, to [-low, high], where clipping lowers the objective. A is the
    mean of the rollout's advantages. With seq-mean-token-mean this is the paper's loss. Source:
    Zhao et al. 2025 (GMPO).
    """
    clipped = log_ratio.clamp(-clip_low, clip_high)
    pessimistic = torch.where(
        advantages > 0, torch.minimum(log_ratio, clipped), torch.maximum(log_ratio, clipped)
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
    """Return -A sigmoid(tau (r - 1)) 4 / tau, with a soft gate instead of the clip: [B, T].

    tau is `temperature_positive` under a positive advantage, else `temperature_negative`. At r = 1
    the gradient equals that of the unclipped loss. Source: Gao et al. 2025 (SAPO).
    """
    # torch.where of two Python numbers would return float32, whatever the advantages' dtype.
    tau = torch.full_like(advantages, temperature_negative)
    tau = tau.masked_fill(advantages > 0, temperature_positive)
    return -advantages * torch.sigmoid(tau * (probability_ratio(log_ratio) - 1)) * 4 / tau


def covariance_clip_loss(
    log_ratio: Tensor, advantages: Tensor, *, chosen: Tensor, clip_low: float, clip_high: float
) -> Tensor:
    """Return the clipped loss, with 0 on the `chosen` tokens: [B, T].

    `chosen` bool [B, T] comes from `covariance_band_mask`. Source: Cui et al. 2025 (Clip-Cov).
    """
    loss = clipped_surrogate_loss(log_ratio, advantages, clip_low=clip_low, clip_high=clip_high)
    return torch.where(chosen, 0.0, loss)


def covariance_kl_loss(
    log_ratio: Tensor, advantages: Tensor, *, chosen: Tensor, coef: float
) -> Tensor:
    """Return the unclipped loss, plus `coef` |log_ratio| on the `chosen` tokens: [B, T].

    `chosen` bool [B, T] comes from `covariance_top_mask`. Source: Cui et al. 2025 (KL-Cov).
    """
    return -advantages * probability_ratio(log_ratio) + torch.where(
        chosen, coef * log_ratio.abs(), 0.0
    )


def token_covariances(logprobs: Tensor, advantages: Tensor, loss_mask: Tensor) -> Tensor:
    """Return each token's covariance term, (A - mean A) (log pi - mean log pi): [B, T].

    Means are over `loss_mask`; 0 outside. Requires all tokens of the step: the covariance of a
    micro-batch differs.
    """
    count = loss_mask.sum().clamp(min=1)
    centered = []
    for values in (advantages.expand_as(logprobs).double(), logprobs.double()):
        kept = apply_mask(values, loss_mask)
        centered.append(kept - kept.sum() / count)
    return apply_mask(centered[0] * centered[1], loss_mask)


def covariance_band_mask(
    logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    low: float,
    high: float,
    fraction: float,
    draws: Tensor | None = None,
) -> Tensor:
    """Choose a random `fraction` of all tokens, among those with covariance in (low, high): [B, T].

    Chooses at least one token if any covariance lies in the band. `draws` [B, T] are random
    numbers; tokens with the smallest are chosen. None draws them here. Source: Cui et al. 2025
    (Clip-Cov). Raises ValueError on an empty band.
    """
    if low >= high:
        raise ValueError(f"covariance band ({low}, {high}): low must be below high")
    values = token_covariances(logprobs, advantages, loss_mask)
    inside = ((values > low) & (values < high) & loss_mask).flatten().nonzero()[:, 0]
    count = max(1, int(fraction * int(loss_mask.sum())))
    if draws is None:
        draws = torch.rand(loss_mask.shape, device=loss_mask.device)
    order = draws.flatten()[inside].argsort(stable=True)[:count]
    chosen = torch.zeros(loss_mask.numel(), dtype=torch.bool, device=loss_mask.device)
    chosen[inside[order]] = True
    return chosen.view_as(loss_mask)


def covariance_top_mask(
    logprobs: Tensor, advantages: Tensor, loss_mask: Tensor, *, fraction: float
) -> Tensor:
    """Choose the `fraction` of all tokens with the largest covariance, at least one: bool [B, T].

    Source: Cui et al. 2025 (KL-Cov).
    """
    values = token_covariances(logprobs, advantages, loss_mask)[loss_mask]
    chosen = torch.zeros_like(loss_mask)
    if len(values):
        count = max(1, int(fraction * len(values)))
        is_top = torch.zeros(len(values), dtype=torch.bool, device=values.device)
        is_top[values.topk(count).indices] = True
        chosen[loss_mask] = is_top
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
    """Return -min(r, cap) A log pi, with 0 for tokens that have moved too far: [B, T].

    No gradient flows through the ratio. A token is masked if the update would move its probability
    further from that under the policy to compare with, and the divergence of the two exceeds `high`
    under a positive advantage, `low` otherwise. `kind` "tv" is the difference of the two
    probabilities, "kl" the KL divergence of the binary choice "this token or another". Source: Qi
    et al. 2026 (DPPO).
    """
    p, q = logprobs.detach().exp(), (logprobs - log_ratio).detach().exp()
    if kind == "tv":
        is_trainable = torch.where(advantages > 0, p - q <= high, p - q >= -low)
    else:
        # 1e-8 avoids log(0) for tokens of probability 1.
        other_tokens = (1 - q) * torch.log((1 - q + 1e-8) / (1 - p + 1e-8))
        divergence = -q * log_ratio.detach() + other_tokens
        rising = (divergence <= high) | (p <= q)
        is_trainable = torch.where(advantages > 0, rising, (divergence <= low) | (p >= q))
    weights = probability_ratio(log_ratio).detach().clamp(max=cap)
    return torch.where(is_trainable, -weights * advantages * logprobs, 0.0)


def sequence_gamma_loss(
    log_ratio: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    logprobs: Tensor,
    power_positive: float,
    decay_positive: float,
    power_negative: float,
    decay_negative: float,
) -> Tensor:
    """Return -phi(w) A log pi with a soft weight of each rollout, without gradient: [B, T].

    w is the product of the rollout's ratios and phi(w) = w^power exp(decay (1 - w)), which is 1 at
    w = 1 and 0 far from it; power and decay are `*_positive` where A >= 0. Example: w = 2, power 2,
    decay 3 give 4 exp(-3). Source: Shen et al. 2026 (VESPO).
    """
    log_w = masked_row_sum(log_ratio.detach(), loss_mask)

    def weigh(power: float, decay: float) -> Tensor:
        return (power * log_w - decay * log_w.expm1()).exp()

    positive = weigh(power_positive, decay_positive)
    negative = weigh(power_negative, decay_negative)
    return -torch.where(advantages >= 0, positive, negative) * advantages * logprobs


def quadratic_penalty_loss(
    log_ratio: Tensor, advantages: Tensor, *, logprobs: Tensor, coef: float
) -> Tensor:
    """Return -A log pi + coef / 2 log_ratio^2, a likelihood held near the older policy: [B, T].

    Source: Richemond et al. 2024 (DRO), with the policy to compare with in place of the reference.
    """
    return -advantages * logprobs + coef / 2 * log_ratio.square()


def bradley_terry_loss(scores: Tensor, mask: Tensor, *, center_coef: float) -> Tensor:
    """Return -log sigmoid(r_chosen - r_rejected) + center_coef (r_chosen + r_rejected)^2, [B, T].

    `scores` [B, T] has at the first token of `mask` in a row the score of the chosen completion,
    and at the second that of the rejected one. The loss of the pair falls on the first.
    """
    chosen = mask & (mask.cumsum(-1) == 1)
    later = mask & ~chosen
    rejected = later & (later.cumsum(-1) == 1)
    first, second = ((scores * part).sum(-1, keepdim=True) for part in (chosen, rejected))
    loss = center_coef * (first + second) ** 2 - torch.nn.functional.logsigmoid(first - second)
    return loss * chosen


def teacher_divergence(logprobs: Tensor, teacher_logprobs: Tensor, *, beta: float) -> Tensor:
    """Return the divergence of two distributions, given by their logprobs of W words: [B, T].

    Both are [B, T, W]; the words that are left are one further word, because the divergence of the
    W words alone is biased. With teacher P, policy Q and M = beta P + (1 - beta) Q it is beta KL(P
    || M) + (1 - beta) KL(Q || M), the generalized Jensen-Shannon divergence; KL(P || Q), forward,
    for beta = 0 and KL(Q || P), reverse, for beta = 1. Source: Agarwal et al. 2023 (GKD), equation
    1.
    """
    p, q = map(_append_rest, (teacher_logprobs, logprobs))
    if beta in (0, 1):
        first, second = (q, p) if beta else (p, q)
        return (first.exp() * (first - second)).sum(-1)
    mixture = torch.logaddexp(p + math.log(beta), q + math.log(1 - beta))
    divergences = ((x.exp() * (x - mixture)).sum(-1) for x in (p, q))
    of_teacher, of_policy = divergences
    return beta * of_teacher + (1 - beta) * of_policy


REST_FLOOR = 1e-6
"""Least probability of the words that are left: a sum in float32 is about this exact."""


def _append_rest(logprobs: Tensor) -> Tensor:
    """Append the logprob of all other words to those of some: [..., W] -> [..., W + 1]."""
    rest = 1 - logprobs.exp().sum(-1, keepdim=True)
    return torch.cat((logprobs, rest.clamp(min=REST_FLOOR).log()), dim=-1)


def score_function_loss(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """Return -A log pi, the loss of REINFORCE: [B, T]. Source: Williams 1992."""
    return -advantages * logprobs


def value_loss(
    values: Tensor, returns: Tensor, old_values: Tensor, *, clip: float | None = None
) -> Tensor:
    """Return half the squared error of the critic's `values` against `returns`: [B, T].

    With `clip`, return the larger of this and the error of `values` clamped within `clip` of
    `old_values`. Source: Schulman et al. 2017 (PPO), equation 9; clipping as in the published code.
    """
    loss = (values - returns).square()
    if clip is not None:
        clipped_values = old_values + (values - old_values).clamp(-clip, clip)
        loss = torch.maximum(loss, (clipped_values - returns).square())
    return loss / 2


def critic_loss(
    batch: Mapping[str, Tensor], values: Tensor, *, clip: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the summed value loss of a micro-batch (scalar) and the sums for `summarize_critic`.

    `batch` contains loss_mask bool, returns, and values (at scoring time), all [B, T]; `values` [B,
    T] are the trained ones. The denominator is the number of tokens of the update.
    """
    losses, sums = critic_token_losses(batch, values, clip=clip)
    return losses.sum(), sums


def critic_token_losses(
    batch: Mapping[str, Tensor], values: Tensor, *, clip: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the critic's value losses per token [B, T] and the sums for `summarize_critic`.

    `batch` contains loss_mask bool, returns, and values (at scoring time), all [B, T]; `values` [B,
    T] are the trained ones. Losses outside the mask are 0.
    """
    mask = batch["loss_mask"]
    returns, old_values = apply_mask(batch["returns"], mask), apply_mask(batch["values"], mask)
    new_values = apply_mask(values, mask)
    losses = apply_mask(value_loss(new_values, returns, old_values, clip=clip), mask)
    detached = new_values.detach()
    change = (detached - old_values).abs()
    sums = {
        "num_tokens": mask.sum(),
        "loss_value_sum": losses.sum(),
        "value_sum": detached.sum(),
        "return_sum": returns.sum(),
        "return_squared_sum": returns.square().sum(),
        "error_sum": (returns - detached).sum(),
        "error_squared_sum": (returns - detached).square().sum(),
        "value_clipped_sum": (mask & (change > clip)).sum() if clip else losses.new_zeros(()),
    }
    return losses, {name: value.detach() for name, value in sums.items()}


def entropy_from_logits(logits: Tensor) -> Tensor:
    """Return the entropy in nats of the distributions softmax(logits): [..., V] -> [...]."""
    # A forbidden token has logit -inf; clamp its logprob so that 0 * logprob is 0, not NaN.
    logprobs = logits.log_softmax(-1).clamp(min=torch.finfo(logits.dtype).min)
    return -(logprobs.exp() * logprobs).sum(-1)


def aggregate_loss_sum(
    token_loss: Tensor,
    loss_mask: Tensor,
    *,
    mode: str,
    group_tokens: Tensor,
    turn_tokens: Tensor | None = None,
) -> Tensor:
    """Return a batch's contribution to the sum that `compute_loss_denominator` divides: scalar.

    `token_loss` is [B, T] or broadcastable to [B, T]. seq-mean-token-mean first divides every row
    by its number of tokens, prompt-mean by `group_tokens` [B], the number of tokens of its whole
    group, turn-mean each token by `turn_tokens` [B, T], the number of tokens of its turn; the other
    modes sum over tokens.
    """
    kept = apply_mask(token_loss, loss_mask)
    if mode == "seq-mean-token-mean":
        return (kept.sum(-1) / loss_mask.sum(-1).clamp(min=1)).sum()
    if mode == "turn-mean":
        assert turn_tokens is not None
        return (kept / turn_tokens.clamp(min=1)).sum()
    if mode == "prompt-mean":
        return (kept.sum(-1) / group_tokens.clamp(min=1)).sum()
    return kept.sum()


def _clip_loss(
    r: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> Tensor:
    """Return PPO's clipped loss of ratio `r`, bounded by `dual_clip` under negative advantages."""
    clipped = -advantages * r.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(-advantages * r, clipped)
    if dual_clip is None:
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -advantages * dual_clip), loss)


def _sequence_ratio(log_ratio: Tensor, loss_mask: Tensor) -> Tensor:
    """Return the geometric mean ratio of each rollout, with each token's own gradient.

    log_ratio - log_ratio.detach() is 0 in value and carries the gradient.
    """
    gradient_path = log_ratio - log_ratio.detach()
    mean = masked_row_mean(log_ratio.detach(), loss_mask)
    return probability_ratio(mean + gradient_path)

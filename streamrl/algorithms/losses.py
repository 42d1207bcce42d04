"""Token losses, and apart from them how they become one number.

Shapes: B rows (rollouts), T positions, V vocabulary. A position that `loss_mask` leaves out never
counts, whatever it holds, NaN included.

The reduction is in two halves. `aggregate_sum` adds up what a micro-batch contributes;
`normaliser` is the one number the sum over a whole step is divided by. So a step may be cut into
micro-batches and ranks at will: their sums add up to the same loss and the same gradient.
"""

import torch
from torch import Tensor

MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
LOG_RATIO_LIMIT = 20.0
"""exp() of more than this says nothing more and overflows sooner or later."""


def clipped_surrogate(
    log_ratio: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Tensor:
    """The clipped policy loss per token, max(-A r, -A clip(r, 1 - low, 1 + high)): [B, T].

    `log_ratio` [B, T] is trained policy minus sampling policy, `advantages` [B, T] or [B, 1]. With
    `dual_clip` c a loss under a negative advantage is at most -A c. Source: Schulman et al. 2017
    (PPO), equation 7; low != high: Yu et al. 2025 (DAPO); c: Ye et al. 2020.
    """
    r = ratio(log_ratio)
    clipped = -advantages * r.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(-advantages * r, clipped)
    if dual_clip is None:
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -advantages * dual_clip), loss)


def ratio(log_ratio: Tensor) -> Tensor:
    """Probability ratio of two policies, kept finite: same shape."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def outside_clip(
    log_ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """Where the clip takes the gradient away (the ratio has gone its way already): bool [B, T]."""
    r = ratio(log_ratio)
    too_high = (advantages > 0) & (r > 1 + clip_high)
    return too_high | ((advantages < 0) & (r < 1 - clip_low))


def entropy(logits: Tensor) -> Tensor:
    """Entropy in nats of the distributions softmax(logits): [..., V] -> [...]."""
    logprobs = logits.log_softmax(-1)
    return -(logprobs.exp() * logprobs).sum(-1)


def keep(values: Tensor, loss_mask: Tensor) -> Tensor:
    """`values` where the mask is true, 0 elsewhere; multiplying would let NaN through."""
    return torch.where(loss_mask, values, 0.0)


def aggregate(
    token_loss: Tensor,
    loss_mask: Tensor,
    *,
    mode: str,
    num_tokens: int | None = None,
    num_sequences: int | None = None,
    max_length: int | None = None,
) -> Tensor:
    """One loss from those of the tokens: `aggregate_sum` over `normaliser`.

    The counts are of the whole step; left out, they are those of this batch (rows without a token
    that counts are no sequences). Raises what `normaliser` raises.
    """
    if num_tokens is None:
        num_tokens = int(loss_mask.sum())
    if num_sequences is None:
        num_sequences = int(loss_mask.any(-1).sum())
    divisor = normaliser(
        mode, num_tokens=num_tokens, num_sequences=num_sequences, max_length=max_length
    )
    return aggregate_sum(token_loss, loss_mask, mode=mode) / divisor


def aggregate_sum(token_loss: Tensor, loss_mask: Tensor, *, mode: str) -> Tensor:
    """What a batch adds to the sum that `normaliser` divides: scalar.

    `token_loss` [B, T] or what broadcasts to it, `loss_mask` bool [B, T]. Sum over tokens; in
    seq-mean-token-mean every row is divided by its number of tokens first. Raises ValueError on an
    unknown mode.
    """
    if mode not in MODES:
        raise ValueError(f"loss aggregation {mode!r}: no such mode")
    kept = keep(token_loss, loss_mask)
    if mode == "seq-mean-token-mean":
        return (kept.sum(-1) / loss_mask.sum(-1).clamp(min=1)).sum()
    return kept.sum()


def normaliser(
    mode: str, *, num_tokens: int, num_sequences: int, max_length: int | None = None
) -> float:
    """What the sum of `aggregate_sum` over a whole optimizer step is divided by.

    Counts are of the step: tokens that count and rollouts, over all micro-batches and ranks.
    `max_length` is the longest completion there can be, needed by seq-mean-token-sum-norm
    (Liu et al. 2025, Dr. GRPO) alone; a constant, because the padded width would make the loss
    depend on how the step is cut. Raises ValueError without it or on an unknown mode.
    """
    if mode not in MODES:
        raise ValueError(f"loss aggregation {mode!r}: no such mode")
    if mode == "token-mean":
        return float(num_tokens)
    if mode != "seq-mean-token-sum-norm":
        return float(num_sequences)
    if max_length is None:
        raise ValueError("seq-mean-token-sum-norm needs max_length, the longest completion")
    return float(num_sequences * max_length)

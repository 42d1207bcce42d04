"""Aggregation of the token losses of a whole update, in a single call."""

import torch
from torch import Tensor

from streamrl.algorithms.math.losses import aggregate_loss_sum
from streamrl.algorithms.math.training_metrics import compute_loss_denominator


def aggregate_loss(
    token_loss: Tensor,
    loss_mask: Tensor,
    *,
    mode: str,
    num_tokens: int | None = None,
    num_sequences: int | None = None,
    max_length: int = 0,
    group_ids: Tensor | None = None,
    turn_tokens: Tensor | None = None,
) -> Tensor:
    """Return a single loss: `aggregate_loss_sum` divided by `compute_loss_denominator`.

    `num_tokens` and `num_sequences` are of the whole update; by default, of this batch (rows
    without counted tokens are not sequences). prompt-mean needs `group_ids` [B] and whole groups in
    the batch. Returns 0 if no token counts. Raises the errors of both functions.
    """
    num_groups, group_tokens = 0, loss_mask.sum(-1)
    if group_ids is not None:
        _, index = torch.unique(group_ids, return_inverse=True)
        counts = torch.zeros(len(group_ids), dtype=torch.long, device=loss_mask.device)
        counts = counts.index_add(0, index, loss_mask.sum(-1))
        num_groups, group_tokens = int((counts > 0).sum()), counts[index]
    if num_tokens is None:
        num_tokens = int(loss_mask.sum())
    if num_sequences is None:
        num_sequences = int(loss_mask.any(-1).sum())
    divisor = compute_loss_denominator(
        mode,
        num_tokens=num_tokens,
        num_sequences=num_sequences,
        num_groups=num_groups,
        num_turns=0.0 if turn_tokens is None else (loss_mask / turn_tokens).sum().item(),
        max_length=max_length,
    )
    summed = aggregate_loss_sum(
        token_loss, loss_mask, mode=mode, group_tokens=group_tokens, turn_tokens=turn_tokens
    )
    return summed / (divisor or 1.0)

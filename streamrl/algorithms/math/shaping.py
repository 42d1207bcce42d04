"""Shaping of scores before advantages are computed: length penalty and KL penalty."""

import torch
from torch import Tensor

from streamrl.algorithms.math.masks import apply_mask


def soft_overlong_penalty(
    lengths: Tensor, *, max_length: int, buffer: int, factor: float = 1.0
) -> Tensor:
    """Return the penalty of long completions, from 0 to -factor: [B] float32.

    0 up to `max_length - buffer` tokens, then linear, -factor from `max_length` on. `lengths` [B]
    are the sampled tokens. Example: max_length 100, buffer 20, factor 1 give -0.5 at 90 tokens.
    Source: Yu et al. 2025 (DAPO).
    """
    excess = (lengths - (max_length - buffer)).double() / buffer
    return (-factor * excess.clamp(0, 1)).float()


def make_token_rewards(
    scores: Tensor, loss_mask: Tensor, penalties: Tensor | None = None
) -> Tensor:
    """Return token rewards: the score on the last sampled token, minus all `penalties`: [B, T].

    `scores` [B]; `penalties` [B, T], for example KL times its weight. 0 where `loss_mask` is false.
    """
    positions = torch.arange(loss_mask.shape[1], device=loss_mask.device)
    last_position = torch.where(loss_mask, positions, -1).amax(-1, keepdim=True)
    rewards = apply_mask(scores[:, None].expand(loss_mask.shape), positions == last_position)
    return rewards if penalties is None else rewards - apply_mask(penalties, loss_mask)

"""What is done to a score before advantages are taken: length penalty, divergence penalty."""

import torch
from torch import Tensor

from streamrl.algorithms.math.masks import apply_mask


def soft_overlong_penalty(
    lengths: Tensor, *, max_length: int, buffer: int, factor: float = 1.0
) -> Tensor:
    """What a long completion loses, from 0 to -factor: [B] float32.

    Nothing up to `max_length - buffer` tokens, then linearly more, all of `factor` from
    `max_length` on. `lengths` [B] are the sampled tokens. Source: Yu et al. 2025 (DAPO).
    """
    excess = (lengths - (max_length - buffer)).double() / buffer
    return (-factor * excess.clamp(0, 1)).float()


def make_token_rewards(
    scores: Tensor, loss_mask: Tensor, penalties: Tensor | None = None
) -> Tensor:
    """A rollout's score on its last sampled token, minus the `penalties` of all: [B, T].

    `scores` [B]; `penalties` [B, T], for example KL times its weight. 0 where `loss_mask` is false.
    """
    positions = torch.arange(loss_mask.shape[1], device=loss_mask.device)
    last = torch.where(loss_mask, positions, -1).amax(-1, keepdim=True)
    rewards = apply_mask(scores[:, None].expand(loss_mask.shape), positions == last)
    return rewards if penalties is None else rewards - apply_mask(penalties, loss_mask)

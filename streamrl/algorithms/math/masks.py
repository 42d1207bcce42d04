"""Where a token counts. Everything that is summed goes through here first."""

import torch
from torch import Tensor


def apply_mask(values: Tensor, mask: Tensor) -> Tensor:
    """`values` where the mask is true, 0 elsewhere; multiplying would let NaN through."""
    return torch.where(mask, values, 0.0)


def masked_row_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum over the positions of a row that count: [B, T] -> [B, 1]."""
    return apply_mask(values, mask).sum(-1, keepdim=True)


def masked_row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the positions of a row that count, 0 for a row without one: [B, T] -> [B, 1]."""
    return masked_row_sum(values, mask) / mask.sum(-1, keepdim=True).clamp(min=1)

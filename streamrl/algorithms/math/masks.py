"""Masked reductions. All sums over tokens go through these functions, which are safe for NaN."""

import torch
from torch import Tensor


def apply_mask(values: Tensor, mask: Tensor) -> Tensor:
    """Return `values` inside the mask, 0 outside; unlike a product, this drops NaN."""
    return torch.where(mask, values, 0.0)


def masked_row_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Return the sum over the mask of each row: [B, T] -> [B, 1]."""
    return apply_mask(values, mask).sum(-1, keepdim=True)


def masked_row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean over the mask of each row, 0 for an empty row: [B, T] -> [B, 1]."""
    return masked_row_sum(values, mask) / mask.sum(-1, keepdim=True).clamp(min=1)

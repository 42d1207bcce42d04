"""Masked reductions, safe for NaN outside the mask."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def apply_mask(values: "Tensor", mask: "Tensor") -> "Tensor":
    """Return `values` inside the mask, 0 outside; unlike a product, this drops NaN."""
    return values.where(mask, 0.0)


def masked_row_sum(values: "Tensor", mask: "Tensor") -> "Tensor":
    """Return each row's sum over the mask: [B, T] -> [B, 1]."""
    return apply_mask(values, mask).sum(-1, keepdim=True)


def masked_row_mean(values: "Tensor", mask: "Tensor") -> "Tensor":
    """Return each row's mean over the mask, 0 if the row's mask is empty: [B, T] -> [B, 1]."""
    return masked_row_sum(values, mask) / mask.sum(-1, keepdim=True).clamp(min=1)

"""Masked reductions, safe for NaN outside the mask, and the equality of scores."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

SCORE_TOLERANCE = 1e-6
"""Some float32 roundings: ten times 0.1 exceeds 1 by 1.2e-7."""


def apply_mask(values: "Tensor", mask: "Tensor") -> "Tensor":
    """Return `values` inside the mask, 0 outside; unlike a product, this drops NaN."""
    return values.where(mask, 0.0)


def masked_row_sum(values: "Tensor", mask: "Tensor") -> "Tensor":
    """Return each row's sum over the mask: [B, T] -> [B, 1]."""
    return apply_mask(values, mask).sum(-1, keepdim=True)


def masked_row_mean(values: "Tensor", mask: "Tensor") -> "Tensor":
    """Return each row's mean over the mask, 0 if the row's mask is empty: [B, T] -> [B, 1]."""
    return masked_row_sum(values, mask) / mask.sum(-1, keepdim=True).clamp(min=1)


def has_equal_scores(lowest: Any, highest: Any) -> Any:
    """Return whether scores from `lowest` to `highest` differ by no more than float32 rounding.

    One rule for the group filter and for the baselines of a group. Takes numbers, arrays or
    tensors: highest - lowest <= 1e-6 (1 + |highest|).
    """
    return highest - lowest <= SCORE_TOLERANCE * (1 + abs(highest))

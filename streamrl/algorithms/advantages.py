"""Advantages: how much better a rollout did than was to be expected."""

import torch
from torch import Tensor

SCALES = ("std", "none")


def group_relative(
    scores: Tensor,
    group_ids: Tensor,
    *,
    scale: str = "std",
    eps: float = 1e-6,
    unbiased: bool = True,
    single: str = "zero",
) -> Tensor:
    """Score minus the group's mean score, with "std" divided by the group's deviation: [B] float32.

    `scores` [B], `group_ids` [B] integers; a group's rows may lie anywhere. A group of equal scores
    gets exactly 0. A group of one has nothing to compare with: `single` is "zero", or "keep" for a
    baseline of 0 and a deviation of 1. Source: Shao et al. 2024 (DeepSeekMath, GRPO), section
    4.1.2; "none" is Liu et al. 2025 (Dr. GRPO). Raises ValueError on an unknown `scale` or
    `single`.
    """
    if scale not in SCALES or single not in ("zero", "keep"):
        raise ValueError(f"scale={scale!r}, single={single!r}: no such choice")
    values = scores.double()
    _, group = torch.unique(group_ids, return_inverse=True)
    count = torch.bincount(group)
    mean = torch.zeros_like(count, dtype=values.dtype).index_add(0, group, values) / count
    # The mean of equal numbers can be off by one rounding, which the division would blow up.
    centred = torch.where(_all_equal(values, group, len(count))[group], 0.0, values - mean[group])
    if scale == "std":
        freedom = (count - 1).clamp(min=1) if unbiased else count
        variance = torch.zeros_like(mean).index_add(0, group, centred.square()) / freedom
        centred = centred / (variance.sqrt()[group] + eps)
    if single == "keep":
        kept = values / (1 + eps) if scale == "std" else values
        centred = torch.where(count[group] == 1, kept, centred)
    return centred.float()


def _all_equal(values: Tensor, group: Tensor, num_groups: int) -> Tensor:
    """Whether all values of a group are the same number: bool [num_groups]."""
    empty = values.new_zeros(num_groups)
    highest = empty.scatter_reduce(0, group, values, "amax", include_self=False)
    lowest = empty.scatter_reduce(0, group, values, "amin", include_self=False)
    return highest == lowest

"""Equality of scores: one rule for the group filter and for the baselines of a group."""

from typing import Any

SCORE_TOLERANCE = 1e-6
"""Some float32 roundings: ten times 0.1 exceeds 1 by 1.2e-7."""


def has_equal_scores(lowest: Any, highest: Any) -> Any:
    """Return whether scores from `lowest` to `highest` differ by no more than float32 rounding.

    Takes numbers, arrays or tensors: highest - lowest <= 1e-6 (1 + |highest|).
    """
    return highest - lowest <= SCORE_TOLERANCE * (1 + abs(highest))

"""Reward under a limit on cost: one advantage from two, and the multiplier that weighs them."""

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def lagrangian_advantages(
    reward_advantages: "Tensor", cost_advantages: "Tensor", *, multiplier: float
) -> "Tensor":
    """(A_R - lambda A_C) / (1 + lambda), of the arguments' shape.

    Divided so that a growing multiplier changes what is learned, not how fast. Source: Dai et al.
    2024 (Safe RLHF).
    """
    return (reward_advantages - multiplier * cost_advantages) / (1 + multiplier)


def adapt_multiplier(
    multiplier: float, cost: float, *, limit: float, lr: float, largest: float
) -> float:
    """The multiplier after a step of mean cost `cost`: larger if that is above `limit`.

    A step of gradient ascent on lambda (cost - limit) in the logarithm of lambda, so that it stays
    above 0; at most `largest`. Source: Dai et al. 2024 (Safe RLHF).
    """
    # A cost that is far off would be too much for exp: half of its range is beyond any use.
    ascent = max(min(lr * (cost - limit) * multiplier, 350.0), -350.0)
    return min(multiplier * math.exp(ascent), largest)

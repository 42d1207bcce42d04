"""Lagrangian of a reward under a cost limit: combined advantage and update of the multiplier."""

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def lagrangian_advantages(
    reward_advantages: "Tensor", cost_advantages: "Tensor", *, multiplier: float
) -> "Tensor":
    """Return advantages of reward and cost combined: (A_R - lambda A_C) / (1 + lambda).

    lambda is `multiplier`; all shapes are equal. The division keeps the scale, and so the effective
    learning rate, independent of lambda. Source: Dai et al. 2024 (Safe RLHF).
    """
    return (reward_advantages - multiplier * cost_advantages) / (1 + multiplier)


def adapt_multiplier(
    multiplier: float, cost: float, *, limit: float, lr: float, largest: float
) -> float:
    """Return the Lagrange multiplier after a step with mean cost `cost`: larger above `limit`.

    Gradient ascent on lambda (cost - limit) in log lambda, so lambda stays positive: lambda' =
    lambda exp(lr lambda (cost - limit)), at most `largest`. Source: Dai et al. 2024 (Safe RLHF).
    """
    # Keep exp() from overflowing (at 709) for costs far off the limit.
    ascent = max(min(lr * (cost - limit) * multiplier, 350.0), -350.0)
    return min(multiplier * math.exp(ascent), largest)

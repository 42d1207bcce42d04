"""Floating-point operations of a forward pass; others are multiples of it.

A matrix product of a token with n parameters takes 2n. In attention, queries meet keys and weights
meet values over the whole length, 2 * 2 * length * width operations a token and layer, as ReaL
counts them (arXiv:2406.14088): what a causal mask leaves out is not subtracted.
"""

from streamrl.placement.costs.constants import CostConstants
from streamrl.placement.model_shapes import ModelShape

FORWARD_BACKWARD_PASSES = 3
"""Forward passes that a forward and a backward one take; one more where the first is repeated."""


def forward_flops(shape: ModelShape, tokens: float, squared_lengths: float) -> float:
    """Of `tokens` tokens in sequences whose squared lengths sum to `squared_lengths`.

    A token passes the embedding as a look-up, which takes none.
    """
    attention = 4 * shape.layers * shape.heads * shape.head_dim * squared_lengths
    return 2 * shape.active_matmul_params * tokens + attention


def token_flops(shape: ModelShape, length: float) -> float:
    """Of one token in a sequence of that length, forward."""
    return forward_flops(shape, 1.0, length)


def train_passes(constants: CostConstants) -> int:
    """How many forward passes a training pass takes."""
    return FORWARD_BACKWARD_PASSES + constants.recompute


def routed_flops(shape: ModelShape) -> float:
    """Of those, one token's in the experts that it is routed to."""
    return 2 * shape.moe_layers * shape.experts_per_token * shape.expert_params


def achieved_fraction(fraction: float, width: float, constants: CostConstants) -> float:
    """The part of a device's FLOP/s that matrices so narrow reach, see `CostConstants`."""
    return fraction * width / (width + constants.half_width)

"""FLOPs of a forward pass; other passes are multiples.

A matrix product takes 2n FLOPs per token with n parameters. Attention takes 2 * 2 * length * width
FLOPs per token and layer (queries times keys, weights times values), as ReaL counts them
(arXiv:2406.14088): the causal mask is not subtracted.
"""

from streamrl.placement.costs.constants import CostConstants
from streamrl.placement.model_shapes import ModelShape

FORWARD_BACKWARD_PASSES = 3
"""Cost of forward and backward in forward passes, without activation checkpointing."""


def forward_flops(shape: ModelShape, tokens: float, squared_lengths: float) -> float:
    """Return FLOPs of `tokens` tokens in sequences whose squared lengths sum to `squared_lengths`.

    The embedding is a look-up without FLOPs.
    """
    attention = 4 * shape.layers * shape.heads * shape.head_dim * squared_lengths
    return 2 * shape.active_matmul_params * tokens + attention


def token_flops(shape: ModelShape, length: float) -> float:
    """Return forward FLOPs of a token in a sequence of that length."""
    return forward_flops(shape, 1.0, length)


def train_passes(constants: CostConstants) -> int:
    """Return the cost of a training pass in forward passes."""
    return FORWARD_BACKWARD_PASSES + constants.recompute


def routed_flops(shape: ModelShape) -> float:
    """Return a token's forward FLOPs in its routed experts."""
    return 2 * shape.moe_layers * shape.experts_per_token * shape.expert_params


def achieved_fraction(fraction: float, width: float, constants: CostConstants) -> float:
    """Return the achieved fraction of peak FLOP/s at a matrix width, see `CostConstants`."""
    return fraction * width / (width + constants.half_width)

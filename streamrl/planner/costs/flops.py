"""FLOPs of a model's forward pass; training takes a multiple of them.

A product with a matrix of n parameters takes 2n FLOPs per token. Attention takes 2 * 2 * length *
width FLOPs per token and layer (queries times keys, weights times values), as ReaL counts them
(arXiv:2406.14088): the causal mask is not subtracted.
"""

from streamrl.engines.models.model_shapes import ModelShape
from streamrl.planner.costs.constants import CostConstants

FORWARD_BACKWARD_PASSES = 3
"""Forward and backward together cost 3 forward passes, without activation checkpointing."""


def count_forward_flops(shape: ModelShape, tokens: float, squared_lengths: float) -> float:
    """Return the FLOPs of a forward pass over `tokens` tokens.

    squared_lengths: sum of the squared lengths of the tokens' sequences, for attention. The
      embedding is a look-up without FLOPs.
    """
    attention = 4 * shape.layers * shape.heads * shape.head_dim * squared_lengths
    return 2 * shape.active_matmul_params * tokens + attention


def count_token_flops(shape: ModelShape, length: float) -> float:
    return count_forward_flops(shape, 1.0, length)


def train_passes(constants: CostConstants) -> int:
    """Return the cost of a training pass in forward passes: 3, or 4 with recomputation."""
    return FORWARD_BACKWARD_PASSES + constants.recompute


def routed_flops(shape: ModelShape) -> float:
    """Return a token's forward FLOPs in the experts that routers choose for it, over all layers."""
    return 2 * shape.moe_layers * shape.experts_per_token * shape.expert_params


def compute_achieved_fraction(fraction: float, width: float, constants: CostConstants) -> float:
    """Return the fraction of peak FLOP/s that products with matrices of this width achieve.

    fraction: limit for wide matrices; at width `constants.half_width` half of it is achieved.
    """
    return fraction * width / (width + constants.half_width)

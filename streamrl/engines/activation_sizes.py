"""Sizes of activations that the backward pass needs: of memory checks, and of the planner."""

CHUNK_TOKENS = 1024
"""Tokens for which logits over the vocabulary exist at the same time."""
LAYER_VALUES_PER_TOKEN = 17
"""Activations per layer and token, in units of the hidden size: arXiv 2205.05198 without the
attention scores. A layer whose MLP computes in chunks has no more."""
GATED_LAYER_VALUES = (11, 4)
"""The same of a layer with RMSNorm and a gated MLP, in units of the hidden size and of the MLP's
intermediate size: float32 copies in the norms; gate, its activation, up and their product. On a GPU
1.5 B parameters take 10.6 hidden sizes besides the latter."""


def count_layer_values(hidden: int, intermediate: int) -> int:
    """Return the elements per token that a layer's backward pass needs; its MLP is in one piece."""
    per_hidden, per_intermediate = GATED_LAYER_VALUES
    return max(
        LAYER_VALUES_PER_TOKEN * hidden, per_hidden * hidden + per_intermediate * intermediate
    )

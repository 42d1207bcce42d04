"""Validation of the tensors that an algorithm's functions, often a user's, return."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from streamrl.algorithms.algorithm import Algorithm, AlgorithmSettings, TokenLossInput
from streamrl.errors import AlgorithmError


def compute_token_losses(
    row: Algorithm, tokens: TokenLossInput, settings: AlgorithmSettings
) -> tuple[Tensor, Tensor]:
    """Call an algorithm's token loss; return loss and mask of clipped gradients, both [B, T].

    Raises AlgorithmError if the function returns anything else.
    """
    result = row.call_function(row.token_loss, tokens, settings)
    name = f"algorithm {row.name}: {row.token_loss.__name__}"
    try:
        losses, clipped = result
    except (TypeError, ValueError):
        raise AlgorithmError(
            f"{name} returned a {type(result).__name__}, expected (loss, clipped mask)"
        ) from None
    for tensor in (losses, clipped):
        validate_tensor(row, row.token_loss, tensor, [tuple(tokens.loss_mask.shape)])
    if clipped.dtype != torch.bool:
        raise AlgorithmError(f"{name}: the clipped mask is {clipped.dtype}, must be bool")
    return losses, clipped


def validate_tensor(
    row: Algorithm,
    function: Callable[..., Any],
    result: object,
    shapes: Sequence[tuple[int, ...]],
) -> None:
    """Raise AlgorithmError unless the `result` of `function` is a tensor of an allowed shape."""
    if not isinstance(result, Tensor) or tuple(result.shape) not in shapes:
        short = " ".join(repr(result).split())[:80]
        actual = f"shape {list(result.shape)}" if isinstance(result, Tensor) else short
        expected = " or ".join(str(list(shape)) for shape in shapes)
        raise AlgorithmError(
            f"algorithm {row.name}: {function.__name__} returned {actual}, expected {expected}"
        )

"""What the functions of a row give, checked: they may be a user's."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from streamrl.algorithms.algorithm import Algorithm, AlgorithmSettings, TokenLossInput
from streamrl.errors import AlgorithmError


def compute_token_losses(
    row: Algorithm, tokens: TokenLossInput, settings: AlgorithmSettings
) -> tuple[Tensor, Tensor]:
    """Loss and where it stops the gradient, [B, T]. Raises AlgorithmError for anything else."""
    found = row.call_function(row.token_loss, tokens, settings)
    who = f"algorithm {row.name}: {row.token_loss.__name__}"
    try:
        losses, stopped = found
    except (TypeError, ValueError):
        gave = type(found).__name__
        raise AlgorithmError(
            f"{who} gave a {gave}, wanted a loss and where it stops the gradient"
        ) from None
    for one in (losses, stopped):
        validate_tensor(row, row.token_loss, one, [tuple(tokens.loss_mask.shape)])
    if stopped.dtype != torch.bool:
        raise AlgorithmError(f"{who}: where it stops the gradient is {stopped.dtype}, not bool")
    return losses, stopped


def validate_tensor(
    row: Algorithm,
    function: Callable[..., Any],
    found: object,
    shapes: Sequence[tuple[int, ...]],
) -> None:
    """Raise AlgorithmError unless a function gave a tensor of one of these shapes."""
    if not isinstance(found, Tensor) or tuple(found.shape) not in shapes:
        short = " ".join(repr(found).split())[:80]
        gave = f"shape {list(found.shape)}" if isinstance(found, Tensor) else short
        wanted = " or ".join(str(list(shape)) for shape in shapes)
        raise AlgorithmError(
            f"algorithm {row.name}: {function.__name__} gave {gave}, wanted {wanted}"
        )

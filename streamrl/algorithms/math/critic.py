"""The critic's part of a step: its summed loss, and what is reported of it.

The critic learns the returns that were derived from its own values at the time the group was
scored; the clip holds it near those.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from streamrl.algorithms.math.losses import value_loss
from streamrl.algorithms.math.masks import apply_mask


def critic_loss(
    batch: Mapping[str, Tensor], values: Tensor, *, clip: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Summed value loss of a micro-batch (scalar), and sums for `summarise_critic`.

    `batch` holds loss_mask bool, returns and values (when the group was scored), all [B, T];
    `values` [B, T] are those in training. Normalised by the tokens of the update.
    """
    losses, sums = critic_token_losses(batch, values, clip=clip)
    return losses.sum(), sums


def critic_token_losses(
    batch: Mapping[str, Tensor], values: Tensor, *, clip: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """The same before it is summed, [B, T]."""
    mask = batch["loss_mask"]
    returns, old = apply_mask(batch["returns"], mask), apply_mask(batch["values"], mask)
    current = apply_mask(values, mask)
    losses = apply_mask(value_loss(current, returns, old, clip=clip), mask)
    known = current.detach()
    moved = (known - old).abs()
    sums = {
        "num_tokens": mask.sum(),
        "loss_value_sum": losses.sum(),
        "value_sum": known.sum(),
        "return_sum": returns.sum(),
        "return_squared_sum": returns.square().sum(),
        "error_sum": (returns - known).sum(),
        "error_squared_sum": (returns - known).square().sum(),
        "value_clipped_sum": (mask & (moved > clip)).sum() if clip else torch.zeros(()),
    }
    return losses, {name: value.detach() for name, value in sums.items()}

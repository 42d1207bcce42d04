"""Loss of a critic, and the sums for its metrics.

The critic learns returns that were derived from its values at scoring time; clipping keeps the
trained values near those.
"""

from collections.abc import Mapping

from torch import Tensor

from streamrl.algorithms.math.losses import value_loss
from streamrl.algorithms.math.masks import apply_mask


def critic_loss(
    batch: Mapping[str, Tensor], values: Tensor, *, clip: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the summed value loss of a micro-batch (scalar) and the sums for `summarize_critic`.

    `batch` contains loss_mask bool, returns, and values (at scoring time), all [B, T]; `values` [B,
    T] are the trained ones. The denominator is the number of tokens of the update.
    """
    losses, sums = critic_token_losses(batch, values, clip=clip)
    return losses.sum(), sums


def critic_token_losses(
    batch: Mapping[str, Tensor], values: Tensor, *, clip: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the critic's value losses per token [B, T] and the sums for `summarize_critic`.

    `batch` contains loss_mask bool, returns, and values (at scoring time), all [B, T]; `values` [B,
    T] are the trained ones. Losses outside the mask are 0.
    """
    mask = batch["loss_mask"]
    returns, old_values = apply_mask(batch["returns"], mask), apply_mask(batch["values"], mask)
    new_values = apply_mask(values, mask)
    losses = apply_mask(value_loss(new_values, returns, old_values, clip=clip), mask)
    detached = new_values.detach()
    change = (detached - old_values).abs()
    sums = {
        "num_tokens": mask.sum(),
        "loss_value_sum": losses.sum(),
        "value_sum": detached.sum(),
        "return_sum": returns.sum(),
        "return_squared_sum": returns.square().sum(),
        "error_sum": (returns - detached).sum(),
        "error_squared_sum": (returns - detached).square().sum(),
        "value_clipped_sum": (mask & (change > clip)).sum() if clip else losses.new_zeros(()),
    }
    return losses, {name: value.detach() for name, value in sums.items()}

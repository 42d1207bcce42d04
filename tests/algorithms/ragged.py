"""Ragged batches for pure functions, and changes that must have no effect on results.

A batch maps names to tensors: [B], [B, T] or [B, T, V]. Values outside `loss_mask` have no effect.
"""

import math
from collections.abc import Callable, Sequence

import torch
from hypothesis import strategies as st
from torch import Tensor

Batch = dict[str, Tensor]
LEFT, RIGHT = 1, 2
"""Positions that `wider` adds."""


def make_batch(seed: int, dtype: torch.dtype = torch.float64) -> Batch:
    """Return 2 to 6 rows of up to 8 positions, with holes, some without counted tokens."""
    draw = torch.Generator().manual_seed(seed)
    rows, width = 2 + seed % 5, 1 + seed % 8

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    logprobs = -normal(rows, width).abs() - 0.02
    values = normal(rows, width)
    batch = {
        "loss_mask": torch.rand(rows, width, generator=draw) < 0.7,
        "logprobs": logprobs,
        "old_logprobs": (logprobs + 0.5 * normal(rows, width)).clamp(max=-0.01),
        "ref_logprobs": (logprobs + 0.5 * normal(rows, width)).clamp(max=-0.01),
        "log_ratio": 0.5 * normal(rows, width),
        "advantages": normal(rows, width),
        "values": values,
        "old_values": values + normal(rows, width),
        "returns": normal(rows, width),
        "token_rewards": normal(rows, width),
        "logits": 3 * normal(rows, width, 4),
        "scores": normal(rows),
        "chosen": torch.rand(rows, width, generator=draw) < 0.3,
    }
    return {name: x.to(dtype) if x.is_floating_point() else x for name, x in batch.items()}


BATCHES = st.builds(make_batch, st.integers(0, 9999))


def gradient(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None
    return leaf.grad


def take_rows(batch: Batch, rows: Sequence[int]) -> Batch:
    """Return some of the rows, in this order."""
    return {name: x[list(rows)] for name, x in batch.items()}


def shuffled_cuts(batch: Batch, seed: int) -> list[list[int]]:
    """Return every row index once, in random order, in two micro-batches."""
    draw = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(batch["loss_mask"]), generator=draw).tolist()
    middle = 1 + seed % (len(order) - 1)
    return [order[:middle], order[middle:]]


def with_nan_padding(batch: Batch) -> Batch:
    """Return the batch with NaN wherever the mask is false."""
    return {
        name: torch.where(_like(x, batch["loss_mask"]), x, math.nan)
        if x.is_floating_point() and x.ndim > 1
        else x
        for name, x in batch.items()
    }


def with_more_padding(batch: Batch) -> Batch:
    """Return the batch with LEFT and RIGHT more masked positions, which hold NaN or true."""
    wide = {name: _with_more_padding(x) if x.ndim > 1 else x for name, x in batch.items()}
    mask = torch.zeros_like(wide["loss_mask"])
    mask[:, LEFT:-RIGHT] = batch["loss_mask"]
    return wide | {"loss_mask": mask}


def _with_more_padding(x: Tensor) -> Tensor:
    shape = (x.shape[0], LEFT + x.shape[1] + RIGHT, *x.shape[2:])
    wide = torch.full(shape, math.nan if x.is_floating_point() else 1).to(x.dtype)
    wide[:, LEFT:-RIGHT] = x
    return wide


def assert_padding_has_no_effect(function: Callable[[Batch], Tensor], batch: Batch) -> None:
    """Assert that content and width of the padding have no effect and that results there are 0."""
    result, mask = function(batch), batch["loss_mask"]
    assert not result[~mask].any()
    assert torch.equal(function(with_nan_padding(batch)), result)
    wide = function(with_more_padding(batch))
    torch.testing.assert_close(wide[:, LEFT:-RIGHT], result, atol=1e-12, rtol=1e-12)
    assert not wide[:, :LEFT].any()
    assert not wide[:, -RIGHT:].any()


def _like(x: Tensor, mask: Tensor) -> Tensor:
    return mask[..., None] if x.ndim > mask.ndim else mask

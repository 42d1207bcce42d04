"""Ragged batches for the pure functions, and what must make no difference to them.

A batch is tensors by name: [B], [B, T] or [B, T, V]. What is outside `loss_mask` has no say.
"""

import math
from collections.abc import Callable, Sequence

import torch
from hypothesis import strategies as st
from torch import Tensor

Batch = dict[str, Tensor]
BOUNDS = {torch.float64: 1e-9, torch.float32: 2e-5}
"""How near a result has to be to that of plain loops over Python's floats."""
LEFT, RIGHT = 1, 2
"""Positions that `wider` adds."""


def ragged(seed: int, dtype: torch.dtype = torch.float64) -> Batch:
    """2 to 6 rows of up to 8 positions, with holes, some without a token that counts."""
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


BATCHES = st.builds(ragged, st.integers(0, 9999))


def gradient(leaf: Tensor) -> Tensor:
    """Fail if a leaf has none."""
    assert leaf.grad is not None
    return leaf.grad


def take(batch: Batch, rows: Sequence[int]) -> Batch:
    """Some of the rows, in this order."""
    return {name: x[list(rows)] for name, x in batch.items()}


def shuffled_cuts(batch: Batch, seed: int) -> list[list[int]]:
    """Every row once, in any order, cut into two micro-batches."""
    draw = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(batch["loss_mask"]), generator=draw).tolist()
    middle = 1 + seed % (len(order) - 1)
    return [order[:middle], order[middle:]]


def spoilt(batch: Batch) -> Batch:
    """NaN wherever the mask is false."""
    return {
        name: torch.where(_like(x, batch["loss_mask"]), x, math.nan)
        if x.is_floating_point() and x.ndim > 1
        else x
        for name, x in batch.items()
    }


def wider(batch: Batch) -> Batch:
    """The same rows with LEFT and RIGHT more positions that do not count; NaN, or true, there."""
    wide = {name: _widened(x) if x.ndim > 1 else x for name, x in batch.items()}
    mask = torch.zeros_like(wide["loss_mask"])
    mask[:, LEFT:-RIGHT] = batch["loss_mask"]
    return wide | {"loss_mask": mask}


def _widened(x: Tensor) -> Tensor:
    shape = (x.shape[0], LEFT + x.shape[1] + RIGHT, *x.shape[2:])
    wide = torch.full(shape, math.nan if x.is_floating_point() else 1).to(x.dtype)
    wide[:, LEFT:-RIGHT] = x
    return wide


def rows_that_count(batch: Batch) -> list[dict[str, list[float]]]:
    """Of each row the tokens that count, as Python's numbers; what is per row as a list of one."""
    return [
        {
            name: (x[i][batch["loss_mask"][i]] if x.ndim > 1 else x[i : i + 1]).tolist()
            for name, x in batch.items()
        }
        for i in range(len(batch["loss_mask"]))
    ]


def on_tokens(rows: Sequence[Sequence[float]], mask: Tensor) -> Tensor:
    """The opposite of `rows_that_count` for one name: float64 [B, T], 0 elsewhere."""
    result = torch.zeros(mask.shape, dtype=torch.float64)
    result[mask] = torch.tensor([x for row in rows for x in row], dtype=torch.float64)
    return result


def assert_as_in_loops(result: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """The dtype of what came in, and the numbers of the reference."""
    assert result.dtype == dtype
    torch.testing.assert_close(result.double(), expected, atol=BOUNDS[dtype], rtol=BOUNDS[dtype])


def assert_padding_has_no_say(function: Callable[[Batch], Tensor], batch: Batch) -> None:
    """Neither what it holds, NaN included, nor how much of it there is; the result is 0 there."""
    result, mask = function(batch), batch["loss_mask"]
    assert not result[~mask].any()
    assert torch.equal(function(spoilt(batch)), result)
    wide = function(wider(batch))
    torch.testing.assert_close(wide[:, LEFT:-RIGHT], result, atol=1e-12, rtol=1e-12)
    assert not wide[:, :LEFT].any()
    assert not wide[:, -RIGHT:].any()


def assert_rows_are_apart(function: Callable[[Batch], Tensor], batch: Batch, seed: int) -> None:
    """Shuffled, and cut into micro-batches, every row has the result it had."""
    result = function(batch)
    for rows in shuffled_cuts(batch, seed):
        torch.testing.assert_close(function(take(batch, rows)), result[rows], atol=1e-12, rtol=0)


def assert_rows_may_be_shuffled(
    function: Callable[[Batch], Tensor], batch: Batch, seed: int
) -> None:
    """Every row has the result it had, wherever it lies."""
    order = [i for part in shuffled_cuts(batch, seed) for i in part]
    torch.testing.assert_close(
        function(take(batch, order)), function(batch)[order], atol=1e-12, rtol=1e-12
    )


def _like(x: Tensor, mask: Tensor) -> Tensor:
    return mask[..., None] if x.ndim > mask.ndim else mask

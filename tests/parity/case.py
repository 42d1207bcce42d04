"""A comparison: our function and a peer's own, and the random inputs that both are given."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

BATCHES = 3
"""Batches that a case sees, of different lengths and draws."""
BOUNDS = {torch.float64: 1e-9, torch.float32: 2e-5}
RAGGED = (1, 2, 3, 5, 8)
"""Sizes of the groups; those of unequal size lie mixed."""
PAIRS_UP = (2, 3, 5, 8)
EQUAL = (4, 4, 4, 4, 4)


@dataclass(frozen=True)
class Batch:
    """B rows in groups, T positions, 7 tokens, 3 rewards; logprobs are [B, T] unless said."""

    #: bool [B, T], ragged with holes; row 0 has one token, row 1 all of its width, the last none.
    loss_mask: Tensor
    logprobs: Tensor
    old_logprobs: Tensor
    ref_logprobs: Tensor
    #: So far from the others that every guard against overflow is needed.
    far_logprobs: Tensor
    logits: Tensor  # [B, T, 7]
    advantages: Tensor  # [B, T]
    row_advantages: Tensor  # [B, 1]
    values: Tensor  # [B, T], as the two below
    old_values: Tensor
    returns: Tensor
    token_rewards: Tensor  # [B, T], at masked positions too
    rewards: Tensor  # [B, 3]
    baseline_scores: Tensor  # [B]
    group_ids: Tensor  # int64 [B], with gaps

    @property
    def scores(self) -> Tensor:
        """The first reward, [B]: those of one group are equal, a third of the others are 0."""
        return self.rewards[:, 0]

    @property
    def mask(self) -> Tensor:
        """The mask as numbers, as peers want it."""
        return self.loss_mask.to(self.logprobs.dtype)

    @property
    def log_ratio(self) -> Tensor:
        """Trained minus old."""
        return self.logprobs - self.old_logprobs

    def on_tokens(self, rows: Tensor) -> Tensor:
        """[B] on each token that counts, 0 elsewhere: [B, T]."""
        return rows[:, None] * self.mask


@dataclass(frozen=True)
class Case:
    """What is compared, and how near it has to be."""

    function: str
    peer: str
    ours: Callable[[Batch], Tensor]
    theirs: Callable[[Batch], Tensor]
    #: The field of the batch to take gradients by.
    wrt: str | None = None
    sizes: Sequence[int] = RAGGED
    dtype: torch.dtype = torch.float64
    #: None: that of the dtype.
    wider_bound: float | None = None
    note: str = ""

    @property
    def bound(self) -> float:
        """The largest difference allowed, absolute."""
        return self.wider_bound or BOUNDS[self.dtype]


@dataclass(frozen=True)
class Difference:
    """The largest absolute differences; `gradient` is None where none was taken."""

    value: float
    gradient: float | None

    def within(self, bound: float) -> bool:
        """Whether both are; not a number is not."""
        return self.value <= bound and (self.gradient is None or self.gradient <= bound)


def measure(case: Case, seed: int) -> Difference:
    """Run a case on its batches."""
    values, gradients = [], []
    for index in range(BATCHES):
        batch = random_batch(100 * seed + index, case.sizes, case.dtype)
        ours, our_gradient = _run(case.ours, batch, case.wrt)
        theirs, their_gradient = _run(case.theirs, batch, case.wrt)
        values.append(_distance(ours, theirs))
        gradients.append(_distance(our_gradient, their_gradient))
    # Not max(): it can lose what is not a number.
    return Difference(
        torch.tensor(values).max().item(),
        torch.tensor(gradients).max().item() if case.wrt else None,
    )


def random_batch(seed: int, sizes: Sequence[int], dtype: torch.dtype) -> Batch:
    """A batch with groups of these sizes, drawn in float64 whatever its dtype."""
    draw = torch.Generator().manual_seed(seed)
    rows, width = sum(sizes), 16 + 8 * (seed % BATCHES)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=draw, dtype=torch.float64)

    def drifted(logprobs: Tensor) -> Tensor:
        """Mostly near, a tenth of them far; still logarithms of probabilities."""
        spread = torch.where(uniform(rows, width) < 0.1, 1.5, 0.3)
        return (logprobs + spread * normal(rows, width)).clamp(max=-0.01)

    group_ids = torch.repeat_interleave(torch.arange(len(sizes)) * 3 + 2, torch.tensor(sizes))
    if len(set(sizes)) > 1:
        group_ids = group_ids[torch.randperm(rows, generator=draw)]
    # In eighths, whose means are exact: a deviation that is off from 0 verl divides by 1e-6.
    rewards = (8 * normal(rows, 3)).round() / 8
    rewards[uniform(rows) < 1 / 3, 0] = 0.0
    rewards[group_ids == group_ids.max(), 0] = 0.125
    logprobs = -normal(rows, width).abs() * 1.5 - 0.02
    values = normal(rows, width)
    batch = Batch(
        loss_mask=_random_mask(rows, width, draw),
        logprobs=logprobs,
        old_logprobs=drifted(logprobs),
        ref_logprobs=logprobs + 0.4 * normal(rows, width),
        far_logprobs=logprobs + 90 * (uniform(rows, width) - 0.5),
        logits=3 * normal(rows, width, 7),
        advantages=normal(rows, width),
        row_advantages=normal(rows, 1),
        values=values,
        old_values=values + 0.3 * normal(rows, width),
        returns=normal(rows, width),
        token_rewards=normal(rows, width),
        rewards=rewards,
        baseline_scores=normal(rows),
        group_ids=group_ids,
    )
    tensors = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return Batch(**{k: v.to(dtype) if v.is_floating_point() else v for k, v in tensors.items()})


def _random_mask(rows: int, width: int, draw: torch.Generator) -> Tensor:
    lengths = torch.randint(2, width + 1, (rows,), generator=draw)
    lengths[0], lengths[1], lengths[-1] = 1, width, 0
    mask = torch.arange(width) < lengths[:, None]
    holes = torch.rand(rows, width, generator=draw) < 0.2
    holes[:, 0] = holes[1, -1] = False
    return mask & ~holes


def _run(
    function: Callable[[Batch], Tensor], batch: Batch, wrt: str | None
) -> tuple[Tensor, Tensor]:
    """What it returns, and the gradient of a weighted sum of that; 0 if none is asked for."""
    if wrt is None:
        return function(batch), torch.zeros(())
    leaf = getattr(batch, wrt).clone().requires_grad_()
    value = function(replace(batch, **{wrt: leaf}))
    # A plain sum would not tell whose gradient it is.
    weights = torch.linspace(0.5, 1.5, value.numel(), dtype=value.dtype).view_as(value)
    (weights * value).sum().backward()
    return value.detach(), leaf.grad


def _distance(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
    return (ours.double() - theirs.double()).abs().max().item()

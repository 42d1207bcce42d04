"""Comparisons: of our function with a peer's on random inputs, of two matchers on answers."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from streamrl.errors import RewardError

BATCHES = 3
"""Batches per case, of different widths and seeds."""
BOUNDS = {torch.float64: 1e-9, torch.float32: 2e-5}
RAGGED = (1, 2, 3, 5, 8)
"""Sizes of the groups; rows of unequal groups are shuffled."""
PAIRS_UP = (2, 3, 5, 8)
EQUAL = (4, 4, 4, 4, 4)


@dataclass(frozen=True)
class Batch:
    """B rows in groups, T positions, 7 tokens, 3 rewards; tensors are [B, T] by default."""

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
        """The first reward, [B]: equal in one group, and 0 in a third of the others."""
        return self.rewards[:, 0]

    @property
    def mask(self) -> Tensor:
        """The mask in the dtype of the logprobs, as peers expect it."""
        return self.loss_mask.to(self.logprobs.dtype)

    @property
    def log_ratio(self) -> Tensor:
        return self.logprobs - self.old_logprobs

    def on_tokens(self, rows: Tensor) -> Tensor:
        """Place [B] on each counted token, 0 elsewhere: [B, T]."""
        return rows[:, None] * self.mask


@dataclass(frozen=True)
class ParityCase:
    """Two functions to compare, and the bound of their difference."""

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
    """The largest absolute differences; `gradient` is None without `wrt`."""

    value: float
    gradient: float | None

    def within(self, bound: float) -> bool:
        """Return whether both are; NaN is not."""
        return self.value <= bound and (self.gradient is None or self.gradient <= bound)


def measure(case: ParityCase, seed: int) -> Difference:
    """Run a case on its batches."""
    values, gradients = [], []
    for index in range(BATCHES):
        batch = random_batch(100 * seed + index, case.sizes, case.dtype)
        ours, our_gradient = _run(case.ours, batch, case.wrt)
        theirs, their_gradient = _run(case.theirs, batch, case.wrt)
        values.append(_distance(ours, theirs))
        gradients.append(_distance(our_gradient, their_gradient))
    # Not max(), which can lose a NaN.
    return Difference(
        torch.tensor(values).max().item(),
        torch.tensor(gradients).max().item() if case.wrt else None,
    )


def random_batch(seed: int, sizes: Sequence[int], dtype: torch.dtype) -> Batch:
    """Draw a batch with groups of these sizes, in float64 for any dtype."""
    draw = torch.Generator().manual_seed(seed)
    rows, width = sum(sizes), 16 + 8 * (seed % BATCHES)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=draw, dtype=torch.float64)

    def drifted(logprobs: Tensor) -> Tensor:
        """Move logprobs, a tenth of them far; they stay logarithms of probabilities."""
        spread = torch.where(uniform(rows, width) < 0.1, 1.5, 0.3)
        return (logprobs + spread * normal(rows, width)).clamp(max=-0.01)

    group_ids = torch.repeat_interleave(torch.arange(len(sizes)) * 3 + 2, torch.tensor(sizes))
    if len(set(sizes)) > 1:
        group_ids = group_ids[torch.randperm(rows, generator=draw)]
    # Multiples of 1/8, whose means are exact: verl divides a deviation near 0 by 1e-6.
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
    """Return the result and the gradient of its weighted sum by `wrt`, 0 without it."""
    if wrt is None:
        return function(batch), torch.zeros(())
    leaf = getattr(batch, wrt).clone().requires_grad_()
    value = function(replace(batch, **{wrt: leaf}))
    # Unequal weights, so that gradients of different elements differ.
    weights = torch.linspace(0.5, 1.5, value.numel(), dtype=value.dtype).view_as(value)
    (weights * value).sum().backward()
    return value.detach(), leaf.grad


def _distance(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
    return (ours.double() - theirs.double()).abs().max().item()


Answer = tuple[str, str]
"""Completion and ground truth."""
SHOWN_CHARACTERS = 40


@dataclass(frozen=True)
class OnPurpose:
    """An intended difference of scores, and its reason."""

    answer: Answer
    ours: float
    theirs: float
    reason: str

    def __str__(self) -> str:
        return f"{_difference(self.answer, self.ours, self.theirs)}: {self.reason}"


@dataclass(frozen=True)
class AnswerCase:
    """Two matchers to compare, and their intended differences.

    `ours` raises RewardError for a ground truth it refuses, which is not compared.
    """

    function: str
    peer: str
    ours: Callable[[str, str], float]
    theirs: Callable[[str, str], float]
    on_purpose: Sequence[OnPurpose] = ()


@dataclass(frozen=True)
class Agreement:
    """Numbers of answers, and the differences that are not as listed."""

    num_compared: int
    num_agreeing: int
    num_refused: int
    unlisted: Sequence[str]

    @property
    def as_listed(self) -> bool:
        """Whether the differences are exactly the listed ones."""
        return not self.unlisted


def score_all(case: AnswerCase, answers: Sequence[Answer]) -> Agreement:
    """Run both matchers on all answers."""
    scores = {}
    for answer in answers:
        with suppress(RewardError):
            scores[answer] = (case.ours(*answer), case.theirs(*answer))
    differing = {answer: pair for answer, pair in scores.items() if pair[0] != pair[1]}
    listed = {entry.answer: (entry.ours, entry.theirs) for entry in case.on_purpose}
    unlisted = [
        _difference(answer, *scores[answer])
        for answer in {**differing, **listed}
        if differing.get(answer) != listed.get(answer)
    ]
    refused = len(answers) - len(scores)
    return Agreement(len(scores), len(scores) - len(differing), refused, unlisted)


def _difference(answer: Answer, ours: float, theirs: float) -> str:
    completion, truth = (repr(text) for text in answer)
    if len(completion) > SHOWN_CHARACTERS:
        completion = f"{completion[:SHOWN_CHARACTERS]}..."
    return f"{completion} for {truth}: ours {ours:g}, theirs {theirs:g}"

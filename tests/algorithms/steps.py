"""A random training step: columns of whole groups, and the loss of any subset of rows."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from streamrl.algorithms import AlgorithmConfig, AlgorithmSettings
from streamrl.algorithms.objective import derive_group_columns, policy_loss
from streamrl.messages import FinishReason

WEIGHTS = {"right": 1.0, "short": 0.5}
MAX_LENGTH = 9
NUM_WORDS = 3


def make_settings(config: AlgorithmConfig) -> AlgorithmSettings:
    return config.to_settings(max_length=MAX_LENGTH, reward_weights=WEIGHTS)


@dataclass
class Step:
    """Columns [B] and [B, T] in float64, and logprobs and entropy of the trained policy."""

    columns: dict[str, Tensor]
    group_ids: Tensor
    logprobs: Tensor
    entropy: Tensor

    @property
    def num_rows(self) -> int:
        return len(self.group_ids)

    def rows(self, order: Sequence[int]) -> "Step":
        """Return only these rows, in this order."""
        picked = torch.tensor(list(order))
        columns = {name: column[picked] for name, column in self.columns.items()}
        return Step(columns, self.group_ids[picked], self.logprobs[picked], self.entropy[picked])

    def with_nan_padding(self) -> "Step":
        """Return the step with NaN wherever the policy did not sample."""
        mask = self.columns["loss_mask"]
        columns = {
            name: spoil_padding(mask, column) if is_float_per_token(column) else column
            for name, column in self.columns.items()
        }
        spoil = [torch.where(mask, x, torch.nan) for x in (self.logprobs, self.entropy)]
        return Step(columns, self.group_ids, *spoil)

    def with_more_padding(self, by: int) -> "Step":
        """Return the step with more padding on the right."""
        pad = torch.nn.functional.pad
        columns = {
            name: pad(column, (*(0, 0) * (column.ndim - 2), 0, by)) if column.ndim > 1 else column
            for name, column in self.columns.items()
        }
        return Step(
            columns, self.group_ids, pad(self.logprobs, (0, by)), pad(self.entropy, (0, by))
        )


def spoil_padding(mask: Tensor, column: Tensor) -> Tensor:
    """Return [B, T] or [B, T, W] with NaN where `mask` [B, T] is false."""
    return torch.where(mask if column.ndim == 2 else mask[..., None], column, torch.nan)


def is_float_per_token(column: Tensor) -> bool:
    return column.ndim > 1 and column.is_floating_point()


def make_step(
    seed: int = 0, *, sizes: Sequence[int] = (4, 3, 2), dtype: torch.dtype = torch.float64
) -> Step:
    """Return groups of these sizes, ragged multi-turn rows, and ratios up to about 2."""
    random = torch.Generator().manual_seed(seed)
    num_rows = sum(sizes)
    group_ids = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    lengths = torch.randint(2, MAX_LENGTH + 1, (num_rows,), generator=random)
    width = int(lengths.max())
    mask = torch.arange(width) < lengths[:, None]
    mask &= torch.rand(mask.shape, generator=random) < 0.8
    mask[torch.arange(num_rows), lengths - 1] = True

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(*shape, generator=random, dtype=torch.float64).to(dtype)

    def per_token(scale: float) -> Tensor:
        return torch.where(mask, -1.5 + normal(*mask.shape, scale=scale), 0.0)

    def words() -> Tensor:
        some = normal(*mask.shape, NUM_WORDS + 2).log_softmax(-1)[..., :NUM_WORDS]
        return torch.where(mask[..., None], some, 0.0)

    generator = per_token(0.5)
    starts = mask & ~torch.nn.functional.pad(mask, (1, 0))[:, :-1]
    turns = torch.where(mask, starts.cumsum(-1), 0)
    # Some scores are 0.
    scores = normal(num_rows) * (torch.arange(num_rows) % 4 != 0)
    is_last = torch.arange(width) == lengths[:, None] - 1
    is_first = starts & (starts.cumsum(-1) == 1)
    cut_off = torch.where(lengths == lengths.max(), FinishReason.LENGTH.value, 0)
    columns = {
        "lengths": lengths,
        "loss_mask": mask,
        "finish_reason": cut_off,
        "generator_logprobs": generator,
        "ref_logprobs": per_token(0.5),
        "values": per_token(1.0),
        "cost_values": per_token(1.0),
        "costs": normal(num_rows),
        "baseline_scores": normal(len(sizes))[group_ids],
        "scores": scores,
        "token_scores": scores[:, None] * (0.25 * is_first + 0.75 * is_last),
        "turn_ends": turns,
        "turn_states": turns % 3,
        # Words of five that the policies know.
        "word_logprobs": words(),
        "ref_top_logprobs": words(),
        **{f"reward/{name}": normal(num_rows) for name in WEIGHTS},
    }
    logprobs = torch.where(mask, generator + normal(*mask.shape, scale=0.3), 0.0)
    entropy = torch.where(mask, 2 + normal(*mask.shape, scale=0.1), 0.0)
    columns["score_norms"] = torch.where(mask, normal(*mask.shape).square(), 0.0)
    return Step(columns, group_ids, logprobs, entropy)


def derive_columns(config: AlgorithmConfig, step: Step) -> dict[str, Tensor]:
    return derive_group_columns(config.spec, make_settings(config), step.columns, step.group_ids)


@dataclass
class TrainingResult:
    """Summed loss, sums and gradient by logprobs of tokens and further words, [B, T, 1 + W]."""

    loss: Tensor
    sums: dict[str, Tensor]
    gradient: Tensor


def train(config: AlgorithmConfig, step: Step, derived: dict[str, Tensor]) -> TrainingResult:
    """Run forward and backward on these rows with their derived columns."""
    leaf = step.logprobs.clone().requires_grad_()
    words = step.columns["word_logprobs"].clone().requires_grad_()
    batch, settings = {**step.columns, **derived, "word_logprobs": words}, make_settings(config)
    loss, sums = policy_loss(config.spec, settings, batch, logprobs=leaf, entropy=step.entropy)
    found = torch.autograd.grad(loss, (leaf, words), materialize_grads=True)
    gradient = torch.cat((found[0][..., None], found[1]), dim=-1)
    mask = step.columns["loss_mask"][..., None]
    return TrainingResult(loss.detach(), sums, torch.where(mask, gradient, 0.0))

"""Losses of a step from the formulas of docs/algorithms.md: rollout by rollout, without padding.

Calls no function of the package that computes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from streamrl.messages import Columns, split_token_column
from tests.engines.trainer_ranks import ALGORITHM, GROUPS, TEMPERATURE

TOKEN_COLUMNS = ("token_ids", "loss_mask", "generator_logprobs")


def iter_rows(columns: Columns, *names: str) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """Yield the token ids [1, T] of each rollout, and columns of all tokens but the first."""
    parts = {
        name: split_token_column(columns[name], columns["lengths"])
        for name in (*TOKEN_COLUMNS, *names)
    }
    for i in range(len(columns["lengths"])):
        row = {name: torch.from_numpy(rollouts[i])[None, 1:] for name, rollouts in parts.items()}
        yield torch.from_numpy(parts["token_ids"][i])[None].long(), row


def logprobs_of(logits: Tensor, ids: Tensor) -> dict[str, Any]:
    """Return logprobs and entropies of every token but the first, [1, T - 1]."""
    full = (logits[:, :-1] / TEMPERATURE).log_softmax(-1)
    logprobs = full.gather(-1, ids[:, 1:, None])[..., 0]
    return {"logprobs": logprobs, "entropy": -(full.exp() * full).sum(-1)}


def clipped_loss(ratio: Tensor, advantage: Tensor) -> Tensor:
    """Return PPO's loss of each token, with the clip at 0.2."""
    return torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))


class PlainOptimizer:
    """AdamW with clipped gradients; `norms` are those before clipping."""

    def __init__(self, parameters: Iterable[Tensor], lr: float) -> None:
        self.parameters = list(parameters)
        self.norms: list[float] = []
        self._optimizer = torch.optim.AdamW(self.parameters, lr=lr, weight_decay=0.0)

    def step(self) -> None:
        """Apply the gradients, and set them to 0."""
        self.norms.append(torch.nn.utils.clip_grad_norm_(self.parameters, 1.0).item())
        self._optimizer.step()
        self._optimizer.zero_grad()


def parameters_by_name(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return all parameters under all their names."""
    named = model.named_parameters(remove_duplicate=False)
    return {name: parameter.detach() for name, parameter in named}


def measure_max_difference(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    assert tensors.keys() == expected.keys()
    return max((tensors[name] - expected[name]).abs().max().item() for name in expected)


def plain_loss(logits_of: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the loss summed over all groups; `logits_of` maps token ids [1, T] to [1, T, V].

    GRPO with k3 and entropy in the loss: means over each rollout's tokens.
    """
    total = torch.zeros(())
    for columns in GROUPS.values():
        scores = torch.from_numpy(columns["scores"])
        advantages = (scores - scores.mean()) / (scores.std() + 1e-6)
        rows = zip(advantages, iter_rows(columns, "ref_logprobs"), strict=True)
        for advantage, (ids, row) in rows:
            outputs = logprobs_of(logits_of(ids), ids)
            losses = clipped_loss(
                (outputs["logprobs"] - row["generator_logprobs"]).exp(), advantage
            )
            x = outputs["logprobs"] - row["ref_logprobs"]
            losses = losses + ALGORITHM.kl_coef * ((-x).exp() + x - 1)
            losses = losses - ALGORITHM.entropy_coef * outputs["entropy"]
            total = total + losses[row["loss_mask"]].mean()
    return total

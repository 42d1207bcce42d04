"""Loss of a step written out: rollout by rollout, without padding, in a single process."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from streamrl.algorithms.math.advantages import group_relative_advantages
from streamrl.algorithms.math.losses import entropy_from_logits
from streamrl.algorithms.objective import policy_loss
from streamrl.messages import Columns, split_token_column
from tests.engines.trainer_ranks import ALGORITHM, GROUPS, SETTINGS, TEMPERATURE, VALUE_CLIP

TOKEN_COLUMNS = ("token_ids", "loss_mask", "generator_logprobs")


def iter_rows(columns: Columns, *names: str) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """Yield the token ids [1, T] of each rollout, and columns of all tokens but the first."""
    parts = {
        name: split_token_column(columns[name], columns["lengths"])
        for name in (*TOKEN_COLUMNS, *names)
    }
    for i in range(len(columns["lengths"])):
        row = {name: torch.from_numpy(rollouts[i])[None, 1:] for name, rollouts in parts.items()}
        row["group_tokens"] = torch.tensor([int(columns["loss_mask"].sum())])
        yield torch.from_numpy(parts["token_ids"][i])[None].long(), row


def logprobs_of(logits: Tensor, ids: Tensor) -> dict[str, Any]:
    """Return logprobs and entropies of every token but the first, [1, T - 1]."""
    logits = logits[:, :-1] / TEMPERATURE
    logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return {"logprobs": logprobs, "entropy": entropy_from_logits(logits)}


def clipped_value_loss(values: Tensor, old: Tensor, returns: Tensor) -> Tensor:
    """Return half of PPO's squared error, summed."""
    clipped = old + (values - old).clamp(-VALUE_CLIP, VALUE_CLIP)
    return torch.maximum((values - returns) ** 2, (clipped - returns) ** 2).sum() / 2


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


def plain_loss(logits_of: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the loss summed over all groups; `logits_of` maps token ids [1, T] to [1, T, V]."""
    total = torch.zeros(())
    for columns in GROUPS.values():
        scores = torch.from_numpy(columns["scores"])
        advantages = group_relative_advantages(scores, torch.zeros(len(scores), dtype=torch.long))
        rows = zip(advantages, iter_rows(columns, "ref_logprobs"), strict=True)
        for advantage, (ids, row) in rows:
            row["advantages"] = advantage[None]
            outputs = logprobs_of(logits_of(ids), ids)
            total = total + policy_loss(ALGORITHM.spec, SETTINGS, row, **outputs)[0]
    return total

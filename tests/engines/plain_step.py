"""Loss of a step written out: rollout by rollout, without padding, in a single process."""

from collections.abc import Callable

import torch
from torch import Tensor

from streamrl.algorithms.math.advantages import group_relative_advantages
from streamrl.algorithms.math.losses import entropy_from_logits
from streamrl.algorithms.objective import policy_loss
from streamrl.messages import split_token_column
from tests.engines.trainer_ranks import ALGORITHM, GROUPS, SETTINGS, TEMPERATURE


def plain_loss(logits_of: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the loss summed over all groups; `logits_of` maps token ids [1, T] to [1, T, V]."""
    total = torch.zeros(())
    for columns in GROUPS.values():
        scores = torch.from_numpy(columns["scores"])
        advantages = group_relative_advantages(scores, torch.zeros(len(scores), dtype=torch.long))
        cut = {
            name: split_token_column(columns[name], columns["lengths"])
            for name in ("token_ids", "loss_mask", "generator_logprobs", "ref_logprobs")
        }
        for i in range(len(columns["lengths"])):
            row = {name: torch.from_numpy(parts[i])[None, 1:] for name, parts in cut.items()}
            ids = torch.from_numpy(cut["token_ids"][i])[None].long()
            logits = logits_of(ids)[:, :-1] / TEMPERATURE
            logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
            batch = row | {
                "advantages": advantages[i : i + 1],
                "group_tokens": torch.tensor([int(columns["loss_mask"].sum())]),
            }
            loss, _ = policy_loss(
                ALGORITHM.spec,
                SETTINGS,
                batch,
                logprobs=logprobs,
                entropy=entropy_from_logits(logits),
            )
            total = total + loss
    return total

"""Pretraining loss added to the policy's loss (PPO-ptx; InstructGPT, arXiv 2203.02155, eq. 2).

The loss keeps the policy from forgetting abilities that are not rewarded.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from streamrl.buffer.micro_batch_schedule import pack_rollouts
from streamrl.data.pretrain_texts import TextStream
from streamrl.distributed.devices import get_local_device
from streamrl.engines.models.forward import compute_token_logprobs


@dataclass(frozen=True)
class PretrainingLoss:
    """Adds `coef` times the mean token loss of `num_texts` pretraining texts to every update.

    Texts are truncated to `max_tokens` tokens; a micro-batch has at most `micro_batch_tokens`,
    padding included.
    """

    texts: TextStream
    tokenizer: PreTrainedTokenizerBase
    coef: float
    num_texts: int
    max_tokens: int
    micro_batch_tokens: int

    def compute_losses(
        self, update: int, forward: Callable[..., Any], *, dp_rank: int, dp_size: int
    ) -> Iterator[Tensor]:
        """Yield the pretraining losses of this rank's micro-batches for the update number `update`.

        The sum over micro-batches and data-parallel ranks is the loss to add. All ranks get equally
        many micro-batches because `forward` may be collective.
        """
        token_ids = self._tokenize_texts(self.texts.get_batch(update, self.num_texts))
        # The first token of a text is not predicted.
        num_tokens = sum(len(ids) - 1 for ids in token_ids)
        rounds = pack_rollouts(
            [("", index, len(ids)) for index, ids in enumerate(token_ids)],
            dp_size=dp_size,
            micro_batch_tokens=self.micro_batch_tokens,
        )
        for work in rounds:
            rows = [token_ids[index] for _, index in work[dp_rank]]
            yield self.coef / max(num_tokens, 1) * _sum_token_losses(forward, rows)

    def _tokenize_texts(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of texts, ended by the end-of-sequence token and then truncated."""
        end = self.tokenizer.eos_token_id
        encoded = self.tokenizer(list(texts), add_special_tokens=True)["input_ids"]
        terminated = [ids if ids[-1:] == [end] or end is None else [*ids, end] for ids in encoded]
        return [ids[: self.max_tokens] for ids in terminated]


def _sum_token_losses(forward: Callable[..., Any], rows: Sequence[Sequence[int]]) -> Tensor:
    """Return the sum of -logprob over all tokens but the first of each row; 0 without rows.

    `rows` are the token ids of a micro-batch's texts.
    """
    lengths = torch.tensor([len(row) for row in rows] or [0])
    width = max(int(lengths.max()), 2)
    token_ids = torch.zeros(len(lengths), width, dtype=torch.long)
    for i, row in enumerate(rows):
        token_ids[i, : len(row)] = torch.tensor(row)
    mask = (torch.arange(width) < lengths[:, None]).to(get_local_device())
    scores = compute_token_logprobs(
        forward, token_ids.to(get_local_device()), mask, temperature=1.0
    )
    return -scores.logprobs.sum()

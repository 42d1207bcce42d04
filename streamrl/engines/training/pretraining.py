"""A pretraining loss beside the policy's own, from texts of its own (PPO-ptx).

It keeps a policy from forgetting what it is not rewarded for. Source: Ouyang et al. 2022
(InstructGPT), equation 2.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from streamrl.buffer.assembly.packing import pack_rollouts
from streamrl.data import TextStream
from streamrl.engines.models.forward import compute_token_logprobs, get_local_device

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class PretrainingLoss:
    """What is added to every update: `coef` times the mean loss of the tokens of `rows` texts.

    Texts are cut at `max_tokens`; a micro-batch holds at most `micro_batch_tokens`, padding
    included.
    """

    texts: TextStream
    tokenizer: "PreTrainedTokenizerBase"
    coef: float
    num_texts: int
    max_tokens: int
    micro_batch_tokens: int

    def compute_losses(
        self, update: int, forward: Callable[..., Any], *, share: int, num_shares: int
    ) -> Iterator[Tensor]:
        """Of the texts of an update, one share, a micro-batch at a time; they add up.

        All shares get as many, as a forward may be collective.
        """
        token_ids = self._tokenize_texts(self.texts.get_batch(update, self.num_texts))
        # A text's first token is not predicted.
        num_tokens = sum(len(ids) - 1 for ids in token_ids)
        rounds = pack_rollouts(
            [("", index, len(ids)) for index, ids in enumerate(token_ids)],
            world_size=num_shares,
            micro_batch_tokens=self.micro_batch_tokens,
        )
        for work in rounds:
            rows = [token_ids[index] for _, index in work[share]]
            yield self.coef / max(num_tokens, 1) * _sum_token_losses(forward, rows)

    def _tokenize_texts(self, texts: Sequence[str]) -> list[list[int]]:
        end = self.tokenizer.eos_token_id
        encoded = self.tokenizer(list(texts), add_special_tokens=True)["input_ids"]
        ended = [ids if ids[-1:] == [end] or end is None else [*ids, end] for ids in encoded]
        return [ids[: self.max_tokens] for ids in ended]


def _sum_token_losses(forward: Callable[..., Any], rows: Sequence[Sequence[int]]) -> Tensor:
    """Minus the log-probability of all tokens but the first of each row; 0 for no rows."""
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

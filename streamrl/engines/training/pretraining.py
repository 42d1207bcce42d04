"""Pretraining loss added to the policy's loss (PPO-ptx; InstructGPT, arXiv 2203.02155, eq. 2).

The loss keeps the policy from forgetting abilities that are not rewarded.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from streamrl.buffer.micro_batch_schedule import pack_rollouts
from streamrl.data.pretrain_texts import TextStream
from streamrl.distributed.devices import get_local_device
from streamrl.engines.models.forward import compute_token_logprobs
from streamrl.engines.training.collate import build_batch


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
        many micro-batches, none if no text has two tokens, because `forward` may be collective.
        """
        encoded = self._tokenize_texts(self.texts.get_batch(update, self.num_texts))
        # The first token of a text is not predicted.
        token_ids = [ids for ids in encoded if len(ids) > 1]
        if not token_ids:
            return
        num_tokens = sum(len(ids) - 1 for ids in token_ids)
        rounds = pack_rollouts(
            [("", index, len(ids)) for index, ids in enumerate(token_ids)],
            dp_size=dp_size,
            micro_batch_tokens=self.micro_batch_tokens,
        )
        columns = {
            "token_ids": np.concatenate([np.array(ids, np.int32) for ids in token_ids]),
            "lengths": np.array([len(ids) for ids in token_ids], np.int32),
        }
        for work in rounds:
            picks = work[dp_rank]
            batch = build_batch(
                {"": columns}, picks, derived={"": {}}, token_columns=("token_ids",)
            ).to(get_local_device())
            scores = compute_token_logprobs(
                forward, batch["token_ids"], batch["attention_mask"], temperature=1.0
            )
            # Without texts the micro-batch is a dummy, for the collectives of the other ranks.
            weight = -self.coef / num_tokens if picks else 0.0
            yield weight * scores.logprobs.sum()

    def _tokenize_texts(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of texts, ended by the end-of-sequence token and then truncated."""
        end = self.tokenizer.eos_token_id
        encoded = self.tokenizer(list(texts), add_special_tokens=True)["input_ids"]
        terminated = [ids if ids[-1:] == [end] or end is None else [*ids, end] for ids in encoded]
        return [ids[: self.max_tokens] for ids in terminated]

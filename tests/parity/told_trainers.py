"""TRL's trainers, with a model too small to matter.

TRL has most of its formulas inside its trainers. What a model, a sampler or a reward function would
say is told these instead; all else is TRL's own code.
"""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.experimental.gmpo import GMPOTrainer

from tests.parity.case import EQUAL, Batch

REWARDS = 3
SETTINGS = {
    "output_dir": tempfile.gettempdir(),
    "use_cpu": True,
    "bf16": False,
    "report_to": [],
    "gradient_checkpointing": False,
    "per_device_train_batch_size": sum(EQUAL),
    "num_generations": EQUAL[0],
}
"""One micro-batch of all rows, on the CPU, told to nobody."""


class Told:
    """A trainer that samples nothing and scores nothing: all of that is in the batch."""

    batch: Batch

    def _completions(self) -> list[list[int]]:
        return torch.zeros(self.batch.loss_mask.shape, dtype=torch.long).tolist()

    def _get_per_token_logps_and_entropies(self, *_: Any, **__: Any) -> tuple[Tensor, Tensor, None]:
        return self.batch.logprobs, torch.zeros_like(self.batch.logprobs), None

    def _calculate_rewards(self, *_: Any) -> Tensor:
        return self.batch.rewards


class ToldGRPO(Told, GRPOTrainer):
    """Every token is part of the completion; those that do not count are a tool's."""

    def _generate(self, prompts: list[str]) -> tuple[Any, ...]:
        prompt_ids, ids = [[0]] * len(prompts), self._completions()
        mask, sampled = self.batch.loss_mask.long().tolist(), self.batch.old_logprobs.tolist()
        return prompt_ids, ids, mask, prompts, sampled, {}, None, []


class ToldGMPO(Told, GMPOTrainer):
    """The same for GMPO."""


class ToldRLOO(Told, RLOOTrainer):
    """The same for RLOO, which knows no tools."""

    def _generate(self, prompts: list[str]) -> tuple[Any, ...]:
        return [[0]] * len(prompts), self._completions(), prompts


def trainer_of(kind: type, config: GRPOConfig | RLOOConfig) -> Any:
    """A trainer of TRL's for one process and one micro-batch per step."""
    words = Tokenizer(models.WordLevel({"a": 0, "<pad>": 1, "<eos>": 2}, unk_token="a"))
    trainer = kind(
        model=Qwen2ForCausalLM(
            Qwen2Config(
                vocab_size=8,
                hidden_size=8,
                intermediate_size=8,
                num_hidden_layers=1,
                num_attention_heads=1,
                num_key_value_heads=1,
            )
        ),
        args=config,
        reward_funcs=[lambda prompts, **_: [0.0] * len(prompts)] * REWARDS,
        train_dataset=Dataset.from_dict({"prompt": ["a"] * sum(EQUAL)}),
        processing_class=PreTrainedTokenizerFast(
            tokenizer_object=words, pad_token="<pad>", eos_token="<eos>"
        ),
    )
    trainer.current_gradient_accumulation_steps = 1  # its training loop would set it
    return trainer


@contextmanager
def in_float64() -> Iterator[None]:
    """For what TRL makes of lists."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def loss_of(trainer: Any) -> Callable[[Batch], Tensor]:
    """What the trainer would call backward on."""

    def theirs(batch: Batch) -> Tensor:
        trainer.batch = batch
        ids = torch.zeros(batch.loss_mask.shape, dtype=torch.long)
        inputs = {
            "prompt_ids": ids[:, :1],
            "prompt_mask": ids[:, :1] + 1,
            "completion_ids": ids,
            "completion_mask": batch.loss_mask.long(),
            "advantages": batch.row_advantages[:, 0],
            "old_per_token_logps": batch.old_logprobs,
            "ref_per_token_logps": batch.ref_logprobs,
            "num_items_in_batch": batch.loss_mask.sum(),
        }
        return trainer._compute_loss(trainer.model, inputs)

    return theirs


def scored(trainer: Any, column: str) -> Callable[[Batch], Tensor]:
    """A column that the trainer makes of rewards and logprobs before it trains."""

    def theirs(batch: Batch) -> Tensor:
        trainer.batch = batch
        with in_float64():
            prompts = [{"prompt": "a"} for _ in batch.loss_mask]
            return trainer._generate_and_score_completions(prompts)[column]

    return theirs

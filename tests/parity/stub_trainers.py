"""TRL's trainers with stubs for model, sampling and rewards.

TRL has most of its formulas inside its trainers. Logprobs, completions and rewards come from the
batch; all else is TRL's own code.
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
from trl import GRPOConfig, GRPOTrainer

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
"""One micro-batch of all rows, on the CPU, without reports."""


class BatchStub:
    """Trainer mixin that takes completions, logprobs and rewards from a batch."""

    batch: Batch

    def _completions(self) -> list[list[int]]:
        return torch.zeros(self.batch.loss_mask.shape, dtype=torch.long).tolist()

    def _get_per_token_logps_and_entropies(self, *_: Any, **__: Any) -> tuple[Tensor, Tensor, None]:
        return self.batch.logprobs, torch.zeros_like(self.batch.logprobs), None

    def _calculate_rewards(self, *_: Any) -> Tensor:
        return self.batch.rewards


class StubGRPOTrainer(BatchStub, GRPOTrainer):
    """Every token is part of the completion; uncounted tokens are a tool's."""

    def _generate(self, prompts: list[str]) -> tuple[Any, ...]:
        prompt_ids, ids = [[0]] * len(prompts), self._completions()
        mask, sampled = self.batch.loss_mask.long().tolist(), self.batch.old_logprobs.tolist()
        return prompt_ids, ids, mask, prompts, sampled, {}, None, []


def make_trainer(kind: type, config: GRPOConfig) -> Any:
    """Make a trainer for one process and one micro-batch per step."""
    words = Tokenizer(models.WordLevel({"a": 0, "<pad>": 1, "<eos>": 2}, unk_token="a"))
    sizes = dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), 8)
    counts = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    trainer = kind(
        model=Qwen2ForCausalLM(Qwen2Config(**sizes, **dict.fromkeys(counts, 1))),
        args=config,
        reward_funcs=[lambda prompts, **_: [0.0] * len(prompts)] * REWARDS,
        train_dataset=Dataset.from_dict({"prompt": ["a"] * sum(EQUAL)}),
        processing_class=PreTrainedTokenizerFast(
            tokenizer_object=words, pad_token="<pad>", eos_token="<eos>"
        ),
    )
    trainer.current_gradient_accumulation_steps = 1  # set by its training loop
    return trainer


@contextmanager
def in_float64() -> Iterator[None]:
    """Make float64 the dtype of tensors that TRL makes from lists."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def compute_loss(trainer: Any) -> Callable[[Batch], Tensor]:
    """Return a function for the trainer's loss of a batch."""

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


def compute_column(trainer: Any, column: str) -> Callable[[Batch], Tensor]:
    """Return a function for a column that the trainer derives before it trains."""

    def theirs(batch: Batch) -> Tensor:
        trainer.batch = batch
        with in_float64():
            prompts = [{"prompt": "a"} for _ in batch.loss_mask]
            return trainer._generate_and_score_completions(prompts)[column]

    return theirs

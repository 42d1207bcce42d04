"""Compare our functions with TRL's trainers on equal inputs, where verl has no peer of ours.

TRL has most of its formulas inside its trainers. Logprobs, completions and rewards come from the
batch; all else is TRL's own code.
"""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from streamrl.algorithms.math import advantages, correction, losses, tokens
from streamrl.algorithms.table import VESPO_PARAMS
from tests.algorithms.aggregate import aggregate_loss
from tests.parity.case import EQUAL, Batch, ParityCase

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


MAX_LENGTH = 64
THRESHOLD = 0.05
FIRST_REWARD = [1.0, 0.0, 0.0]
EPS = 1e-4
BETA = 0.3
CLIP = {"clip_low": 0.2, "clip_high": 0.28}
grpo = partial(GRPOConfig, **SETTINGS, epsilon=0.2, epsilon_high=0.28)


def our_surrogate(batch: Batch) -> Tensor:
    return losses.clipped_surrogate_loss(batch.log_ratio, batch.row_advantages, **CLIP)


def our_divergence(batch: Batch) -> Tensor:
    return BETA * tokens.kl_estimate(batch.logprobs, batch.ref_logprobs, "k3")


def reduce_loss(batch: Batch, token_loss: Tensor, loss_type: str) -> Tensor:
    """Reduce as TRL does under its `loss_type`; it counts rows without a token."""
    mode = {
        "grpo": "seq-mean-token-mean",
        "bnpo": "token-mean",
        "dapo": "token-mean",
        "dr_grpo": "seq-mean-token-sum-norm",
        "luspo": "seq-mean-token-sum",
        "vespo": "token-mean",
    }[loss_type]
    rows = len(batch.loss_mask)
    return aggregate_loss(
        token_loss, batch.loss_mask, mode=mode, num_sequences=rows, max_length=MAX_LENGTH
    )


def loss_case(
    function: str,
    peer: str,
    token_loss: Callable[[Batch], Tensor],
    config: GRPOConfig,
    *,
    loss_type: str = "grpo",
    beta: float = 0.0,
    note: str = "",
) -> ParityCase:
    """Make a case of a loss of GRPOTrainer; `loss_type` is its reduction."""
    trainer = make_trainer(StubGRPOTrainer, config)
    trainer.beta = beta  # set late: its constructor would load a reference
    return ParityCase(
        function,
        f"GRPOTrainer, {peer}",
        lambda b: reduce_loss(b, token_loss(b), loss_type),
        compute_loss(trainer),
        wrt="logprobs",
        sizes=EQUAL,
        note=note,
    )


def scale_by_batch() -> ParityCase:
    """Make a case of group-relative advantages over the deviation of the batch."""
    config = grpo(scale_rewards="batch", reward_weights=FIRST_REWARD)
    return ParityCase(
        "advantages.group_relative, batch",
        "GRPOTrainer, scale_rewards=batch",
        lambda b: advantages.group_relative_advantages(
            b.scores, b.group_ids, scale="batch", eps=EPS
        ),
        compute_column(make_trainer(StubGRPOTrainer, config), "advantages"),
        sizes=EQUAL,
    )


def weights(level: str, mode: str, low: float | None) -> ParityCase:
    """Make a case of importance ratios of tokens that vLLM sampled."""
    config = grpo(
        vllm_importance_sampling_mode=f"{level}_{mode}",
        vllm_importance_sampling_clip_min=low,
        vllm_importance_sampling_clip_max=2.0,
    )
    trainer = make_trainer(StubGRPOTrainer, config)
    trainer.use_vllm = True  # set late: its constructor would start vLLM
    theirs = compute_column(trainer, "importance_sampling_ratio")
    return ParityCase(
        f"correction.importance_weights, {level}, {mode}{', low' if low else ''}",
        f"GRPOTrainer, vLLM {level}_{mode}",
        lambda b: correction.importance_weights(
            b.log_ratio, b.loss_mask, level=level, low=low, high=2.0, mode=mode
        ),
        lambda b: theirs(b) * b.mask,
        sizes=EQUAL,
        note="TRL's are not 0 where the mask is false",
    )


def high_entropy() -> ParityCase:
    """Make a case of the mask of tokens of high entropy."""
    trainer, share = make_trainer(StubGRPOTrainer, grpo()), 0.2

    def ours(batch: Batch) -> Tensor:
        entropies = -batch.logprobs
        limit = correction.high_entropy_limit(entropies[batch.loss_mask], share=share)
        return ((entropies >= limit) & batch.loss_mask).double()

    def theirs(batch: Batch) -> Tensor:
        return trainer.get_high_entropy_mask(-batch.logprobs, batch.mask, 1 - share).double()

    return ParityCase("correction.high_entropy_limit", "get_high_entropy_mask", ours, theirs)


def our_off_policy_mask(batch: Batch) -> Tensor:
    return correction.off_policy_sequence_mask(
        batch.log_ratio, batch.row_advantages, batch.loss_mask, threshold=THRESHOLD
    )


def their_off_policy_mask(batch: Batch) -> Tensor:
    """TRL's is per row, [B, 1]."""
    return batch.mask * GRPOTrainer.get_off_policy_mask(
        batch.row_advantages, batch.logprobs, batch.old_logprobs, batch.mask, THRESHOLD
    )


CASES = [
    scale_by_batch(),
    *(
        loss_case(
            f"losses.clipped_surrogate, as {loss_type}",
            loss_type,
            our_surrogate,
            grpo(loss_type=loss_type, max_completion_length=MAX_LENGTH),
            loss_type=loss_type,
        )
        for loss_type in ("grpo", "bnpo", "dapo", "dr_grpo")
    ),
    loss_case(
        "tokens.kl_estimate, k3, in the loss",
        "beta",
        lambda b: our_surrogate(b) + our_divergence(b),
        grpo(loss_type="grpo", use_bias_correction_kl=False),
        beta=BETA,
        note="up to 10; TRL has no limit",
    ),
    loss_case(
        "tokens.kl_estimate, k3, times the ratio",
        "beta, use_bias_correction_kl",
        lambda b: our_surrogate(b) + tokens.probability_ratio(b.log_ratio) * our_divergence(b),
        grpo(loss_type="grpo"),
        beta=BETA,
        note="up to 10; TRL has no limit",
    ),
    loss_case(
        "losses.sequence_clipped_surrogate, as luspo",
        "luspo",
        lambda b: losses.sequence_clipped_surrogate_loss(
            b.log_ratio, b.row_advantages, b.loss_mask, **CLIP
        ),
        grpo(loss_type="luspo", importance_sampling_level="sequence"),
        loss_type="luspo",
    ),
    loss_case(
        "losses.sequence_gamma",
        "vespo",
        lambda b: losses.sequence_gamma_loss(
            b.log_ratio, b.row_advantages, b.loss_mask, logprobs=b.logprobs, **VESPO_PARAMS
        ),
        grpo(loss_type="vespo"),
        loss_type="vespo",
    ),
    *(
        weights(level, mode, low)
        for level in ("token", "sequence")
        for mode, low in (("truncate", None), ("truncate", 0.5), ("mask", 0.5))
    ),
    ParityCase(
        "correction.off_policy_sequence_mask",
        "get_off_policy_mask",
        lambda b: our_off_policy_mask(b).double(),
        their_off_policy_mask,
        sizes=EQUAL,
    ),
    high_entropy(),
    loss_case(
        "correction.off_policy_sequence_mask, in the loss",
        "off_policy_mask_threshold",
        lambda b: our_surrogate(b) * our_off_policy_mask(b),
        grpo(loss_type="grpo", off_policy_mask_threshold=THRESHOLD),
    ),
]

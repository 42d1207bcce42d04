"""Compare our functions with TRL's trainers on equal inputs, where verl has no peer of ours."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer

from streamrl.algorithms.math import advantages, correction, losses, tokens
from tests.algorithms.aggregate import aggregate_loss
from tests.parity.case import EQUAL, Batch, ParityCase
from tests.parity.stub_trainers import (
    SETTINGS,
    StubGRPOTrainer,
    compute_column,
    compute_loss,
    make_trainer,
)

MAX_LENGTH = 64
THRESHOLD = 0.05
WEIGHTS = (1.0, 0.5, 0.25)
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


def advantage_case(
    function: str, peer: str, ours: Callable[[Batch], Tensor], config: GRPOConfig
) -> ParityCase:
    """Make a case of advantages of GRPOTrainer, one per row."""
    theirs = compute_column(make_trainer(StubGRPOTrainer, config), "advantages")
    return ParityCase(f"advantages.{function}", f"GRPOTrainer, {peer}", ours, theirs, sizes=EQUAL)


def scale(ours: str, theirs: str) -> ParityCase:
    """Make a case of group-relative advantages under one `scale_rewards`."""
    return advantage_case(
        f"group_relative, {ours}",
        f"scale_rewards={theirs}",
        lambda b: advantages.group_relative_advantages(b.scores, b.group_ids, scale=ours, eps=EPS),
        grpo(scale_rewards=theirs, reward_weights=FIRST_REWARD),
    )


def our_normalize_then_sum(batch: Batch) -> Tensor:
    """Normalize each reward, then their sum over all rows; TRL adds eps both times."""
    weights = torch.tensor(WEIGHTS)
    total = advantages.decoupled_reward_advantages(
        batch.rewards, batch.group_ids, weights=weights, eps=EPS
    )
    return advantages.group_relative_advantages(total, torch.zeros_like(batch.group_ids), eps=EPS)


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
    scale("std", "group"),
    scale("batch", "batch"),
    advantage_case(
        "decoupled_reward_normalization",
        "normalize_then_sum",
        our_normalize_then_sum,
        grpo(multi_objective_aggregation="normalize_then_sum", reward_weights=list(WEIGHTS)),
    ),
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
    loss_case(
        "correction.off_policy_sequence_mask, in the loss",
        "off_policy_mask_threshold",
        lambda b: our_surrogate(b) * our_off_policy_mask(b),
        grpo(loss_type="grpo", off_policy_mask_threshold=THRESHOLD),
    ),
]

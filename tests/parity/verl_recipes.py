"""Compare rows of docs/algorithms.md with verl: from scores to the loss and its gradient."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import yaml
from torch import Tensor
from verl.trainer.ppo import core_algos
from verl.workers.config import ActorConfig

from streamrl.algorithms import AlgorithmConfig
from streamrl.algorithms.config import CorrectionConfig
from streamrl.algorithms.objective import derive_group_columns, policy_loss
from tests.parity.case import Batch, ParityCase
from tests.parity.verl_advantages import outcome_rewards

DOCS = Path(__file__).resolve().parents[2] / "docs" / "algorithms.md"
MAX_LENGTH = 64
THREE = "generator's logprobs, the trainer's old and its new ones all differ"
ACTOR = ActorConfig(
    strategy="fsdp",
    rollout_n=1,
    ppo_micro_batch_size_per_gpu=1,
    clip_ratio_low=0.2,
    clip_ratio_high=0.2,
)


def documented(variant: str) -> AlgorithmConfig:
    """Parse a variant's settings from docs/algorithms.md, without the group size."""
    (cell,) = re.findall(rf"^\| {re.escape(variant)} \| (.*) \|$", DOCS.read_text(), re.MULTILINE)
    settings = yaml.safe_load("{" + ", ".join(re.findall(r"`([^`]*)`", cell)) + "}")
    settings.pop("critic", None)
    settings.pop("group_size", None)
    correction = CorrectionConfig(**settings.pop("correction", {}))
    return AlgorithmConfig(**settings, correction=correction)


def step_loss(variant: str) -> Callable[[Batch], Tensor]:
    """Return our loss of a step, computed from its columns."""
    config = documented(variant)
    settings = config.to_settings(max_length=MAX_LENGTH, reward_weights={})

    def ours(batch: Batch) -> Tensor:
        columns = {
            "loss_mask": batch.loss_mask,
            "lengths": batch.loss_mask.sum(-1),
            "finish_reason": torch.zeros(len(batch.loss_mask)),
            "scores": batch.scores,
            "baseline_scores": batch.baseline_scores,
            "values": batch.values,
            "generator_logprobs": batch.ref_logprobs,
        }
        columns |= derive_group_columns(config.spec, settings, columns, batch.group_ids)
        columns["proximal_logprobs"] = batch.old_logprobs
        entropy = torch.zeros_like(batch.logprobs)
        loss, sums = policy_loss(
            config.spec, settings, columns, logprobs=batch.logprobs, entropy=entropy
        )
        return loss / settings.compute_loss_denominator(
            {name: float(x) for name, x in sums.items()}
        )

    return ours


def vanilla(advantages: Callable[[Batch], Tensor]) -> Callable[[Batch], Tensor]:
    """Return the loss of a step under verl's defaults."""

    def theirs(batch: Batch) -> Tensor:
        loss, _ = core_algos.compute_policy_loss_vanilla(
            old_log_prob=batch.old_logprobs,
            log_prob=batch.logprobs,
            advantages=advantages(batch).detach(),
            response_mask=batch.mask,
            loss_agg_mode="token-mean",
            config=ACTOR,
        )
        return loss

    return theirs


def _grpo(batch: Batch) -> Tensor:
    rewards, groups = outcome_rewards(batch), batch.group_ids.numpy()
    return core_algos.compute_grpo_outcome_advantage(rewards, batch.mask, groups)[0]


def _ppo(batch: Batch) -> Tensor:
    rewards, values, mask = outcome_rewards(batch), batch.values, batch.mask
    return core_algos.compute_gae_advantage_return(rewards, values, mask, 1.0, 1.0)[0]


def _remax(batch: Batch) -> Tensor:
    rewards, baselines = outcome_rewards(batch), batch.baseline_scores
    return core_algos.compute_remax_outcome_advantage(rewards, baselines, batch.mask)[0]


recipe = partial(ParityCase, wrt="logprobs", note=THREE)
CASES = [
    replace(
        recipe("a step of GRPO", "defaults", step_loss("verl's GRPO"), vanilla(_grpo)),
        wider_bound=1e-7,
        note="verl's score of a group of one is over 1 + 1e-6",
    ),
    recipe("a step of PPO", "defaults", step_loss("verl's PPO"), vanilla(_ppo)),
    recipe("a step of ReMax", "defaults", step_loss("verl's ReMax"), vanilla(_remax)),
]

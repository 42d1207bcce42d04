"""Compare our rewards, divergences and advantages with verl's, and whole steps of algorithms.

The settings of a step are those of a row in docs/algorithms.md.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import yaml
from torch import Tensor
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos
from verl.workers.config import ActorConfig

from streamrl.algorithms import AlgorithmConfig
from streamrl.algorithms.config import KL_KINDS
from streamrl.algorithms.correction import CorrectionConfig
from streamrl.algorithms.math import advantages, tokens
from streamrl.algorithms.objective import (
    derive_group_columns,
    estimate_score_norms,
    policy_loss,
)
from tests.parity.case import PAIRS_UP, RAGGED, Batch, ParityCase

GAMMA, LAM = 0.97, 0.9
WEIGHTS = (1.0, 0.5, 0.25)
HOLES = "verl's are not 0 where the mask is false"
ALONE = "groups of one left out: verl keeps their score"


def outcome_rewards(batch: Batch) -> Tensor:
    """Place the scores on the last token of each row, as verl expects them; [B, T]."""
    positions = torch.arange(batch.mask.shape[1])
    last = torch.where(batch.loss_mask, positions, 0).amax(-1, keepdim=True)
    return batch.scores[:, None] * (positions == last)


def estimator(name: str, config: AlgoConfig | None = None) -> Callable[[Batch], Tensor]:
    """Return an estimator of verl by group, [B, T]."""

    def theirs(batch: Batch) -> Tensor:
        advantages_BT, _ = core_algos.get_adv_estimator_fn(name)(
            token_level_rewards=outcome_rewards(batch),
            response_mask=batch.mask,
            index=batch.group_ids.numpy(),
            config=config,
        )
        return advantages_BT

    return theirs


def gdpo(batch: Batch) -> Tensor:
    """Compute verl's GDPO with rewards from the data, in float32."""
    names = ["first", "second", "third"]
    config = AlgoConfig(gdpo_reward_keys=names, gdpo_reward_weights=list(WEIGHTS))
    prompts = torch.ones(len(batch.mask), 1, dtype=torch.long)
    attention_mask = torch.cat([prompts, batch.loss_mask.long()], -1)
    advantages_BT, _ = core_algos.compute_gdpo_outcome_advantage(
        outcome_rewards(batch),
        batch.mask,
        batch.group_ids.numpy(),
        config=config,
        non_tensor_batch=dict(zip(names, batch.rewards.T.numpy(), strict=True)),
        batch={"prompts": prompts, "attention_mask": attention_mask},
    )
    return advantages_BT


def our_gdpo(batch: Batch) -> Tensor:
    """Whiten over tokens, as verl does."""
    rows = advantages.decoupled_reward_advantages(
        batch.rewards, batch.group_ids, weights=torch.tensor(WEIGHTS)
    )
    return advantages.masked_whiten(rows[:, None].expand_as(batch.mask), batch.loss_mask)


def rewards_to_go(batch: Batch) -> Tensor:
    """Compute the advantages of verl's REINFORCE++, [B, T]."""
    compute = core_algos.compute_reinforce_plus_plus_outcome_advantage
    return compute(batch.token_rewards, batch.mask, AlgoConfig(gamma=GAMMA))[0]


def our_rewards_to_go(batch: Batch) -> Tensor:
    rewards = advantages.reward_to_go(batch.token_rewards, batch.loss_mask, gamma=GAMMA)
    return advantages.masked_whiten(rewards, batch.loss_mask)


def gae(batch: Batch) -> tuple[Tensor, Tensor]:
    """Compute verl's advantages, which it whitens, and returns, both [B, T]."""
    return core_algos.compute_gae_advantage_return(
        batch.token_rewards, batch.values, batch.mask, GAMMA, LAM
    )


def our_gae(batch: Batch) -> tuple[Tensor, Tensor]:
    return advantages.generalized_advantages(
        batch.token_rewards, batch.values, batch.loss_mask, gamma=GAMMA, lam=LAM
    )


def our_baseline(batch: Batch) -> Tensor:
    """Compute REINFORCE++ with a baseline."""
    rows = advantages.group_relative_advantages(
        batch.scores, batch.group_ids, scale="none", single="keep"
    )
    return advantages.masked_whiten(rows[:, None].expand_as(batch.mask), batch.loss_mask)


def by_group(
    function: str,
    peer: str,
    ours: Callable[[Batch], Tensor],
    *,
    config: AlgoConfig | None = None,
    sizes: Sequence[int] = PAIRS_UP,
    dtype: torch.dtype = torch.float64,
    note: str = "",
) -> ParityCase:
    """Make a case of an advantage per row, which verl puts on the tokens."""
    return ParityCase(
        f"advantages.{function}",
        peer,
        lambda b: b.on_tokens(ours(b)),
        estimator(peer, config),
        sizes=sizes,
        dtype=dtype,
        note=note,
    )


def divergence(kind: str) -> ParityCase:
    """Make a case of a KL estimate near the reference; far away verl caps k3 at 10."""
    return ParityCase(
        f"tokens.kl_estimate, {kind}",
        "kl_penalty",
        lambda b: tokens.kl_estimate(b.logprobs, b.ref_logprobs, kind),
        lambda b: core_algos.kl_penalty(b.logprobs, b.ref_logprobs, kind),
        wrt="logprobs",
    )


def verl_kl_coefs(batch: Batch) -> Tensor:
    """Return the coefficient of verl's controller after one step, per divergence."""
    controllers = [core_algos.AdaptiveKLController(0.1, 0.5, 10_000) for _ in batch.scores]
    for controller, divergence in zip(controllers, batch.scores.tolist(), strict=True):
        controller.update(divergence, 1600)
    return torch.tensor([controller.value for controller in controllers], dtype=torch.float64)


def our_kl_coefs(batch: Batch) -> Tensor:
    adapt = partial(tokens.adapt_kl_coef, target=0.5, num_rollouts=1600)
    coefs = [adapt(0.1, divergence) for divergence in batch.scores.tolist()]
    return torch.tensor(coefs, dtype=torch.float64)


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


def score_norms(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Return logprobs of the first word, sums of squared probabilities and weights, [B, T]."""
    logprobs, weights = batch.logits.log_softmax(-1), batch.log_ratio.exp().clamp(max=2.0)
    return logprobs[..., 0], logprobs.exp().square().sum(-1), weights


def our_optimal_baseline(batch: Batch) -> Tensor:
    norms = estimate_score_norms(*score_norms(batch), batch.loss_mask)
    return advantages.optimal_token_advantages(
        batch.token_rewards, norms, batch.loss_mask, batch.group_ids, gamma=1.0, single="keep"
    )


def optimal_baseline(batch: Batch) -> Tensor:
    logprobs, squares, weights = score_norms(batch)
    return core_algos.compute_multi_turn_optimal_token_baseline_advantage(
        token_level_rewards=batch.token_rewards,
        response_mask=batch.mask,
        index=batch.group_ids.numpy(),
        old_log_probs=logprobs,
        sum_pi_squared=squares,
        rollout_is_weights=weights,
    )[0]


recipe = partial(ParityCase, wrt="logprobs", note=THREE)


CASES = [
    ParityCase(
        "advantages.generalized_advantages, whitened",
        "gae",
        lambda b: advantages.masked_whiten(our_gae(b)[0], b.loss_mask),
        lambda b: gae(b)[0] * b.mask,
        note=HOLES,
    ),
    ParityCase(
        "advantages.generalized_advantages, returns",
        "gae",
        lambda b: our_gae(b)[1],
        lambda b: gae(b)[1] * b.mask,
        note=HOLES,
    ),
    by_group(
        "group_relative, std",
        "grpo",
        lambda b: advantages.group_relative_advantages(b.scores, b.group_ids),
    ),
    by_group(
        "group_relative, std, keep",
        "grpo_vectorized",
        lambda b: advantages.group_relative_advantages(b.scores, b.group_ids, single="keep"),
        sizes=RAGGED,
        dtype=torch.float32,
        note="verl's deviation is float32",
    ),
    by_group(
        "leave_one_out, keep",
        "rloo",
        lambda b: advantages.leave_one_out_advantages(b.scores, b.group_ids, single="keep"),
        sizes=RAGGED,
    ),
    by_group(
        "leave_one_out, zero",
        "rloo_vectorized",
        lambda b: advantages.leave_one_out_advantages(b.scores, b.group_ids),
        sizes=RAGGED,
    ),
    by_group(
        "length_weighted_baseline",
        "opo",
        lambda b: advantages.length_weighted_advantages(b.scores, b.group_ids, b.loss_mask.sum(-1)),
        note=ALONE,
    ),
    by_group(
        "best_of_group, std",
        "grpo_passk",
        lambda b: advantages.best_of_group_advantages(b.scores, b.group_ids, scale="std"),
        config=AlgoConfig(),
    ),
    by_group(
        "best_of_group, none",
        "grpo_passk",
        lambda b: advantages.best_of_group_advantages(b.scores, b.group_ids),
        config=AlgoConfig(norm_adv_by_std_in_grpo=False),
    ),
    by_group(
        "gpg",
        "gpg",
        lambda b: advantages.gpg_advantages(b.scores, b.group_ids),
        dtype=torch.float32,
        note=f"verl's factor is float32; {ALONE}",
    ),
    ParityCase(
        "advantages.decoupled_reward_normalization",
        "gdpo",
        our_gdpo,
        gdpo,
        sizes=PAIRS_UP,
        dtype=torch.float32,
        note=ALONE,
    ),
    ParityCase(
        "advantages.reward_to_go, whitened", "reinforce_plus_plus", our_rewards_to_go, rewards_to_go
    ),
    ParityCase(
        "advantages.group_relative, none, whitened",
        "reinforce_plus_plus_baseline",
        our_baseline,
        estimator("reinforce_plus_plus_baseline"),
    ),
    ParityCase(
        "advantages.optimal_token_advantages",
        "tir_optimal_token_baseline",
        our_optimal_baseline,
        optimal_baseline,
        sizes=PAIRS_UP,
        wider_bound=1e-6,
        note="verl adds 1e-8 to the sum of norms; " + ALONE,
    ),
    *(divergence(kind) for kind in KL_KINDS),
    ParityCase("kl.adapt_coefficient", "AdaptiveKLController", our_kl_coefs, verl_kl_coefs),
    replace(
        recipe("a step of GRPO", "defaults", step_loss("verl's GRPO"), vanilla(_grpo)),
        wider_bound=1e-7,
        note="verl's score of a group of one is over 1 + 1e-6",
    ),
    recipe("a step of PPO", "defaults", step_loss("verl's PPO"), vanilla(_ppo)),
    recipe("a step of ReMax", "defaults", step_loss("verl's ReMax"), vanilla(_remax)),
]

"""Compare our advantages with those of verl."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos
from verl.utils import torch_functional

from streamrl.algorithms.math import advantages
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


def grpo_mean_only(batch: Batch) -> Tensor:
    """Compute verl's GRPO without the deviation, which is an argument there."""
    advantages_BT, _ = core_algos.compute_grpo_outcome_advantage(
        outcome_rewards(batch), batch.mask, batch.group_ids.numpy(), norm_adv_by_std_in_grpo=False
    )
    return advantages_BT


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


def remax(batch: Batch) -> Tensor:
    rewards, baselines = outcome_rewards(batch) * batch.mask, batch.baseline_scores
    return (
        batch.mask * core_algos.compute_remax_outcome_advantage(rewards, baselines, batch.mask)[0]
    )


def reinforce_plus_plus(batch: Batch) -> tuple[Tensor, Tensor]:
    """Compute verl's advantages and returns, both [B, T]."""
    compute = core_algos.compute_reinforce_plus_plus_outcome_advantage
    return compute(batch.token_rewards, batch.mask, AlgoConfig(gamma=GAMMA))


def our_rewards_to_go(batch: Batch) -> Tensor:
    return advantages.reward_to_go(batch.token_rewards, batch.loss_mask, gamma=GAMMA)


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
    ParityCase(
        "advantages.whiten",
        "masked_whiten",
        lambda b: advantages.masked_whiten(b.values, b.loss_mask),
        lambda b: torch_functional.masked_whiten(b.values, b.mask) * b.mask,
        note=HOLES,
    ),
    by_group(
        "group_relative, std",
        "grpo",
        lambda b: advantages.group_relative_advantages(b.scores, b.group_ids),
    ),
    *(
        by_group(
            "group_relative, std, keep",
            peer,
            lambda b: advantages.group_relative_advantages(b.scores, b.group_ids, single="keep"),
            sizes=RAGGED,
            dtype=torch.float32,
            note="verl's deviation is float32",
        )
        for peer in ("grpo", "grpo_vectorized")
    ),
    ParityCase(
        "advantages.group_relative, none, keep",
        "grpo",
        lambda b: b.on_tokens(
            advantages.group_relative_advantages(b.scores, b.group_ids, scale="none", single="keep")
        ),
        grpo_mean_only,
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
        "advantages.greedy_baseline",
        "remax",
        lambda b: b.on_tokens(advantages.greedy_baseline_advantages(b.scores, b.baseline_scores)),
        remax,
        note=HOLES,
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
        "advantages.reward_to_go",
        "reinforce_plus_plus, returns",
        our_rewards_to_go,
        lambda b: reinforce_plus_plus(b)[1],
    ),
    ParityCase(
        "advantages.reward_to_go, whitened",
        "reinforce_plus_plus",
        lambda b: advantages.masked_whiten(our_rewards_to_go(b), b.loss_mask),
        lambda b: reinforce_plus_plus(b)[0],
    ),
    ParityCase(
        "advantages.group_relative, none, whitened",
        "reinforce_plus_plus_baseline",
        our_baseline,
        estimator("reinforce_plus_plus_baseline"),
    ),
]

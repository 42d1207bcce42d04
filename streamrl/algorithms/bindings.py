"""Functions of the algorithm table: pass a run's columns and settings to the math functions."""

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from streamrl.algorithms.algorithm import AlgorithmSettings, ColumnTensors, TokenLossInput
from streamrl.algorithms.lazy_module import LazyModule
from streamrl.algorithms.math.lagrange import adapt_multiplier, lagrangian_advantages

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from streamrl.algorithms.math import advantages as adv
    from streamrl.algorithms.math import losses, masks
else:
    # Import torch lazily: the CLI and the planner read rows without computing anything.
    torch = LazyModule("torch")
    adv = LazyModule("streamrl.algorithms.math.advantages")
    losses, masks = (
        LazyModule("streamrl.algorithms.math.losses"),
        LazyModule("streamrl.algorithms.math.masks"),
    )

# Advantages: (columns, group_ids, settings) -> [B] or [B, T].


def group_relative(
    columns: ColumnTensors, group_ids: "Tensor", settings: AlgorithmSettings
) -> "Tensor":
    """Return GRPO's advantages: score minus the group's mean score, scaled as configured."""
    return adv.group_relative_advantages(
        columns["scores"],
        group_ids,
        scale=settings.advantage_scale,
        eps=settings.advantage_eps,
        unbiased=settings.advantage_unbiased,
        single=settings.single_rollout,
    )


def leave_one_out(
    columns: ColumnTensors, group_ids: "Tensor", settings: AlgorithmSettings
) -> "Tensor":
    """Return RLOO's advantages: score minus the mean score of the group's other rollouts."""
    return adv.leave_one_out_advantages(
        columns["scores"], group_ids, single=settings.single_rollout
    )


def length_weighted_baseline(
    columns: ColumnTensors, group_ids: "Tensor", settings: AlgorithmSettings
) -> "Tensor":
    """Return OPO's advantages: score minus the group's mean score weighted by length."""
    return adv.length_weighted_advantages(
        columns["scores"], group_ids, columns["num_tokens"], single=settings.single_rollout
    )


def best_of_group(
    columns: ColumnTensors, group_ids: "Tensor", settings: AlgorithmSettings
) -> "Tensor":
    """Return advantages for pass@k: the lead of each group's best rollout over the second best."""
    return adv.best_of_group_advantages(
        columns["scores"],
        group_ids,
        scale=settings.advantage_scale,
        eps=settings.advantage_eps,
        unbiased=settings.advantage_unbiased,
    )


def gpg(columns: ColumnTensors, group_ids: "Tensor", settings: AlgorithmSettings) -> "Tensor":
    """Return GPG's advantages: score minus group mean, divided by the share of nonzero scores."""
    return adv.gpg_advantages(columns["scores"], group_ids, single=settings.single_rollout)


def reward_to_go(
    columns: ColumnTensors, group_ids: "Tensor", settings: AlgorithmSettings
) -> "Tensor":
    """Return REINFORCE++'s advantages: the discounted sum of rewards from each token on."""
    return adv.reward_to_go(columns["token_rewards"], columns["loss_mask"], gamma=settings.gamma)


def generalized_advantages(
    columns: ColumnTensors, group_ids: "Tensor", settings: AlgorithmSettings
) -> "Tensor":
    """Return PPO's advantages: generalized advantage estimates (GAE)."""
    return _compute_gae(columns, settings)[0]


def returns(columns: ColumnTensors, group_ids: "Tensor", settings: AlgorithmSettings) -> "Tensor":
    """Return the critic's targets: advantages before whitening, plus the critic's values."""
    return _compute_gae(columns, settings)[1]


def _compute_gae(columns: ColumnTensors, settings: AlgorithmSettings) -> tuple["Tensor", "Tensor"]:
    """Return advantages and returns of generalized advantage estimation, both [B, T]."""
    return adv.generalized_advantages(
        columns["token_rewards"],
        columns["values"],
        columns["loss_mask"],
        gamma=settings.gamma,
        lam=settings.params["lam"],
    )


def greedy_baseline(
    columns: ColumnTensors, group_ids: "Tensor", settings: AlgorithmSettings
) -> "Tensor":
    """Return ReMax's advantages: rewards-to-go minus the score of the greedy completion."""
    later = adv.reward_to_go(columns["token_rewards"], columns["loss_mask"], gamma=settings.gamma)
    return adv.greedy_baseline_advantages(later, columns["baseline_scores"][:, None])


def constrained_advantages(
    columns: ColumnTensors, group_ids: "Tensor", settings: AlgorithmSettings
) -> "Tensor":
    """Return Safe RLHF's advantages: reward advantages minus cost advantages, weighted.

    The weight is the Lagrange multiplier, an adaptive parameter.
    """
    return lagrangian_advantages(
        _compute_reward_gae(columns, settings)[0],
        _compute_cost_gae(columns, settings)[0],
        multiplier=settings.params["lagrange"],
    )


def clipped_returns(
    columns: ColumnTensors, group_ids: "Tensor", settings: AlgorithmSettings
) -> "Tensor":
    """Return the targets of the reward critic, computed from clipped token rewards."""
    return _compute_reward_gae(columns, settings)[1]


def cost_returns(
    columns: ColumnTensors, group_ids: "Tensor", settings: AlgorithmSettings
) -> "Tensor":
    """Return the targets of the cost critic, computed from clipped token costs."""
    return _compute_cost_gae(columns, settings)[1]


def _compute_reward_gae(
    columns: ColumnTensors, settings: AlgorithmSettings
) -> tuple["Tensor", "Tensor"]:
    """Return advantages and returns of the reward, both [B, T]."""
    clip = settings.params["token_clip"]
    rewards = columns["token_rewards"].clamp(-clip, clip)
    return _compute_gae({**columns, "token_rewards": rewards}, settings)


def _compute_cost_gae(
    columns: ColumnTensors, settings: AlgorithmSettings
) -> tuple["Tensor", "Tensor"]:
    """Return advantages and returns of the cost, both [B, T]."""
    clip = settings.params["token_clip"]
    costs, values = columns["token_costs"].clamp(-clip, clip), columns["cost_values"]
    return _compute_gae({**columns, "token_rewards": costs, "values": values}, settings)


def decoupled_rewards(
    columns: ColumnTensors, group_ids: "Tensor", settings: AlgorithmSettings
) -> "Tensor":
    """Return GDPO's advantages: each reward normalized in its group, then weighted and summed."""
    weights = settings.reward_weights
    rewards = torch.stack([columns[f"reward/{name}"] for name in weights], -1)
    return adv.decoupled_reward_advantages(
        rewards,
        group_ids,
        weights=torch.tensor(list(weights.values()), dtype=torch.float64),
        eps=settings.advantage_eps,
        unbiased=settings.advantage_unbiased,
    )


def covariance_band(
    columns: ColumnTensors, group_ids: "Tensor", settings: AlgorithmSettings
) -> "Tensor":
    """Return the tokens that Clip-Cov leaves out: random ones of large covariance, bool [B, T].

    The random numbers depend only on the rollouts, so all ranks choose the same tokens.
    """
    logprobs = columns["generator_logprobs"]
    return losses.covariance_band_mask(
        logprobs,
        columns["advantages"],
        columns["loss_mask"],
        low=settings.params["covariance_low"],
        high=settings.params["covariance_high"],
        fraction=settings.params["covariance_fraction"],
        draws=_draw_from_tokens(logprobs, columns["loss_mask"]),
    )


def _draw_from_tokens(logprobs: "Tensor", mask: "Tensor") -> "Tensor":
    """Return random numbers in [0, 1) per token, seeded by the rollout's own logprobs: [B, T].

    All ranks draw equal numbers for a rollout, whatever other rollouts the batch has.
    """
    draws = torch.zeros(mask.shape)
    for row, row_mask, row_draws in zip(logprobs, mask, draws, strict=True):
        digest = hashlib.blake2b(row[row_mask].float().numpy().tobytes(), digest_size=7).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
        row_draws[row_mask] = torch.rand(int(row_mask.sum()), generator=generator)
    return draws


def covariance_top(
    columns: ColumnTensors, group_ids: "Tensor", settings: AlgorithmSettings
) -> "Tensor":
    """Return the tokens that KL-Cov penalizes: those of largest covariance, bool [B, T]."""
    return losses.covariance_top_mask(
        columns["generator_logprobs"],
        columns["advantages"],
        columns["loss_mask"],
        fraction=settings.params["covariance_fraction"],
    )


# Adaptive parameters: (value, means of the step, settings) -> value.


def cost_multiplier(value: float, means: Mapping[str, float], settings: AlgorithmSettings) -> float:
    """Return Safe RLHF's next cost multiplier: larger if the mean cost exceeds its limit."""
    return adapt_multiplier(
        value,
        means["cost"],
        limit=settings.params["cost_limit"],
        lr=settings.params["lagrange_lr"],
        largest=settings.params["lagrange_max"],
    )


# Token losses: (tokens, settings) -> loss and mask of clipped gradients, both [B, T].


def clipped_surrogate(
    tokens: TokenLossInput, settings: AlgorithmSettings
) -> tuple["Tensor", "Tensor"]:
    """Return PPO's clipped loss."""
    loss = losses.clipped_surrogate_loss(
        tokens.log_ratio,
        tokens.advantages,
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
        dual_clip=settings.dual_clip,
    )
    return loss, _clip_mask(tokens.log_ratio, tokens, settings)


def sequence_clipped_surrogate(
    tokens: TokenLossInput, settings: AlgorithmSettings
) -> tuple["Tensor", "Tensor"]:
    """Return GSPO's loss: PPO's with a single ratio per rollout."""
    loss = losses.sequence_clipped_surrogate_loss(
        tokens.log_ratio,
        tokens.advantages,
        tokens.loss_mask,
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
    )
    mean = masks.masked_row_mean(tokens.log_ratio.detach(), tokens.loss_mask)
    return loss, _clip_mask(mean, tokens, settings)


def clipped_importance(
    tokens: TokenLossInput, settings: AlgorithmSettings
) -> tuple["Tensor", "Tensor"]:
    """Return CISPO's loss: importance weights are clipped, but no token loses its gradient."""
    loss = losses.clipped_importance_loss(
        tokens.log_ratio,
        tokens.advantages,
        logprobs=tokens.logprobs,
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
    )
    return loss, _empty_mask(tokens)


def geometric_mean(
    tokens: TokenLossInput, settings: AlgorithmSettings
) -> tuple["Tensor", "Tensor"]:
    """Return GMPO's loss: the geometric mean of clipped ratios."""
    loss = losses.geometric_mean_loss(
        tokens.log_ratio,
        tokens.advantages,
        tokens.loss_mask,
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
    )
    x, a = tokens.log_ratio, tokens.advantages
    too_high = (a > 0) & (x > settings.clip_high)
    return loss, too_high | ((a < 0) & (x < -settings.clip_low))


def soft_adaptive(tokens: TokenLossInput, settings: AlgorithmSettings) -> tuple["Tensor", "Tensor"]:
    """Return SAPO's loss: a sigmoid gate on the ratio replaces PPO's clip."""
    loss = losses.soft_adaptive_loss(tokens.log_ratio, tokens.advantages, **settings.params)
    return loss, _empty_mask(tokens)


def covariance_clip(
    tokens: TokenLossInput, settings: AlgorithmSettings
) -> tuple["Tensor", "Tensor"]:
    """Return Clip-Cov's loss: PPO's without a few random tokens of large covariance."""
    chosen = tokens.derived["chosen"]
    loss = losses.covariance_clip_loss(
        tokens.log_ratio,
        tokens.advantages,
        chosen=chosen,
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
    )
    return loss, _clip_mask(tokens.log_ratio, tokens, settings) | chosen


def covariance_kl(tokens: TokenLossInput, settings: AlgorithmSettings) -> tuple["Tensor", "Tensor"]:
    """Return KL-Cov's loss: the unclipped loss with a KL penalty on tokens of large covariance."""
    loss = losses.covariance_kl_loss(
        tokens.log_ratio,
        tokens.advantages,
        chosen=tokens.derived["chosen"],
        coef=settings.params["covariance_coef"],
    )
    return loss, _empty_mask(tokens)


def variation_masked(
    tokens: TokenLossInput, settings: AlgorithmSettings
) -> tuple["Tensor", "Tensor"]:
    """Return DPPO-TV's loss: REINFORCE's without tokens whose probability changed too much."""
    return _divergence_masked(tokens, settings, "tv")


def divergence_masked(
    tokens: TokenLossInput, settings: AlgorithmSettings
) -> tuple["Tensor", "Tensor"]:
    """Return DPPO-KL's loss: REINFORCE's without tokens of too large a KL divergence.

    The divergence is that of the binary choice "this token or another".
    """
    return _divergence_masked(tokens, settings, "kl")


def score_function(
    tokens: TokenLossInput, settings: AlgorithmSettings
) -> tuple["Tensor", "Tensor"]:
    """Return REINFORCE's loss."""
    return losses.score_function_loss(tokens.logprobs, tokens.advantages), _empty_mask(tokens)


def _divergence_masked(
    tokens: TokenLossInput, settings: AlgorithmSettings, kind: str
) -> tuple["Tensor", "Tensor"]:
    """Return the loss of DPPO-TV (`kind` "tv") or DPPO-KL ("kl"), and the mask of masked tokens."""
    loss = losses.divergence_masked_loss(
        tokens.log_ratio,
        tokens.advantages,
        logprobs=tokens.logprobs,
        kind=kind,
        low=settings.clip_low,
        high=settings.clip_high,
        cap=settings.params["ratio_cap"],
    )
    return loss, (loss == 0) & (tokens.advantages != 0)


def _clip_mask(
    log_ratio: "Tensor", tokens: TokenLossInput, settings: AlgorithmSettings
) -> "Tensor":
    """Return the tokens whose gradient PPO's clip removes: bool [B, T]."""
    return losses.outside_clip_mask(
        log_ratio,
        tokens.advantages,
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
    )


def _empty_mask(tokens: TokenLossInput) -> "Tensor":
    """Return the mask of a loss that clips no gradient: all false."""
    return torch.zeros_like(tokens.loss_mask)

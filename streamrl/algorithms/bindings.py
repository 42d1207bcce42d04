"""Functions of the table's rows: bind columns and settings of a run to the math functions."""

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
    return adv.leave_one_out_advantages(
        columns["scores"], group_ids, single=settings.single_rollout
    )


def length_weighted_baseline(
    columns: ColumnTensors, group_ids: "Tensor", settings: AlgorithmSettings
) -> "Tensor":
    return adv.length_weighted_advantages(
        columns["scores"], group_ids, columns["num_tokens"], single=settings.single_rollout
    )


def best_of_group(
    columns: ColumnTensors, group_ids: "Tensor", settings: AlgorithmSettings
) -> "Tensor":
    return adv.best_of_group_advantages(
        columns["scores"],
        group_ids,
        scale=settings.advantage_scale,
        eps=settings.advantage_eps,
        unbiased=settings.advantage_unbiased,
    )


def gpg(columns: ColumnTensors, group_ids: "Tensor", settings: AlgorithmSettings) -> "Tensor":
    return adv.gpg_advantages(columns["scores"], group_ids, single=settings.single_rollout)


def reward_to_go(
    columns: ColumnTensors, group_ids: "Tensor", settings: AlgorithmSettings
) -> "Tensor":
    return adv.reward_to_go(columns["token_rewards"], columns["loss_mask"], gamma=settings.gamma)


def generalized_advantages(
    columns: ColumnTensors, group_ids: "Tensor", settings: AlgorithmSettings
) -> "Tensor":
    return _compute_gae(columns, settings)[0]


def returns(columns: ColumnTensors, group_ids: "Tensor", settings: AlgorithmSettings) -> "Tensor":
    """Return the critic's targets: advantages before whitening, plus values."""
    return _compute_gae(columns, settings)[1]


def _compute_gae(columns: ColumnTensors, settings: AlgorithmSettings) -> tuple["Tensor", "Tensor"]:
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
    """Return rewards-to-go minus the score of the prompt's greedy completion."""
    later = adv.reward_to_go(columns["token_rewards"], columns["loss_mask"], gamma=settings.gamma)
    return adv.greedy_baseline_advantages(later, columns["baseline_scores"][:, None])


def constrained_advantages(
    columns: ColumnTensors, group_ids: "Tensor", settings: AlgorithmSettings
) -> "Tensor":
    return lagrangian_advantages(
        _compute_reward_gae(columns, settings)[0],
        _compute_cost_gae(columns, settings)[0],
        multiplier=settings.params["lagrange"],
    )


def clipped_returns(
    columns: ColumnTensors, group_ids: "Tensor", settings: AlgorithmSettings
) -> "Tensor":
    """Return the targets of the reward critic, from clipped token rewards."""
    return _compute_reward_gae(columns, settings)[1]


def cost_returns(
    columns: ColumnTensors, group_ids: "Tensor", settings: AlgorithmSettings
) -> "Tensor":
    """Return the targets of the cost critic, from clipped token costs."""
    return _compute_cost_gae(columns, settings)[1]


def _compute_reward_gae(
    columns: ColumnTensors, settings: AlgorithmSettings
) -> tuple["Tensor", "Tensor"]:
    clip = settings.params["token_clip"]
    rewards = columns["token_rewards"].clamp(-clip, clip)
    return _compute_gae({**columns, "token_rewards": rewards}, settings)


def _compute_cost_gae(
    columns: ColumnTensors, settings: AlgorithmSettings
) -> tuple["Tensor", "Tensor"]:
    clip = settings.params["token_clip"]
    costs, values = columns["token_costs"].clamp(-clip, clip), columns["cost_values"]
    return _compute_gae({**columns, "token_rewards": costs, "values": values}, settings)


def decoupled_rewards(
    columns: ColumnTensors, group_ids: "Tensor", settings: AlgorithmSettings
) -> "Tensor":
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
    """Choose random tokens of large covariance; the draws depend on the data only (see below)."""
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

    All ranks draw equal numbers for a rollout, in whatever batch it lies.
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
    return losses.covariance_top_mask(
        columns["generator_logprobs"],
        columns["advantages"],
        columns["loss_mask"],
        fraction=settings.params["covariance_fraction"],
    )


# Adaptive parameters: (value, means of the step, settings) -> value.


def cost_multiplier(value: float, means: Mapping[str, float], settings: AlgorithmSettings) -> float:
    """Raise the multiplier while the mean cost exceeds its limit, lower it otherwise."""
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
    """Return GSPO's loss, with a single ratio per rollout."""
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
    """Return CISPO's loss: the weight is clipped, the gradient never."""
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
    """Return SAPO's loss: a soft gate."""
    loss = losses.soft_adaptive_loss(tokens.log_ratio, tokens.advantages, **settings.params)
    return loss, _empty_mask(tokens)


def covariance_clip(
    tokens: TokenLossInput, settings: AlgorithmSettings
) -> tuple["Tensor", "Tensor"]:
    """Return Clip-Cov's loss: PPO's without a few tokens of large covariance."""
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
    """Return KL-Cov's loss: a KL penalty on tokens of large covariance."""
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
    """Return DPPO-TV's loss: mask tokens by the difference of their probabilities."""
    return _divergence_masked(tokens, settings, "tv")


def divergence_masked(
    tokens: TokenLossInput, settings: AlgorithmSettings
) -> tuple["Tensor", "Tensor"]:
    """Return DPPO-KL's loss: mask tokens by the binary KL divergence of "this token or another"."""
    return _divergence_masked(tokens, settings, "kl")


def score_function(
    tokens: TokenLossInput, settings: AlgorithmSettings
) -> tuple["Tensor", "Tensor"]:
    """Return REINFORCE's loss."""
    return losses.score_function_loss(tokens.logprobs, tokens.advantages), _empty_mask(tokens)


def _divergence_masked(
    tokens: TokenLossInput, settings: AlgorithmSettings, kind: str
) -> tuple["Tensor", "Tensor"]:
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
    return losses.outside_clip_mask(
        log_ratio,
        tokens.advantages,
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
    )


def _empty_mask(tokens: TokenLossInput) -> "Tensor":
    return torch.zeros_like(tokens.loss_mask)

"""What rows are made of: from columns to advantages and further columns, from tokens to losses.

They hand the columns and settings of a run to the functions of `advantages`, `losses` and others,
which know of neither.
"""

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
    # Who only asks a row what it needs has no use for torch.
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
    """Score against the group's mean, over what `advantage_scale` says."""
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
    """Score against the mean of the others in the group."""
    return adv.leave_one_out_advantages(
        columns["scores"], group_ids, single=settings.single_rollout
    )


def length_weighted_baseline(
    columns: ColumnTensors, group_ids: "Tensor", settings: AlgorithmSettings
) -> "Tensor":
    """Score against the mean of the group's tokens."""
    return adv.length_weighted_advantages(
        columns["scores"], group_ids, columns["num_tokens"], single=settings.single_rollout
    )


def best_of_group(
    columns: ColumnTensors, group_ids: "Tensor", settings: AlgorithmSettings
) -> "Tensor":
    """The lead of the best of the group."""
    return adv.best_of_group_advantages(
        columns["scores"],
        group_ids,
        scale=settings.advantage_scale,
        eps=settings.advantage_eps,
        unbiased=settings.advantage_unbiased,
    )


def gpg(columns: ColumnTensors, group_ids: "Tensor", settings: AlgorithmSettings) -> "Tensor":
    """Score against the group's mean, times rollouts over rollouts with a score."""
    return adv.gpg_advantages(columns["scores"], group_ids, single=settings.single_rollout)


def reward_to_go(
    columns: ColumnTensors, group_ids: "Tensor", settings: AlgorithmSettings
) -> "Tensor":
    """The discounted rewards from each token on."""
    return adv.reward_to_go(columns["token_rewards"], columns["loss_mask"], gamma=settings.gamma)


def generalized_advantages(
    columns: ColumnTensors, group_ids: "Tensor", settings: AlgorithmSettings
) -> "Tensor":
    """Generalized advantage estimates under the critic's values."""
    return _compute_gae(columns, settings)[0]


def returns(columns: ColumnTensors, group_ids: "Tensor", settings: AlgorithmSettings) -> "Tensor":
    """What the critic is to learn: advantages, before they are whitened, plus values."""
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
    """The rewards from each token on against the score of the prompt's likeliest completion."""
    later = adv.reward_to_go(columns["token_rewards"], columns["loss_mask"], gamma=settings.gamma)
    return adv.greedy_baseline_advantages(later, columns["baseline_scores"][:, None])


def constrained_advantages(
    columns: ColumnTensors, group_ids: "Tensor", settings: AlgorithmSettings
) -> "Tensor":
    """Advantages of reward and of cost, weighed by the multiplier."""
    return lagrangian_advantages(
        _compute_reward_gae(columns, settings)[0],
        _compute_cost_gae(columns, settings)[0],
        multiplier=settings.params["lagrange"],
    )


def clipped_returns(
    columns: ColumnTensors, group_ids: "Tensor", settings: AlgorithmSettings
) -> "Tensor":
    """What the critic of rewards is to learn."""
    return _compute_reward_gae(columns, settings)[1]


def cost_returns(
    columns: ColumnTensors, group_ids: "Tensor", settings: AlgorithmSettings
) -> "Tensor":
    """What the critic of costs is to learn."""
    return _compute_cost_gae(columns, settings)[1]


def _compute_reward_gae(
    columns: ColumnTensors, settings: AlgorithmSettings
) -> tuple["Tensor", "Tensor"]:
    most = settings.params["token_clip"]
    rewards = columns["token_rewards"].clamp(-most, most)
    return _compute_gae({**columns, "token_rewards": rewards}, settings)


def _compute_cost_gae(
    columns: ColumnTensors, settings: AlgorithmSettings
) -> tuple["Tensor", "Tensor"]:
    most = settings.params["token_clip"]
    costs, values = columns["token_costs"].clamp(-most, most), columns["cost_values"]
    return _compute_gae({**columns, "token_rewards": costs, "values": values}, settings)


def decoupled_rewards(
    columns: ColumnTensors, group_ids: "Tensor", settings: AlgorithmSettings
) -> "Tensor":
    """Every reward against its own mean in the group, weighted and added up."""
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
    """A few tokens of large covariance, drawn by lot: of the data, so that all ranks draw alike."""
    logprobs = columns["generator_logprobs"]
    return losses.covariance_band_mask(
        logprobs,
        columns["advantages"],
        columns["loss_mask"],
        low=settings.params["covariance_low"],
        high=settings.params["covariance_high"],
        fraction=settings.params["covariance_fraction"],
        lots=_draw_seeded_lots(logprobs, columns["loss_mask"]),
    )


def _draw_seeded_lots(logprobs: "Tensor", mask: "Tensor") -> "Tensor":
    """A number in [0, 1) per token, that follows from what its rollout's own tokens are: [B, T]."""
    lots = torch.zeros(mask.shape)
    for row, own, drawn in zip(logprobs, mask, lots, strict=True):
        digest = hashlib.blake2b(row[own].float().numpy().tobytes(), digest_size=7).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
        drawn[own] = torch.rand(int(own.sum()), generator=generator)
    return lots


def covariance_top(
    columns: ColumnTensors, group_ids: "Tensor", settings: AlgorithmSettings
) -> "Tensor":
    """The tokens of largest covariance."""
    return losses.covariance_top_mask(
        columns["generator_logprobs"],
        columns["advantages"],
        columns["loss_mask"],
        fraction=settings.params["covariance_fraction"],
    )


# Dials: (value, what a step showed, settings) -> value.


def cost_multiplier(value: float, shown: Mapping[str, float], settings: AlgorithmSettings) -> float:
    """Up while the mean cost is above its limit, down while it is below."""
    return adapt_multiplier(
        value,
        shown["cost"],
        limit=settings.params["cost_limit"],
        lr=settings.params["lagrange_lr"],
        largest=settings.params["lagrange_max"],
    )


# Token losses: (tokens, settings) -> loss and where it stops the gradient, both [B, T].


def clipped_surrogate(
    tokens: TokenLossInput, settings: AlgorithmSettings
) -> tuple["Tensor", "Tensor"]:
    """PPO's clipped loss."""
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
    """GSPO: one ratio per rollout."""
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
    """CISPO: the weight is clipped, the gradient never."""
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
    """GMPO: the geometric mean of clipped ratios."""
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
    """SAPO: a soft gate."""
    loss = losses.soft_adaptive_loss(tokens.log_ratio, tokens.advantages, **settings.params)
    return loss, _empty_mask(tokens)


def covariance_clip(
    tokens: TokenLossInput, settings: AlgorithmSettings
) -> tuple["Tensor", "Tensor"]:
    """Clip-Cov: PPO's loss without a few tokens of large covariance."""
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
    """KL-Cov: tokens of large covariance are held where they are."""
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
    """DPPO: no update of a token whose probability has come too far."""
    return _divergence_masked(tokens, settings, "tv")


def divergence_masked(
    tokens: TokenLossInput, settings: AlgorithmSettings
) -> tuple["Tensor", "Tensor"]:
    """DPPO with the divergence of "this token or another" in the place of the difference."""
    return _divergence_masked(tokens, settings, "kl")


def score_function(
    tokens: TokenLossInput, settings: AlgorithmSettings
) -> tuple["Tensor", "Tensor"]:
    """REINFORCE's loss."""
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

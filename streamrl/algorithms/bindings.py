"""Functions of the algorithm table: pass a run's columns and settings to the math functions.

The formulas, their shapes and sources are documented in `math/`.
"""

import hashlib
import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from streamrl.algorithms.adaptive_params import adapt_multiplier
from streamrl.algorithms.algorithm import (
    AlgorithmSettings,
    ColumnTensors,
    LossAndClipped,
    TokenLossInput,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from streamrl.algorithms.math import advantages as adv
    from streamrl.algorithms.math import losses, masks
else:

    class LazyModule:
        """Module that is imported when an attribute is first read.

        The coordinator, the CLI and the planner read rows and compute nothing; importing torch
        would add 2.5 s to their start.
        """

        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, attribute: str) -> Any:
            return vars(importlib.import_module(self._name))[attribute]

    torch = LazyModule("torch")
    adv = LazyModule("streamrl.algorithms.math.advantages")
    losses = LazyModule("streamrl.algorithms.math.losses")
    masks = LazyModule("streamrl.algorithms.math.masks")

# Advantages: (columns, group ids [B], settings) -> [B] or [B, T].


def group_relative(columns: ColumnTensors, ids: "Tensor", settings: AlgorithmSettings) -> "Tensor":
    return adv.group_relative_advantages(
        columns["scores"], ids, **_get_scaling(settings), single=settings.single_rollout
    )


def leave_one_out(columns: ColumnTensors, ids: "Tensor", settings: AlgorithmSettings) -> "Tensor":
    return adv.leave_one_out_advantages(columns["scores"], ids, single=settings.single_rollout)


def length_weighted_baseline(
    columns: ColumnTensors, ids: "Tensor", settings: AlgorithmSettings
) -> "Tensor":
    return adv.length_weighted_advantages(
        columns["scores"], ids, columns["num_tokens"], single=settings.single_rollout
    )


def best_of_group(columns: ColumnTensors, ids: "Tensor", settings: AlgorithmSettings) -> "Tensor":
    return adv.best_of_group_advantages(columns["scores"], ids, **_get_scaling(settings))


def _get_scaling(settings: AlgorithmSettings) -> dict[str, Any]:
    """Return the arguments that say how advantages are divided."""
    return {"scale": settings.advantage_scale}


def gpg(columns: ColumnTensors, ids: "Tensor", settings: AlgorithmSettings) -> "Tensor":
    return adv.gpg_advantages(columns["scores"], ids, single=settings.single_rollout)


def reward_to_go(columns: ColumnTensors, ids: "Tensor", settings: AlgorithmSettings) -> "Tensor":
    return adv.reward_to_go(columns["token_rewards"], columns["loss_mask"], gamma=settings.gamma)


def generalized_advantages(
    columns: ColumnTensors, ids: "Tensor", settings: AlgorithmSettings
) -> "Tensor":
    return _compute_gae(columns, settings)[0]


def returns(columns: ColumnTensors, ids: "Tensor", settings: AlgorithmSettings) -> "Tensor":
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


def greedy_baseline(columns: ColumnTensors, ids: "Tensor", settings: AlgorithmSettings) -> "Tensor":
    return adv.greedy_baseline_advantages(
        reward_to_go(columns, ids, settings), columns["baseline_scores"][:, None]
    )


def constrained_advantages(
    columns: ColumnTensors, ids: "Tensor", settings: AlgorithmSettings
) -> "Tensor":
    """Return Safe RLHF's advantages; the multiplier of the costs is an adaptive parameter."""
    return adv.lagrangian_advantages(
        _compute_gae(_clip_rewards(columns, settings), settings)[0],
        _compute_gae(_clip_costs(columns, settings), settings)[0],
        multiplier=settings.params["lagrange"],
    )


def clipped_returns(columns: ColumnTensors, ids: "Tensor", settings: AlgorithmSettings) -> "Tensor":
    return returns(_clip_rewards(columns, settings), ids, settings)


def cost_returns(columns: ColumnTensors, ids: "Tensor", settings: AlgorithmSettings) -> "Tensor":
    return returns(_clip_costs(columns, settings), ids, settings)


def _clip_rewards(columns: ColumnTensors, settings: AlgorithmSettings) -> ColumnTensors:
    """Return `columns` with clipped token rewards."""
    clip = settings.params["token_clip"]
    return {**columns, "token_rewards": columns["token_rewards"].clamp(-clip, clip)}


def _clip_costs(columns: ColumnTensors, settings: AlgorithmSettings) -> ColumnTensors:
    """Return `columns` with the clipped token costs and their values in place of the rewards'."""
    clip = settings.params["token_clip"]
    costs = columns["token_costs"].clamp(-clip, clip)
    return {**columns, "token_rewards": costs, "values": columns["cost_values"]}


def decoupled_rewards(
    columns: ColumnTensors, ids: "Tensor", settings: AlgorithmSettings
) -> "Tensor":
    weights = settings.reward_weights
    return adv.decoupled_reward_advantages(
        torch.stack([columns[f"reward/{name}"] for name in weights], -1),
        ids,
        weights=torch.tensor(list(weights.values()), dtype=torch.float64),
    )


def covariance_band(columns: ColumnTensors, ids: "Tensor", settings: AlgorithmSettings) -> "Tensor":
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


def covariance_top(columns: ColumnTensors, ids: "Tensor", settings: AlgorithmSettings) -> "Tensor":
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


def clipped_surrogate(tokens: TokenLossInput, settings: AlgorithmSettings) -> LossAndClipped:
    clips = _get_clips(settings)
    loss = losses.clipped_surrogate_loss(
        tokens.log_ratio, tokens.advantages, **clips, dual_clip=settings.dual_clip
    )
    return loss, losses.outside_clip_mask(tokens.log_ratio, tokens.advantages, **clips)


def sequence_clipped_surrogate(
    tokens: TokenLossInput, settings: AlgorithmSettings
) -> LossAndClipped:
    clips = _get_clips(settings)
    loss = losses.sequence_clipped_surrogate_loss(
        tokens.log_ratio, tokens.advantages, tokens.loss_mask, **clips
    )
    mean = masks.masked_row_mean(tokens.log_ratio.detach(), tokens.loss_mask)
    return loss, losses.outside_clip_mask(mean, tokens.advantages, **clips)


def clipped_importance(tokens: TokenLossInput, settings: AlgorithmSettings) -> LossAndClipped:
    loss = losses.clipped_importance_loss(
        tokens.log_ratio, tokens.advantages, logprobs=tokens.logprobs, **_get_clips(settings)
    )
    return loss, _clip_nothing(tokens)


def geometric_mean(tokens: TokenLossInput, settings: AlgorithmSettings) -> LossAndClipped:
    x, a = tokens.log_ratio, tokens.advantages
    loss = losses.geometric_mean_loss(x, a, tokens.loss_mask, **_get_clips(settings))
    too_high = (a > 0) & (x > settings.clip_high)
    return loss, too_high | ((a < 0) & (x < -settings.clip_low))


def soft_adaptive(tokens: TokenLossInput, settings: AlgorithmSettings) -> LossAndClipped:
    loss = losses.soft_adaptive_loss(tokens.log_ratio, tokens.advantages, **settings.params)
    return loss, _clip_nothing(tokens)


def covariance_clip(tokens: TokenLossInput, settings: AlgorithmSettings) -> LossAndClipped:
    clips, chosen = _get_clips(settings), tokens.derived["chosen"]
    loss = losses.covariance_clip_loss(tokens.log_ratio, tokens.advantages, chosen=chosen, **clips)
    return loss, losses.outside_clip_mask(tokens.log_ratio, tokens.advantages, **clips) | chosen


def covariance_kl(tokens: TokenLossInput, settings: AlgorithmSettings) -> LossAndClipped:
    chosen, coef = tokens.derived["chosen"], settings.params["covariance_coef"]
    loss = losses.covariance_kl_loss(tokens.log_ratio, tokens.advantages, chosen=chosen, coef=coef)
    return loss, _clip_nothing(tokens)


def variation_masked(tokens: TokenLossInput, settings: AlgorithmSettings) -> LossAndClipped:
    return _divergence_masked(tokens, settings, "tv")


def divergence_masked(tokens: TokenLossInput, settings: AlgorithmSettings) -> LossAndClipped:
    return _divergence_masked(tokens, settings, "kl")


def _divergence_masked(
    tokens: TokenLossInput, settings: AlgorithmSettings, kind: str
) -> LossAndClipped:
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


def score_function(tokens: TokenLossInput, settings: AlgorithmSettings) -> LossAndClipped:
    return losses.score_function_loss(tokens.logprobs, tokens.advantages), _clip_nothing(tokens)


def _get_clips(settings: AlgorithmSettings) -> dict[str, float]:
    return {"clip_low": settings.clip_low, "clip_high": settings.clip_high}


def _clip_nothing(tokens: TokenLossInput) -> "Tensor":
    """Return the mask of a loss that clips no gradient: all false."""
    return torch.zeros_like(tokens.loss_mask)

"""The algorithm table: each row has required columns, advantages, token loss and defaults.

A new algorithm takes one or two functions, a row and a test. A null in `AlgorithmConfig` takes the
row's default; a default that the row lacks comes from DEFAULT_SETTINGS. The functions of the rows
pass a run's columns and settings to the formulas in `math/`, which have shapes and sources.
"""

import hashlib
import importlib
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from streamrl.algorithms.adaptive_params import adapt_multiplier
from streamrl.algorithms.algorithm import (
    Algorithm,
    AlgorithmSettings,
    ColumnTensors,
    LossAndClipped,
    TokenLossInput,
)
from streamrl.messages import (
    PAIRS,
    REF_TOP_IDS,
    REF_TOP_LOGPROBS,
    SCORE_NORMS,
    STATE_COLUMN,
    TARGETS,
    TOKEN_SCORES,
    TURN_COLUMN,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from streamrl.algorithms.math import advantages as adv
    from streamrl.algorithms.math import losses
    from streamrl.algorithms.math import tokens as token_math
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
    token_math = LazyModule("streamrl.algorithms.math.tokens")

# Advantages: (columns, group ids [B], settings) -> [B] or [B, T].


def group_relative(columns: ColumnTensors, ids: "Tensor", settings: AlgorithmSettings) -> "Tensor":
    return adv.group_relative_advantages(
        columns["scores"], ids, scale=settings.advantage_scale, single=settings.single_rollout
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
    return adv.best_of_group_advantages(columns["scores"], ids, scale=settings.advantage_scale)


def gpg(columns: ColumnTensors, ids: "Tensor", settings: AlgorithmSettings) -> "Tensor":
    return adv.gpg_advantages(columns["scores"], ids, single=settings.single_rollout)


def teacher_relative(
    columns: ColumnTensors, ids: "Tensor", settings: AlgorithmSettings
) -> "Tensor":
    """Return the reference's log-probability minus the policy's at sampling, of each token.

    A task's rewards add `task_weight` times their group-relative advantage.
    """
    gain = columns["ref_logprobs"] - columns["generator_logprobs"]
    task = weighted_task(columns, ids, settings)
    return token_math.apply_mask(gain + task[:, None], columns["loss_mask"])


def row_weight(columns: ColumnTensors, ids: "Tensor", settings: AlgorithmSettings) -> "Tensor":
    return columns["scores"]


def weighted_task(columns: ColumnTensors, ids: "Tensor", settings: AlgorithmSettings) -> "Tensor":
    weight: float = settings.params["task_weight"]
    return weight * group_relative(columns, ids, settings)


def reward_to_go(columns: ColumnTensors, ids: "Tensor", settings: AlgorithmSettings) -> "Tensor":
    if settings.time_step == "token":
        rewards, mask = columns["token_rewards"], columns["loss_mask"]
        return adv.reward_to_go(rewards, mask, gamma=settings.gamma)
    turns = adv.TurnSteps(columns[TURN_COLUMN])
    rewards = turns.sum_tokens(columns["token_rewards"])
    return turns.spread(adv.reward_to_go(rewards, turns.mask, gamma=settings.gamma))


def turn_relative(columns: ColumnTensors, ids: "Tensor", settings: AlgorithmSettings) -> "Tensor":
    turns = adv.TurnSteps(columns[TURN_COLUMN])
    rewards = turns.sum_tokens(columns["token_rewards"])
    gamma, scale = settings.gamma, settings.advantage_scale
    return turns.spread(
        adv.turn_relative_advantages(rewards, turns.mask, ids, gamma=gamma, scale=scale)
    )


def episode_and_anchor(
    columns: ColumnTensors, ids: "Tensor", settings: AlgorithmSettings
) -> "Tensor":
    """Return GiGPO's advantages: those of episodes plus those of turns in equal states."""
    turns = adv.TurnSteps(columns[TURN_COLUMN])
    by_turn = adv.anchor_advantages(
        turns.sum_tokens(columns["token_rewards"]),
        turns.select_first(columns[STATE_COLUMN]),
        ids,
        gamma=settings.gamma,
        scale=settings.advantage_scale,
    )
    by_episode = group_relative(columns, ids, settings)[:, None]
    return turns.spread(by_episode + settings.params["turn_weight"] * by_turn)


def hierarchy_of_anchors(
    columns: ColumnTensors, ids: "Tensor", settings: AlgorithmSettings
) -> "Tensor":
    """Return HGPO's advantages: of turns in equal states after equal states, by their number."""
    turns = adv.TurnSteps(columns[TURN_COLUMN])
    depths = range(int(settings.params["history"]) + 1)
    by_turn = adv.anchor_advantages(
        turns.sum_tokens(columns["token_rewards"]),
        turns.select_first(columns[STATE_COLUMN]),
        ids,
        gamma=settings.gamma,
        scale=settings.advantage_scale,
        depth_weights=[(k + 1) ** settings.params["weight_power"] for k in depths],
    )
    return turns.spread(by_turn)


def optimal_token_baseline(
    columns: ColumnTensors, ids: "Tensor", settings: AlgorithmSettings
) -> "Tensor":
    # Rollouts that are not trained count in the baseline.
    sampled = columns[TURN_COLUMN] > 0
    return adv.optimal_token_advantages(
        columns["token_rewards"],
        columns[SCORE_NORMS],
        sampled,
        ids,
        gamma=settings.gamma,
        single=settings.single_rollout,
    )


def generalized_advantages(
    columns: ColumnTensors, ids: "Tensor", settings: AlgorithmSettings
) -> "Tensor":
    return _compute_gae(columns, settings)[0]


def returns(columns: ColumnTensors, ids: "Tensor", settings: AlgorithmSettings) -> "Tensor":
    """Return the critic's targets: advantages before whitening, plus the critic's values."""
    return _compute_gae(columns, settings)[1]


def length_adaptive(columns: ColumnTensors, ids: "Tensor", settings: AlgorithmSettings) -> "Tensor":
    return _compute_gae(columns, settings, alpha=settings.params["alpha"])[0]


def monte_carlo_returns(
    columns: ColumnTensors, ids: "Tensor", settings: AlgorithmSettings
) -> "Tensor":
    """Return the critic's targets under lambda = 1: discounted sums of rewards."""
    return reward_to_go(columns, ids, settings)


def right_weight(columns: ColumnTensors, ids: "Tensor", settings: AlgorithmSettings) -> "Tensor":
    """Return tokens of the step by tokens of its right rollouts, 0 for rollouts not right: [B]."""
    scores, tokens = columns["scores"], columns["loss_mask"].sum(-1)
    tokens_if_right = tokens * (scores > settings.params["right_above"])
    weight = tokens.sum().to(scores.dtype) / tokens_if_right.sum().clamp(min=1)
    return torch.where(tokens_if_right > 0, weight, 0.0)


def _compute_gae(
    columns: ColumnTensors, settings: AlgorithmSettings, alpha: float | None = None
) -> tuple["Tensor", "Tensor"]:
    """Return advantages and returns of generalized advantage estimation, both [B, T].

    If time passes by turns, the value before a turn is that before its first token, and all tokens
    of the turn have its advantage and its return. With `alpha`, lambda depends on the number of
    steps.
    """
    rewards, values, mask = columns["token_rewards"], columns["values"], columns["loss_mask"]

    def estimate(rewards: "Tensor", values: "Tensor", mask: "Tensor") -> tuple["Tensor", "Tensor"]:
        lam: float | Tensor
        if alpha is None:
            lam = settings.params["lam"]
        else:
            lam = adv.length_adaptive_lambda(mask.sum(-1), alpha=alpha)
        return adv.generalized_advantages(rewards, values, mask, gamma=settings.gamma, lam=lam)

    if settings.time_step == "token":
        return estimate(rewards, values, mask)
    turns = adv.TurnSteps(columns[TURN_COLUMN])
    estimates = estimate(turns.sum_tokens(rewards), turns.select_first(values), turns.mask)
    advantages, returns = map(turns.spread, estimates)
    return advantages, returns


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


def clipped_surrogate_and_likelihood(
    tokens: TokenLossInput, settings: AlgorithmSettings
) -> LossAndClipped:
    loss, clipped = clipped_surrogate(tokens, settings)
    weights = settings.params["likelihood_coef"] * tokens.derived["right_weight"]
    return loss - weights * tokens.logprobs, clipped


def clipped_surrogate_and_divergence(
    tokens: TokenLossInput, settings: AlgorithmSettings
) -> LossAndClipped:
    assert tokens.word_logprobs is not None and tokens.ref_word_logprobs is not None
    divergence = losses.teacher_divergence(
        tokens.word_logprobs, tokens.ref_word_logprobs, beta=settings.params["beta"]
    )
    loss, clipped = clipped_surrogate(tokens, settings)
    return loss + divergence, clipped


def sequence_clipped_surrogate(
    tokens: TokenLossInput, settings: AlgorithmSettings
) -> LossAndClipped:
    clips = _get_clips(settings)
    loss = losses.sequence_clipped_surrogate_loss(
        tokens.log_ratio, tokens.advantages, tokens.loss_mask, **clips
    )
    mean = token_math.masked_row_mean(tokens.log_ratio.detach(), tokens.loss_mask)
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


def sequence_gamma(tokens: TokenLossInput, settings: AlgorithmSettings) -> LossAndClipped:
    loss = losses.sequence_gamma_loss(
        tokens.log_ratio,
        tokens.advantages,
        tokens.loss_mask,
        logprobs=tokens.logprobs,
        **settings.params,
    )
    return loss, _clip_nothing(tokens)


def quadratic_penalty(tokens: TokenLossInput, settings: AlgorithmSettings) -> LossAndClipped:
    loss = losses.quadratic_penalty_loss(
        tokens.log_ratio,
        tokens.advantages,
        logprobs=tokens.logprobs,
        coef=settings.params["penalty_coef"],
    )
    return loss, _clip_nothing(tokens)


def score_function(tokens: TokenLossInput, settings: AlgorithmSettings) -> LossAndClipped:
    return losses.score_function_loss(tokens.logprobs, tokens.advantages), _clip_nothing(tokens)


def bradley_terry(tokens: TokenLossInput, settings: AlgorithmSettings) -> LossAndClipped:
    loss = losses.bradley_terry_loss(tokens.logprobs, tokens.loss_mask, **settings.params)
    return loss, _clip_nothing(tokens)


def _get_clips(settings: AlgorithmSettings) -> dict[str, float]:
    return {"clip_low": settings.clip_low, "clip_high": settings.clip_high}


def _clip_nothing(tokens: TokenLossInput) -> "Tensor":
    """Return the mask of a loss that clips no gradient: all false."""
    return torch.zeros_like(tokens.loss_mask)


DEFAULT_SETTINGS: Mapping[str, Any] = {
    "clip_low": 0.2,
    "clip_high": 0.2,
    "dual_clip": None,
    "loss_aggregation": "token-mean",
    "advantage_scale": "none",
    "whiten_advantages": False,
    "gamma": 1.0,
    "kl_in": "loss",
    "kl_kind": "k3",
}
KL_IN_REWARD: Mapping[str, Any] = {"kl_in": "reward", "kl_kind": "k1"}
SCORE_COLUMNS = ("scores",)
TOKEN_SCORE_COLUMNS = (*SCORE_COLUMNS, TOKEN_SCORES)
FRACTION_LIMITS = (0.0, 1.0)
NON_NEGATIVE_LIMITS = (0.0, math.inf)
# Parameters with multiplicative updates stay 0 forever if they start at 0.
POSITIVE_LIMITS = (1e-6, math.inf)
VESPO_PARAMS: Mapping[str, float] = {
    "power_positive": 2.0,
    "decay_positive": 3.0,
    "power_negative": 3.0,
    "decay_negative": 2.0,
}
GRPO = Algorithm(
    name="grpo",
    paper="Shao et al. 2024, DeepSeekMath, arXiv:2402.03300",
    columns=SCORE_COLUMNS,
    advantages=group_relative,
    token_loss=clipped_surrogate,
    # The paper's mean over rollouts of the mean over their tokens.
    defaults={"loss_aggregation": "seq-mean-token-mean", "advantage_scale": "std"},
    min_group_size=2,
)


def variant(name: str, paper: str, base: Algorithm = GRPO, **changes: Any) -> Algorithm:
    """Return a copy of algorithm `base` with changed fields; `defaults` extend those of `base`."""
    defaults = {**base.defaults, **changes.pop("defaults", {})}
    return replace(base, name=name, paper=paper, defaults=defaults, **changes)


ALGORITHM_SPECS = (
    Algorithm(
        name="ppo",
        paper="Schulman et al. 2017, PPO, arXiv:1707.06347",
        columns=(*TOKEN_SCORE_COLUMNS, "values"),
        advantages=generalized_advantages,
        token_loss=clipped_surrogate,
        derived={"returns": returns},
        defaults={"whiten_advantages": True, **KL_IN_REWARD},
        params={"lam": 0.95},
        limits={"lam": FRACTION_LIMITS},
    ),
    Algorithm(
        name="vapo",
        paper="Yue et al. 2025, VAPO, arXiv:2504.05118",
        columns=(*TOKEN_SCORE_COLUMNS, "values"),
        advantages=length_adaptive,
        token_loss=clipped_surrogate_and_likelihood,
        derived={"returns": monte_carlo_returns, "right_weight": right_weight},
        defaults={"clip_high": 0.28, "whiten_advantages": True, **KL_IN_REWARD},
        params={"alpha": 0.05, "likelihood_coef": 0.1, "right_above": 0.0},
        limits={"alpha": POSITIVE_LIMITS, "likelihood_coef": NON_NEGATIVE_LIMITS},
        scope="step",
    ),
    GRPO,
    variant(
        "dr_grpo",
        "Liu et al. 2025, Dr. GRPO, arXiv:2503.20783",
        defaults={"loss_aggregation": "seq-mean-token-sum-norm", "advantage_scale": "none"},
    ),
    variant(
        "grpo_turn",
        "Shao et al. 2024, DeepSeekMath, arXiv:2402.03300, section 4.1.3, with returns",
        columns=(*TOKEN_SCORE_COLUMNS, TURN_COLUMN),
        advantages=turn_relative,
        defaults={"loss_aggregation": "token-mean", "advantage_scale": "none"},
    ),
    variant(
        "gigpo",
        "Feng et al. 2025, GiGPO, arXiv:2505.10978",
        columns=(*TOKEN_SCORE_COLUMNS, TURN_COLUMN, STATE_COLUMN),
        advantages=episode_and_anchor,
        defaults={"gamma": 0.95, "loss_aggregation": "token-mean", "advantage_scale": "none"},
        params={"turn_weight": 1.0},
        limits={"turn_weight": NON_NEGATIVE_LIMITS},
    ),
    variant(
        "hgpo",
        "He et al. 2026, HGPO, arXiv:2602.22817",
        columns=(*TOKEN_SCORE_COLUMNS, TURN_COLUMN, STATE_COLUMN),
        advantages=hierarchy_of_anchors,
        defaults={"gamma": 0.95, "loss_aggregation": "token-mean"},
        params={"history": 2, "weight_power": 1.0},
        limits={"history": NON_NEGATIVE_LIMITS, "weight_power": NON_NEGATIVE_LIMITS},
    ),
    variant(
        "otb",
        "Li et al. 2026, The Optimal Token Baseline, arXiv:2602.07078",
        columns=(*TOKEN_SCORE_COLUMNS, SCORE_NORMS),
        advantages=optimal_token_baseline,
        defaults={"loss_aggregation": "token-mean", "advantage_scale": "none"},
        # A token that no other rollout reaches has baseline 0.
        min_group_size=1,
    ),
    variant(
        "dapo",
        "Yu et al. 2025, DAPO, arXiv:2503.14476",
        defaults={"clip_high": 0.28, "loss_aggregation": "token-mean"},
    ),
    variant(
        "gspo",
        "Zheng et al. 2025, GSPO, arXiv:2507.18071",
        token_loss=sequence_clipped_surrogate,
        defaults={"clip_low": 3e-4, "clip_high": 4e-4},
    ),
    variant(
        "luspo",
        "Liu et al. 2026, LUSPO, arXiv:2602.05261",
        token_loss=sequence_clipped_surrogate,
        # The sum over a rollout is GSPO's loss times the rollout's length.
        defaults={"clip_low": 3e-4, "clip_high": 4e-4, "loss_aggregation": "seq-mean-token-sum"},
    ),
    variant(
        "vespo",
        "Shen et al. 2026, VESPO, arXiv:2602.10693",
        token_loss=sequence_gamma,
        defaults={"loss_aggregation": "token-mean"},
        params=VESPO_PARAMS,
        limits=dict.fromkeys(VESPO_PARAMS, NON_NEGATIVE_LIMITS),
    ),
    variant(
        "dro",
        "Richemond et al. 2024, DRO, arXiv:2405.19107",
        token_loss=quadratic_penalty,
        defaults={"advantage_scale": "none", "loss_aggregation": "token-mean"},
        params={"penalty_coef": 1.0},
        limits={"penalty_coef": POSITIVE_LIMITS},
    ),
    variant(
        "cispo",
        "MiniMax 2025, MiniMax-M1, arXiv:2506.13585",
        token_loss=clipped_importance,
        # The paper bounds the weight from above alone: 1 - clip_low is 0.
        defaults={"clip_low": 1.0, "clip_high": 4.0, "loss_aggregation": "token-mean"},
    ),
    variant(
        "gmpo",
        "Zhao et al. 2025, GMPO, arXiv:2507.20673",
        token_loss=geometric_mean,
        defaults={"clip_low": 0.4, "clip_high": 0.4},
    ),
    variant(
        "sapo",
        "Gao et al. 2025, SAPO, arXiv:2511.20347",
        token_loss=soft_adaptive,
        params={"temperature_positive": 1.0, "temperature_negative": 1.05},
        limits={"temperature_positive": POSITIVE_LIMITS, "temperature_negative": POSITIVE_LIMITS},
    ),
    variant(
        "clip_cov",
        "Cui et al. 2025, The Entropy Mechanism, arXiv:2505.22617",
        columns=(*SCORE_COLUMNS, "generator_logprobs"),
        token_loss=covariance_clip,
        derived={"chosen": covariance_band},
        defaults={"loss_aggregation": "token-mean"},
        params={"covariance_fraction": 2e-4, "covariance_low": 1.0, "covariance_high": 5.0},
        limits={"covariance_fraction": FRACTION_LIMITS},
        scope="step",
    ),
    variant(
        "kl_cov",
        "Cui et al. 2025, The Entropy Mechanism, arXiv:2505.22617",
        columns=(*SCORE_COLUMNS, "generator_logprobs"),
        token_loss=covariance_kl,
        derived={"chosen": covariance_top},
        defaults={"loss_aggregation": "token-mean"},
        params={"covariance_fraction": 2e-4, "covariance_coef": 1.0},
        limits={"covariance_fraction": FRACTION_LIMITS, "covariance_coef": NON_NEGATIVE_LIMITS},
        scope="step",
    ),
    variant(
        "dppo_tv",
        "Qi et al. 2026, DPPO, arXiv:2602.04879",
        token_loss=variation_masked,
        defaults={"loss_aggregation": "token-mean"},
        params={"ratio_cap": 20.0},
        limits={"ratio_cap": (1.0, math.inf)},
    ),
    variant(
        "dppo_kl",
        "Qi et al. 2026, DPPO, arXiv:2602.04879",
        token_loss=divergence_masked,
        defaults={"loss_aggregation": "token-mean"},
        params={"ratio_cap": 20.0},
        limits={"ratio_cap": (1.0, math.inf)},
    ),
    variant(
        "maxrl",
        "Tajwar et al. 2026, MaxRL, arXiv:2602.02710",
        defaults={"advantage_scale": "mean", "loss_aggregation": "token-mean"},
    ),
    variant(
        "rloo",
        "Ahmadian et al. 2024, RLOO, arXiv:2402.14740",
        advantages=leave_one_out,
        # The paper uses REINFORCE. PPO's loss has the same gradient on-policy and stays bounded
        # off-policy.
        defaults={
            "loss_aggregation": "seq-mean-token-sum",
            "advantage_scale": "none",
            **KL_IN_REWARD,
        },
    ),
    variant(
        "remax",
        "Li et al. 2024, ReMax, arXiv:2310.10505",
        columns=(*TOKEN_SCORE_COLUMNS, "baseline_scores"),
        advantages=greedy_baseline,
        defaults={
            "loss_aggregation": "seq-mean-token-sum",
            "advantage_scale": "none",
            **KL_IN_REWARD,
        },
        min_group_size=1,
    ),
    Algorithm(
        name="safe_rlhf",
        paper="Dai et al. 2024, Safe RLHF, arXiv:2310.12773",
        columns=(*TOKEN_SCORE_COLUMNS, "costs", "values", "cost_values"),
        advantages=constrained_advantages,
        token_loss=clipped_surrogate,
        derived={"returns": clipped_returns, "cost_returns": cost_returns},
        dials={"lagrange": cost_multiplier},
        defaults=KL_IN_REWARD,
        params={
            "lam": 0.95,
            "cost_limit": 0.0,
            "lagrange": 1.0,
            "lagrange_lr": 0.1,
            "lagrange_max": 5.0,
            "token_clip": 50.0,
        },
        limits={
            "lam": FRACTION_LIMITS,
            "lagrange": POSITIVE_LIMITS,
            "lagrange_lr": NON_NEGATIVE_LIMITS,
            "lagrange_max": POSITIVE_LIMITS,
            "token_clip": POSITIVE_LIMITS,
        },
    ),
    variant(
        "opo",
        "Hao et al. 2025, OPO, arXiv:2505.23585",
        advantages=length_weighted_baseline,
        defaults={"advantage_scale": "none", "loss_aggregation": "token-mean"},
    ),
    variant(
        "pass_at_k",
        "Tang et al. 2025, Optimizing for Inference Time Objectives, arXiv:2503.19595",
        advantages=best_of_group,
        defaults={"loss_aggregation": "token-mean"},
    ),
    variant(
        "gpg",
        "Chu et al. 2025, GPG, arXiv:2504.02546",
        advantages=gpg,
        token_loss=score_function,
        defaults={"advantage_scale": "none", "loss_aggregation": "token-mean"},
        scope="step",
    ),
    variant(
        "gdpo",
        "Liu et al. 2026, GDPO, arXiv:2601.05242",
        columns=(*SCORE_COLUMNS, "reward/*"),
        advantages=decoupled_rewards,
        defaults={"whiten_advantages": True, "loss_aggregation": "token-mean"},
    ),
    variant(
        "reinforce_pp",
        "Hu et al. 2025, REINFORCE++, arXiv:2501.03262",
        columns=TOKEN_SCORE_COLUMNS,
        advantages=reward_to_go,
        defaults={
            "advantage_scale": "none",
            "whiten_advantages": True,
            "loss_aggregation": "token-mean",
            **KL_IN_REWARD,
        },
        min_group_size=1,
    ),
    variant(
        "distill",
        "Agarwal et al. 2023, On-Policy Distillation, arXiv:2306.13649, reverse KL by samples",
        columns=(*SCORE_COLUMNS, "generator_logprobs", "ref_logprobs"),
        advantages=teacher_relative,
        defaults={"loss_aggregation": "token-mean"},
        params={"task_weight": 0.0},
        limits={"task_weight": NON_NEGATIVE_LIMITS},
        min_group_size=1,
    ),
    Algorithm(
        name="sft",
        paper="Ouyang et al. 2022, InstructGPT, arXiv:2203.02155, section 3.5",
        columns=SCORE_COLUMNS,
        advantages=row_weight,
        token_loss=score_function,
        trains_on=TARGETS,
    ),
    Algorithm(
        name="reward_model",
        paper="Ouyang et al. 2022, InstructGPT, arXiv:2203.02155, equation 1; center_coef:"
        " Eisenstein et al. 2023, arXiv:2312.09244",
        columns=SCORE_COLUMNS,
        advantages=row_weight,
        token_loss=bradley_terry,
        defaults={"loss_aggregation": "seq-mean-token-sum"},
        params={"center_coef": 0.0},
        limits={"center_coef": NON_NEGATIVE_LIMITS},
        trains_on=PAIRS,
    ),
    variant(
        "gkd",
        "Agarwal et al. 2023, On-Policy Distillation (GKD), arXiv:2306.13649",
        columns=(*SCORE_COLUMNS, "ref_logprobs", REF_TOP_IDS, REF_TOP_LOGPROBS),
        advantages=weighted_task,
        token_loss=clipped_surrogate_and_divergence,
        defaults={"loss_aggregation": "token-mean"},
        params={"beta": 1.0, "top_k": 64, "task_weight": 0.0},
        limits={
            "beta": FRACTION_LIMITS,
            "top_k": (1, math.inf),
            "task_weight": NON_NEGATIVE_LIMITS,
        },
        min_group_size=1,
    ),
    variant(
        "reinforce_pp_baseline",
        "Hu et al. 2025, REINFORCE++, arXiv:2501.03262",
        defaults={
            "advantage_scale": "none",
            "whiten_advantages": True,
            "loss_aggregation": "token-mean",
        },
    ),
)
ALGORITHMS: Mapping[str, Algorithm] = {row.name: row for row in ALGORITHM_SPECS}

"""The algorithms, a row each: what it needs, its advantages, its token loss, its defaults.

A new algorithm is one function or two, one row and one test. What `AlgorithmConfig` leaves at null
is taken from the row, and what the row does not say from DEFAULTS.
"""

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from streamrl.algorithms import advantages as adv
from streamrl.algorithms import losses
from streamrl.algorithms.algorithm import Algorithm, Columns, Settings, Tokens
from streamrl.algorithms.masks import row_mean

DEFAULTS: Mapping[str, Any] = {
    "clip_low": 0.2,
    "clip_high": 0.2,
    "dual_clip": None,
    "loss_aggregation": "token-mean",
    "advantage_scale": "none",
    "whiten_advantages": False,
    "kl_in": "loss",
    "kl_kind": "k3",
}
KL_IN_REWARD: Mapping[str, Any] = {"kl_in": "reward", "kl_kind": "k1"}


# Advantages: (columns, group_ids, settings) -> [B] or [B, T].


def group_relative(columns: Columns, group_ids: Tensor, settings: Settings) -> Tensor:
    """Score against the group's mean, over what `advantage_scale` says."""
    return adv.group_relative(
        columns["scores"],
        group_ids,
        scale=settings.advantage_scale,
        eps=settings.advantage_eps,
        unbiased=settings.advantage_unbiased,
        single=settings.single_rollout,
    )


def leave_one_out(columns: Columns, group_ids: Tensor, settings: Settings) -> Tensor:
    """Score against the mean of the others in the group."""
    return adv.leave_one_out(columns["scores"], group_ids, single=settings.single_rollout)


def length_weighted_baseline(columns: Columns, group_ids: Tensor, settings: Settings) -> Tensor:
    """Score against the mean of the group's tokens."""
    return adv.length_weighted_baseline(
        columns["scores"], group_ids, columns["num_tokens"], single=settings.single_rollout
    )


def best_of_group(columns: Columns, group_ids: Tensor, settings: Settings) -> Tensor:
    """The lead of the best of the group."""
    return adv.best_of_group(
        columns["scores"],
        group_ids,
        scale=settings.advantage_scale,
        eps=settings.advantage_eps,
        unbiased=settings.advantage_unbiased,
    )


def gpg(columns: Columns, group_ids: Tensor, settings: Settings) -> Tensor:
    """Score against the group's mean, times rollouts over rollouts with a score."""
    return adv.gpg(columns["scores"], group_ids, single=settings.single_rollout)


def reward_to_go(columns: Columns, group_ids: Tensor, settings: Settings) -> Tensor:
    """The discounted rewards from each token on."""
    return adv.reward_to_go(columns["token_rewards"], columns["loss_mask"], gamma=settings.gamma)


def generalized_advantages(columns: Columns, group_ids: Tensor, settings: Settings) -> Tensor:
    """Generalized advantage estimates under the critic's values."""
    return _generalized(columns, settings)[0]


def returns(columns: Columns, group_ids: Tensor, settings: Settings) -> Tensor:
    """What the critic is to learn: advantages, before they are whitened, plus values."""
    return _generalized(columns, settings)[1]


def _generalized(columns: Columns, settings: Settings) -> tuple[Tensor, Tensor]:
    return adv.generalized_advantages(
        columns["token_rewards"],
        columns["values"],
        columns["loss_mask"],
        gamma=settings.gamma,
        lam=settings.params["lam"],
    )


def decoupled_rewards(columns: Columns, group_ids: Tensor, settings: Settings) -> Tensor:
    """Every reward against its own mean in the group, weighted and added up."""
    weights = settings.reward_weights
    rewards = torch.stack([columns[f"reward/{name}"] for name in weights], -1)
    return adv.decoupled_reward_normalization(
        rewards,
        group_ids,
        weights=torch.tensor(list(weights.values()), dtype=torch.float64),
        eps=settings.advantage_eps,
        unbiased=settings.advantage_unbiased,
    )


def covariance_band(columns: Columns, group_ids: Tensor, settings: Settings) -> Tensor:
    """A few tokens of large covariance, drawn by lot: the lot is of the data, all ranks draw it."""
    logprobs = columns["generator_logprobs"]
    digest = hashlib.blake2b(logprobs.numpy().tobytes(), digest_size=7).digest()
    return losses.covariance_band(
        logprobs,
        columns["advantages"],
        columns["loss_mask"],
        low=settings.params["covariance_low"],
        high=settings.params["covariance_high"],
        fraction=settings.params["covariance_fraction"],
        generator=torch.Generator().manual_seed(int.from_bytes(digest, "big")),
    )


def covariance_top(columns: Columns, group_ids: Tensor, settings: Settings) -> Tensor:
    """The tokens of largest covariance."""
    return losses.covariance_top(
        columns["generator_logprobs"],
        columns["advantages"],
        columns["loss_mask"],
        fraction=settings.params["covariance_fraction"],
    )


# Token losses: (tokens, settings) -> loss and where it stops the gradient, both [B, T].


def clipped_surrogate(tokens: Tokens, settings: Settings) -> tuple[Tensor, Tensor]:
    """PPO's clipped loss."""
    loss = losses.clipped_surrogate(
        tokens.log_ratio,
        tokens.advantages,
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
        dual_clip=settings.dual_clip,
    )
    return loss, _outside(tokens.log_ratio, tokens, settings)


def sequence_clipped_surrogate(tokens: Tokens, settings: Settings) -> tuple[Tensor, Tensor]:
    """GSPO: one ratio per rollout."""
    loss = losses.sequence_clipped_surrogate(
        tokens.log_ratio,
        tokens.advantages,
        tokens.loss_mask,
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
    )
    mean = row_mean(tokens.log_ratio.detach(), tokens.loss_mask)
    return loss, _outside(mean, tokens, settings)


def clipped_importance(tokens: Tokens, settings: Settings) -> tuple[Tensor, Tensor]:
    """CISPO: the weight is clipped, the gradient never."""
    loss = losses.clipped_importance(
        tokens.log_ratio,
        tokens.advantages,
        logprobs=tokens.logprobs,
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
    )
    return loss, _nowhere(tokens)


def geometric_mean(tokens: Tokens, settings: Settings) -> tuple[Tensor, Tensor]:
    """GMPO: the geometric mean of clipped ratios."""
    loss = losses.geometric_mean(
        tokens.log_ratio,
        tokens.advantages,
        tokens.loss_mask,
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
    )
    x, a = tokens.log_ratio, tokens.advantages
    too_high = (a > 0) & (x > settings.clip_high)
    return loss, too_high | ((a < 0) & (x < -settings.clip_low))


def soft_adaptive(tokens: Tokens, settings: Settings) -> tuple[Tensor, Tensor]:
    """SAPO: a soft gate."""
    loss = losses.soft_adaptive(tokens.log_ratio, tokens.advantages, **settings.params)
    return loss, _nowhere(tokens)


def covariance_clip(tokens: Tokens, settings: Settings) -> tuple[Tensor, Tensor]:
    """Clip-Cov: PPO's loss without a few tokens of large covariance."""
    chosen = tokens.derived["chosen"]
    loss = losses.covariance_clip(
        tokens.log_ratio,
        tokens.advantages,
        chosen=chosen,
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
    )
    return loss, _outside(tokens.log_ratio, tokens, settings) | chosen


def covariance_kl(tokens: Tokens, settings: Settings) -> tuple[Tensor, Tensor]:
    """KL-Cov: tokens of large covariance are held where they are."""
    loss = losses.covariance_kl(
        tokens.log_ratio,
        tokens.advantages,
        chosen=tokens.derived["chosen"],
        coef=settings.params["covariance_coef"],
    )
    return loss, _nowhere(tokens)


def variation_masked(tokens: Tokens, settings: Settings) -> tuple[Tensor, Tensor]:
    """DPPO: no update of a token whose probability has come too far."""
    return _divergence_masked(tokens, settings, "tv")


def divergence_masked(tokens: Tokens, settings: Settings) -> tuple[Tensor, Tensor]:
    """DPPO with the divergence of "this token or another" in the place of the difference."""
    return _divergence_masked(tokens, settings, "kl")


def score_function(tokens: Tokens, settings: Settings) -> tuple[Tensor, Tensor]:
    """REINFORCE's loss."""
    return losses.score_function(tokens.logprobs, tokens.advantages), _nowhere(tokens)


def _divergence_masked(tokens: Tokens, settings: Settings, kind: str) -> tuple[Tensor, Tensor]:
    loss = losses.divergence_masked(
        tokens.log_ratio,
        tokens.advantages,
        logprobs=tokens.logprobs,
        kind=kind,
        low=settings.clip_low,
        high=settings.clip_high,
        cap=settings.params["ratio_cap"],
    )
    return loss, (loss == 0) & (tokens.advantages != 0)


def _outside(log_ratio: Tensor, tokens: Tokens, settings: Settings) -> Tensor:
    return losses.outside_clip(
        log_ratio,
        tokens.advantages,
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
    )


def _nowhere(tokens: Tokens) -> Tensor:
    return torch.zeros_like(tokens.loss_mask)


SCORES = ("scores",)
GRPO = Algorithm(
    name="grpo",
    paper="Shao et al. 2024, DeepSeekMath, arXiv:2402.03300",
    columns=SCORES,
    advantages=group_relative,
    token_loss=clipped_surrogate,
    # The paper's mean over rollouts of the mean over their tokens.
    defaults={"loss_aggregation": "seq-mean-token-mean", "advantage_scale": "std"},
    min_group_size=2,
)


def variant(name: str, paper: str, base: Algorithm = GRPO, **changes: Any) -> Algorithm:
    """A row that is another one but for what is said; defaults are added to those of `base`."""
    defaults = {**base.defaults, **changes.pop("defaults", {})}
    return dataclasses.replace(base, name=name, paper=paper, defaults=defaults, **changes)


ROWS = (
    Algorithm(
        name="ppo",
        paper="Schulman et al. 2017, PPO, arXiv:1707.06347",
        columns=(*SCORES, "values"),
        advantages=generalized_advantages,
        token_loss=clipped_surrogate,
        derived={"returns": returns},
        defaults={"whiten_advantages": True, **KL_IN_REWARD},
        params={"lam": 0.95},
    ),
    GRPO,
    variant(
        "dr_grpo",
        "Liu et al. 2025, Dr. GRPO, arXiv:2503.20783",
        defaults={"loss_aggregation": "seq-mean-token-sum-norm", "advantage_scale": "none"},
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
    ),
    variant(
        "clip_cov",
        "Cui et al. 2025, The Entropy Mechanism, arXiv:2505.22617",
        columns=(*SCORES, "generator_logprobs"),
        token_loss=covariance_clip,
        derived={"chosen": covariance_band},
        defaults={"loss_aggregation": "token-mean"},
        params={"covariance_fraction": 2e-4, "covariance_low": 1.0, "covariance_high": 5.0},
        scope="step",
    ),
    variant(
        "kl_cov",
        "Cui et al. 2025, The Entropy Mechanism, arXiv:2505.22617",
        columns=(*SCORES, "generator_logprobs"),
        token_loss=covariance_kl,
        derived={"chosen": covariance_top},
        defaults={"loss_aggregation": "token-mean"},
        params={"covariance_fraction": 2e-4, "covariance_coef": 1.0},
        scope="step",
    ),
    variant(
        "dppo_tv",
        "Qi et al. 2026, DPPO, arXiv:2602.04879",
        token_loss=variation_masked,
        defaults={"loss_aggregation": "token-mean"},
        params={"ratio_cap": 20.0},
    ),
    variant(
        "dppo_kl",
        "Qi et al. 2026, DPPO, arXiv:2602.04879",
        token_loss=divergence_masked,
        defaults={"loss_aggregation": "token-mean"},
        params={"ratio_cap": 20.0},
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
        # On-policy PPO's loss has the gradient of REINFORCE, the paper's; off-policy it is safe.
        defaults={
            "loss_aggregation": "seq-mean-token-sum",
            "advantage_scale": "none",
            **KL_IN_REWARD,
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
        "Chen et al. 2025, Pass@k Training, arXiv:2508.10751",
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
        columns=(*SCORES, "reward/*"),
        advantages=decoupled_rewards,
        defaults={"whiten_advantages": True, "loss_aggregation": "token-mean"},
    ),
    variant(
        "reinforce_pp",
        "Hu et al. 2025, REINFORCE++, arXiv:2501.03262",
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
        "reinforce_pp_baseline",
        "Hu et al. 2025, REINFORCE++, arXiv:2501.03262",
        defaults={
            "advantage_scale": "none",
            "whiten_advantages": True,
            "loss_aggregation": "token-mean",
        },
    ),
)
ALGORITHMS: Mapping[str, Algorithm] = {row.name: row for row in ROWS}

"""The algorithm table: each row has required columns, advantages, token loss and defaults.

A new algorithm takes one or two functions, a row and a test. A null in `AlgorithmConfig` takes the
row's default; a default that the row lacks comes from DEFAULT_SETTINGS.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from streamrl.algorithms import bindings as functions
from streamrl.algorithms.algorithm import Algorithm

DEFAULT_SETTINGS: Mapping[str, Any] = {
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
SCORE_COLUMNS = ("scores",)
FRACTION_LIMITS = (0.0, 1.0)
NON_NEGATIVE_LIMITS = (0.0, math.inf)
# Parameters with multiplicative updates stay 0 forever if they start at 0.
POSITIVE_LIMITS = (1e-6, math.inf)
GRPO = Algorithm(
    name="grpo",
    paper="Shao et al. 2024, DeepSeekMath, arXiv:2402.03300",
    columns=SCORE_COLUMNS,
    advantages=functions.group_relative,
    token_loss=functions.clipped_surrogate,
    # The paper's mean over rollouts of the mean over their tokens.
    defaults={"loss_aggregation": "seq-mean-token-mean", "advantage_scale": "std"},
    min_group_size=2,
)


def variant(name: str, paper: str, base: Algorithm = GRPO, **changes: Any) -> Algorithm:
    """Return a copy of algorithm `base` with changed fields; `defaults` extend those of `base`."""
    defaults = {**base.defaults, **changes.pop("defaults", {})}
    return dataclasses.replace(base, name=name, paper=paper, defaults=defaults, **changes)


ALGORITHM_SPECS = (
    Algorithm(
        name="ppo",
        paper="Schulman et al. 2017, PPO, arXiv:1707.06347",
        columns=(*SCORE_COLUMNS, "values"),
        advantages=functions.generalized_advantages,
        token_loss=functions.clipped_surrogate,
        derived={"returns": functions.returns},
        defaults={"whiten_advantages": True, **KL_IN_REWARD},
        params={"lam": 0.95},
        limits={"lam": FRACTION_LIMITS},
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
        token_loss=functions.sequence_clipped_surrogate,
        defaults={"clip_low": 3e-4, "clip_high": 4e-4},
    ),
    variant(
        "cispo",
        "MiniMax 2025, MiniMax-M1, arXiv:2506.13585",
        token_loss=functions.clipped_importance,
        # The paper bounds the weight from above alone: 1 - clip_low is 0.
        defaults={"clip_low": 1.0, "clip_high": 4.0, "loss_aggregation": "token-mean"},
    ),
    variant(
        "gmpo",
        "Zhao et al. 2025, GMPO, arXiv:2507.20673",
        token_loss=functions.geometric_mean,
        defaults={"clip_low": 0.4, "clip_high": 0.4},
    ),
    variant(
        "sapo",
        "Gao et al. 2025, SAPO, arXiv:2511.20347",
        token_loss=functions.soft_adaptive,
        params={"temperature_positive": 1.0, "temperature_negative": 1.05},
        limits={"temperature_positive": POSITIVE_LIMITS, "temperature_negative": POSITIVE_LIMITS},
    ),
    variant(
        "clip_cov",
        "Cui et al. 2025, The Entropy Mechanism, arXiv:2505.22617",
        columns=(*SCORE_COLUMNS, "generator_logprobs"),
        token_loss=functions.covariance_clip,
        derived={"chosen": functions.covariance_band},
        defaults={"loss_aggregation": "token-mean"},
        params={"covariance_fraction": 2e-4, "covariance_low": 1.0, "covariance_high": 5.0},
        limits={"covariance_fraction": FRACTION_LIMITS},
        scope="step",
    ),
    variant(
        "kl_cov",
        "Cui et al. 2025, The Entropy Mechanism, arXiv:2505.22617",
        columns=(*SCORE_COLUMNS, "generator_logprobs"),
        token_loss=functions.covariance_kl,
        derived={"chosen": functions.covariance_top},
        defaults={"loss_aggregation": "token-mean"},
        params={"covariance_fraction": 2e-4, "covariance_coef": 1.0},
        limits={"covariance_fraction": FRACTION_LIMITS, "covariance_coef": NON_NEGATIVE_LIMITS},
        scope="step",
    ),
    variant(
        "dppo_tv",
        "Qi et al. 2026, DPPO, arXiv:2602.04879",
        token_loss=functions.variation_masked,
        defaults={"loss_aggregation": "token-mean"},
        params={"ratio_cap": 20.0},
        limits={"ratio_cap": (1.0, math.inf)},
    ),
    variant(
        "dppo_kl",
        "Qi et al. 2026, DPPO, arXiv:2602.04879",
        token_loss=functions.divergence_masked,
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
        advantages=functions.leave_one_out,
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
        columns=(*SCORE_COLUMNS, "baseline_scores"),
        advantages=functions.greedy_baseline,
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
        columns=(*SCORE_COLUMNS, "costs", "values", "cost_values"),
        advantages=functions.constrained_advantages,
        token_loss=functions.clipped_surrogate,
        derived={"returns": functions.clipped_returns, "cost_returns": functions.cost_returns},
        dials={"lagrange": functions.cost_multiplier},
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
        advantages=functions.length_weighted_baseline,
        defaults={"advantage_scale": "none", "loss_aggregation": "token-mean"},
    ),
    variant(
        "pass_at_k",
        "Tang et al. 2025, Optimizing for Inference Time Objectives, arXiv:2503.19595",
        advantages=functions.best_of_group,
        defaults={"loss_aggregation": "token-mean"},
    ),
    variant(
        "gpg",
        "Chu et al. 2025, GPG, arXiv:2504.02546",
        advantages=functions.gpg,
        token_loss=functions.score_function,
        defaults={"advantage_scale": "none", "loss_aggregation": "token-mean"},
        scope="step",
    ),
    variant(
        "gdpo",
        "Liu et al. 2026, GDPO, arXiv:2601.05242",
        columns=(*SCORE_COLUMNS, "reward/*"),
        advantages=functions.decoupled_rewards,
        defaults={"whiten_advantages": True, "loss_aggregation": "token-mean"},
    ),
    variant(
        "reinforce_pp",
        "Hu et al. 2025, REINFORCE++, arXiv:2501.03262",
        advantages=functions.reward_to_go,
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
ALGORITHMS: Mapping[str, Algorithm] = {row.name: row for row in ALGORITHM_SPECS}

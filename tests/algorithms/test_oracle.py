"""Every row and option against the independent arithmetic of `oracle`: a whole step, value and
gradient.
"""

import random
from dataclasses import replace
from functools import partial

import pytest
import torch

from streamrl.algorithms import ALGORITHMS, AlgorithmConfig, AlgorithmSettings
from streamrl.algorithms.config import (
    ADVANTAGE_SCALES,
    KL_KINDS,
    LOSS_AGGREGATIONS,
    SINGLE_ROLLOUT_MODES,
)
from streamrl.algorithms.correction import (
    PROXIMAL_POLICIES,
    REJECTION_KINDS,
    REJECTION_LEVELS,
    WEIGHT_LEVELS,
    WEIGHT_MODES,
    CorrectionConfig,
)
from streamrl.algorithms.math.correction import high_entropy_limit, second_moment_limit
from streamrl.algorithms.objective import (
    correct_before_updates,
    derive_group_columns,
    policy_loss,
    shared_value_loss,
)
from streamrl.messages import FinishReason
from tests.algorithms import oracle
from tests.algorithms.steps import Step, make_settings, make_step

SEEDS = range(5)
VERSION = 7
SIZES = ((4, 3, 2, 1), (1, 5, 2), (2, 1, 6, 3), (3, 3), (1, 4, 5, 2))
REASONS = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.TURNS, FinishReason.TIMEOUT)
# Params with which few tokens reach every branch: no choice of Clip-Cov is random.
PARAMS = {
    "clip_cov": {"covariance_fraction": 1.0, "covariance_low": 0.05, "covariance_high": 0.8},
    "kl_cov": {"covariance_fraction": 0.3, "covariance_coef": 0.7},
    "safe_rlhf": {"token_clip": 0.6, "lagrange": 0.4},
    "dppo_tv": {"ratio_cap": 1.2},
    "dppo_kl": {"ratio_cap": 1.2},
    "gigpo": {"turn_weight": 0.6},
    "hgpo": {"history": 1, "weight_power": 2.0},
    "vapo": {"alpha": 0.4, "right_above": 0.1},
    "vespo": {"power_positive": 1.5, "decay_positive": 2.5},
    "dro": {"penalty_coef": 0.6},
    "distill": {"task_weight": 0.7},
    "reward_model": {"center_coef": 0.3},
    "gkd": {"task_weight": 0.7},
}
SAMPLED = [name for name, row in ALGORITHMS.items() if row.trains_on == "rollouts"]
CLIPS = {
    "gspo": (0.05, 0.08),
    "luspo": (0.05, 0.08),
    "dppo_tv": (0.03, 0.05),
    "dppo_kl": (0.01, 0.02),
}
TRAINER = CorrectionConfig(proximal="trainer")
BY_TIME = ("ppo", "vapo", "remax", "reinforce_pp", "safe_rlhf")


def configure(name: str = "grpo", **settings: object) -> AlgorithmConfig:
    """Return a row's config in which few random tokens reach every branch."""
    low, high = CLIPS.get(name, (None, None))
    share = settings.pop("top_entropy", None)
    shared = {} if share is None else {"top_entropy": share}
    settings["params"] = {**settings.pop("params", PARAMS.get(name, {})), **shared}  # type: ignore[dict-item]
    defaults = {"clip_low": low, "clip_high": high}
    return AlgorithmConfig(name=name, **{**defaults, **settings})  # type: ignore[arg-type]


def list_configs() -> dict[str, AlgorithmConfig]:
    """Return every row, with and without penalties and correction, and every option."""
    rows = {name: configure(name) for name in ALGORITHMS}
    decoupled = {
        f"{name} decoupled": configure(
            name,
            entropy_coef=0.03,
            mask_truncated=True,
            correction=replace(TRAINER, weights="token", weight_high=1.1, off_policy_threshold=0.1),
            # Penalties on the score have no effect on rewards that are normalized separately.
            **({} if name == "gdpo" else {"kl_coef": 0.2, "overlong_buffer": 4}),
        )
        for name in SAMPLED
    }
    bounded = replace(TRAINER, weights="token", weight_low=0.7, weight_high=1.4)
    corrections = {
        "interpolated": replace(bounded, proximal="interpolated"),
        "before the first update": replace(TRAINER, weights="token"),
        "M2PO": replace(TRAINER, second_moment_threshold=0.03),
        "OPSM": CorrectionConfig(off_policy_threshold=0.05),
        **{
            f"{level} {mode}": replace(bounded, weights=level, weight_mode=mode)
            for level in WEIGHT_LEVELS
            for mode in WEIGHT_MODES
        },
        **{
            f"reject {kind} {level}": replace(
                TRAINER,
                reject=kind,
                reject_level=level,
                reject_low=0.7 if kind == "k1" else None,
                reject_high=1.4 if kind == "k1" else 0.1,
            )
            for kind in REJECTION_KINDS
            for level in REJECTION_LEVELS
        },
    }
    in_reward = [kind for kind in KL_KINDS if not kind.endswith("+")]
    keep = SINGLE_ROLLOUT_MODES[1]
    return {
        **rows,
        **decoupled,
        **{name: configure("dapo", correction=c, kl_coef=0.1) for name, c in corrections.items()},
        **{mode: configure(loss_aggregation=mode, kl_coef=0.1) for mode in LOSS_AGGREGATIONS},
        **{f"scale {s}": configure(advantage_scale=s, kl_coef=0.1) for s in ADVANTAGE_SCALES},
        **{
            f"weighted {kind}": configure("dapo", kl_coef=0.3, kl_kind=f"{kind}*")
            for kind in ("k1", "k3")
        },
        **{f"loss {kind}": configure(kl_coef=0.3, kl_kind=kind) for kind in KL_KINDS},
        **{
            f"reward {kind} {name}": configure(name, kl_coef=0.3, kl_kind=kind, kl_in="reward")
            for kind in in_reward
            for name in ("grpo", "ppo", "safe_rlhf")
        },
        **{f"{name} keep": configure(name, single_rollout=keep) for name in ("grpo", "rloo")},
        **{f"{name} keep": configure(name, single_rollout=keep) for name in ("gpg", "opo")},
        **{f"{name} turns": configure(name, time_step="turn", gamma=0.8) for name in BY_TIME},
        **{f"{name} gamma": configure(name, gamma=0.8, kl_coef=0.2) for name in BY_TIME},
        **{
            f"{name} std": configure(name, advantage_scale="std") for name in ("grpo_turn", "gigpo")
        },
        "top entropy": configure("dapo", top_entropy=0.3, kl_coef=0.1, entropy_coef=0.03),
        "hgpo deep": configure("hgpo", params={"history": 4}, advantage_scale="none"),
        "hgpo gigpo": configure("hgpo", params={"history": 0}, advantage_scale="none"),
        "otb keep": configure("otb", single_rollout=keep, gamma=0.8, mask_truncated=True),
        **{
            f"gkd beta {beta} {len(options)}": configure(
                "gkd", params={"beta": beta, "task_weight": 0.5}, **options
            )
            for beta in (0.0, 0.3)
            for options in ({}, {"correction": bounded})
        },
        "dual clip": configure(dual_clip=1.1, clip_high=0.28),
        "whitened": configure(whiten_advantages=True, mask_truncated=True),
    }


def draw_config(name: str, seed: int) -> AlgorithmConfig:
    """Return a row's config with a random choice of every option that the row reads."""
    draw = random.Random(f"{name} {seed}")
    by_score = name not in oracle.ADVANTAGES
    in_reward = name not in ("gdpo", "distill", "gkd") and draw.random() < 0.3
    choices: dict[str, tuple[object, ...]] = {
        "loss_aggregation": LOSS_AGGREGATIONS,
        "mask_truncated": (False, True),
        "entropy_coef": (0.0, 0.05),
        # The mean of opo's is 0, so that rounding would give signs to whitened advantages of 0.
        "whiten_advantages": (False, name != "opo"),
        "kl_coef": (0.3,) if in_reward else (0.0, 0.3),
        "kl_in": ("reward",) if in_reward else ("loss",),
        "kl_kind": KL_KINDS[:4] if in_reward else (*KL_KINDS, "k3*"),
        "overlong_buffer": (0,) if name == "gdpo" else (0, 4),
        "top_entropy": (None, None, 0.4),
        "dual_clip": (None,)
        if {name} & (oracle.OF_TOKENS | oracle.OF_ROLLOUTS).keys()
        else (None, 1.3),
        "time_step": ("token", "turn") if name in BY_TIME else ("token",),
        "gamma": (None, 0.8),
        "single_rollout": SINGLE_ROLLOUT_MODES,
        "advantage_scale": ADVANTAGE_SCALES if by_score else ("std", "none"),
    }
    corrections: dict[str, tuple[object, ...]] = {
        "reject": ("none", "none", *REJECTION_KINDS),
        "reject_level": REJECTION_LEVELS,
        "off_policy_threshold": (None, 0.05),
        "second_moment_threshold": (None, None, 0.05),
    }
    picked = {key: draw.choice(values) for key, values in corrections.items()}
    if picked["reject"] != "none":
        picked |= {
            "reject_high": 0.05 if picked["reject"] == "binary_kl" else 1.4,
            "reject_low": 0.7 if picked["reject"] == "k1" else None,
        }
    correction = CorrectionConfig(**picked)  # type: ignore[arg-type]
    # The interpolated policy of the start is another than that of the update.
    looks_first = correction.corrects_before_updates or name == "otb"
    policies = PROXIMAL_POLICIES[:2] if looks_first else PROXIMAL_POLICIES
    picked["proximal"] = draw.choice(policies)
    if picked["proximal"] != "generator":
        bounds = draw.choice(({}, {"weight_low": 0.8, "weight_high": 1.2}, {"weight_high": None}))
        mode, level = draw.choice(WEIGHT_MODES), draw.choice(("none", *WEIGHT_LEVELS))
        picked |= {"weights": level, "weight_mode": mode, **bounds}
        is_early = picked["proximal"] == "trainer" and level != "none"
        picked["normalize_weights"] = is_early and draw.random() < 0.5
    correction = CorrectionConfig(**picked)  # type: ignore[arg-type]
    options = {key: draw.choice(values) for key, values in choices.items()}
    return configure(name, **options, correction=correction)


CONFIGS = list_configs()
EXACT = partial(torch.testing.assert_close, atol=1e-9, rtol=1e-9)
# Of finite differences.
NEAR = partial(torch.testing.assert_close, atol=2e-8, rtol=2e-8)


def make_random_step(seed: int) -> Step:
    """Return unequal groups, one of equal scores, with all ends of rollouts and NaN padding."""
    draw = torch.Generator().manual_seed(seed)
    step = make_step(seed, sizes=SIZES[seed % len(SIZES)])
    step.logprobs.clamp_(max=-0.02)
    mask, columns = step.columns["loss_mask"], dict(step.columns)
    rows = torch.arange(step.num_rows)
    ends = torch.tensor([reason.value for reason in REASONS])
    columns["finish_reason"] = ends[torch.randint(0, 4, (step.num_rows,), generator=draw)]
    columns["finish_reason"][::3] = FinishReason.STOP.value
    equal = step.group_ids == step.group_ids.max()
    columns["generator_logprobs"].clamp_(max=-0.02)
    # Equal but for rounding.
    scores = 0.5 + 1e-8 * rows[equal].double()
    columns["scores"][equal] = scores
    columns["token_scores"][equal] = 0.0
    columns["token_scores"][rows[equal], columns["lengths"][equal] - 1] = scores
    versions = torch.randint(VERSION - 4, VERSION + 1, mask.shape, generator=draw)
    columns["policy_version"] = torch.where(mask, versions, -1)
    noise = torch.randn(mask.shape, generator=draw, dtype=torch.float64)
    columns["proximal_logprobs"] = (columns["generator_logprobs"] + 0.25 * noise).clamp(max=-0.02)
    order = torch.randperm(step.num_rows, generator=draw).tolist()
    return replace(step, columns=columns).rows(order).with_nan_padding()


def read_rollouts(
    step: Step, settings: AlgorithmSettings, *, is_sampled_row: bool = True
) -> list[oracle.Rollout]:
    """Return the rollouts as the oracle's numbers."""
    rollouts = []
    for i in range(step.num_rows):
        row = {name: x[i].tolist() for name, x in step.columns.items()}
        per_token = {name for name, x in step.columns.items() if x.ndim > 1}
        logprobs, entropy = step.logprobs[i].tolist(), step.entropy[i].tolist()
        tokens = [
            oracle.Token({name: row[name][t] for name in per_token}, logprobs[t], entropy[t])
            for t, is_sampled in enumerate(row["loss_mask"])
            if is_sampled
        ]
        if not is_sampled_row:
            # Nobody has sampled the targets.
            tokens = [
                replace(t, columns={**t.columns, "generator_logprobs": t.logprob}) for t in tokens
            ]
        reason = FinishReason(row["finish_reason"])
        late = settings.has_episodes and reason is FinishReason.TIMEOUT
        cut_off = reason in (FinishReason.LENGTH, FinishReason.TURNS, FinishReason.TOKENS)
        masked = late or (settings.mask_truncated and cut_off)
        alone = {name: x for name, x in row.items() if name not in per_token}
        group = int(step.group_ids[i])
        rollouts.append(oracle.Rollout(alone, group, tokens, masked, late))
    return rollouts


def on_tokens(mask: torch.Tensor, numbers: list[float]) -> torch.Tensor:
    """Place the numbers of all trained tokens, 0 elsewhere: [B, T]."""
    result = torch.zeros(mask.shape, dtype=torch.float64)
    result[mask] = torch.tensor(numbers, dtype=torch.float64)
    return result


def correct_step(
    settings: AlgorithmSettings, batch: dict[str, torch.Tensor], entropy: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return masks and weights of a step's start, as the trainer's ranks make them."""
    proximal = batch["proximal_logprobs"]
    weights, near, (total, count) = correct_before_updates(
        settings, batch, proximal, version=VERSION
    )
    squares = (proximal - batch["generator_logprobs"]).square()
    threshold = settings.correction.second_moment_threshold
    if threshold is not None:
        near = near & (
            squares <= second_moment_limit(squares[batch["loss_mask"]], threshold=threshold)
        )
    corrected = {"near": near}
    if settings.top_entropy is not None:
        counted = entropy[batch["loss_mask"]]
        limit = high_entropy_limit(counted, share=settings.top_entropy)
        corrected["high_entropy"] = entropy >= limit
    if settings.correction.normalize_weights:
        corrected["policy_weights"] = weights * count / total if total else weights
    return corrected


@pytest.mark.parametrize("name", CONFIGS)
def test_steps_equal_independent_arithmetic(name: str) -> None:
    config = CONFIGS[name]
    for seed in SEEDS:
        step = make_random_step(seed)
        if name == "before the first update" or config.name not in SAMPLED:
            del step.columns["proximal_logprobs"]
        check_step(config, step)


@pytest.mark.parametrize("name", SAMPLED)
def test_random_combinations_of_options_equal_independent_arithmetic(name: str) -> None:
    for seed in range(4):
        check_step(draw_config(name, seed), make_random_step(seed))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_float32_is_as_near_as_its_rounding(name: str) -> None:
    config = configure(name)
    settings = replace(make_settings(config), has_episodes=True)
    for seed in SEEDS:
        step, results = make_random_step(seed), []
        for dtype in (torch.float32, torch.float64):
            floats = {k: x for k, x in step.columns.items() if x.is_floating_point()}
            batch = step.columns | {k: x.float().to(dtype) for k, x in floats.items()}
            batch |= derive_group_columns(config.spec, settings, batch, step.group_ids)
            leaf = step.logprobs.float().to(dtype).requires_grad_()
            entropy = step.entropy.to(dtype)
            loss, _ = policy_loss(config.spec, settings, batch, logprobs=leaf, entropy=entropy)
            loss.backward()
            assert leaf.grad is not None and batch["advantages"].dtype == dtype
            gradient = torch.where(batch["loss_mask"], leaf.grad, 0.0)
            results.append([x.double() for x in (batch["advantages"], loss.detach(), gradient)])
        for single, double in zip(*results, strict=True):
            torch.testing.assert_close(single, double, atol=2e-5, rtol=2e-5)


def check_step(config: AlgorithmConfig, step: Step) -> None:
    """Assert derived columns, loss, gradients and sums of a step, and the value loss."""
    settings = replace(make_settings(config), has_episodes=True)
    row, columns = config.spec, dict(step.columns)
    rollouts = read_rollouts(step, settings, is_sampled_row=config.name in SAMPLED)
    derived = derive_group_columns(row, settings, columns, step.group_ids)
    mask = derived["loss_mask"]
    if settings.corrects_before_updates:
        corrected = correct_step(settings, {**columns, **derived}, step.entropy)
        near = corrected["near"]
        oracle.mask_far_tokens(settings, rollouts, VERSION)
        expected = [t.near for r in rollouts for t in r.trained]
        assert near[mask].tolist() == expected
        columns["rejected"] = mask.any(-1) & ~near.any(-1)
        derived = derive_group_columns(row, settings, columns, step.group_ids) | corrected
    oracle.credit(config.name, settings, rollouts)
    assert derived["included"].tolist() == [not r.is_excluded for r in rollouts]
    tokens = [t for r in rollouts for t in r.trained]
    for column in ("advantages", "returns", "cost_returns"):
        if column in derived:
            values = derived[column]
            values = values if values.ndim > 1 else values[:, None].expand(mask.shape)
            numbers = [getattr(t, column.replace("advantages", "advantage")) for t in tokens]
            EXACT(values[mask], torch.tensor(numbers, dtype=torch.float64))
    if "chosen" in derived:
        assert derived["chosen"][mask].tolist() == [t.chosen for t in tokens]

    leaves = (step.logprobs, step.entropy, step.columns["word_logprobs"])
    logprobs, entropy, words = (x.clone().requires_grad_() for x in leaves)
    batch = {**columns, **derived, "word_logprobs": words}
    loss, sums = policy_loss(
        row, settings, batch, logprobs=logprobs, entropy=entropy, version=VERSION
    )
    result = oracle.train(config.name, settings, rollouts, VERSION)
    found = {key: value.item() for key, value in sums.items()}
    assert {key: found[key] for key in result.sums} == pytest.approx(result.sums, abs=1e-9)
    divisor = settings.compute_loss_denominator(found)
    if not result.sums["num_kept"]:
        assert (divisor, loss.item()) == (0, 0)
        return
    (loss / divisor).backward()
    assert loss.item() / divisor == pytest.approx(result.loss, rel=1e-9, abs=1e-9)
    for leaf, gradient in ((logprobs, result.gradient), (entropy, result.entropy_gradient)):
        actual = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        NEAR(torch.where(mask, actual, 0.0), on_tokens(mask, gradient))
    if config.name == "gkd":
        assert words.grad is not None
        by_word = oracle.differentiate_words(config.name, settings, rollouts, VERSION)
        NEAR(words.grad[mask], torch.tensor(by_word, dtype=torch.float64))
    if "returns" in derived:
        check_value_loss(settings, batch, rollouts, divisor)


def check_value_loss(
    settings: AlgorithmSettings,
    batch: dict[str, torch.Tensor],
    rollouts: list[oracle.Rollout],
    divisor: float,
) -> None:
    mask = batch["loss_mask"]
    noise = torch.randn(mask.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    values = (batch["values"] + noise).requires_grad_()
    now = [values[i][mask[i]].tolist() for i in range(len(mask))]
    for clip in (None, 0.4):
        values.grad = None
        (shared_value_loss(settings, batch, values, clip=clip)[0] / divisor).backward()
        assert values.grad is not None
        expected, gradient = oracle.lose_value(settings, rollouts, now, clip)
        loss = shared_value_loss(settings, batch, values, clip=clip)[0].item() / divisor
        assert loss == pytest.approx(expected, rel=1e-9)
        NEAR(torch.where(mask, values.grad, 0.0), on_tokens(mask, gradient))

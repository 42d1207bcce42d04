"""Policy losses besides PPO's, and the critic's; test_every_loss.py has common properties."""

import math
from collections.abc import Callable
from functools import partial
from statistics import mean
from typing import Any

import pytest
import torch
from torch import Tensor

from streamrl.algorithms.math import losses
from streamrl.algorithms.math.tokens import apply_mask
from tests.algorithms import ragged
from tests.algorithms.aggregate import aggregate_loss

CLIP: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.28}


def logs(*values: float) -> torch.Tensor:
    """Return a row of logarithms, float64, with gradient."""
    return torch.tensor([values], dtype=torch.float64).log().requires_grad_()


def row(*values: float) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float64)


def check(loss: torch.Tensor, by: torch.Tensor, expected: list[float], slopes: list[float]) -> None:
    """Assert the losses of a row, and the gradient of their sum."""
    loss.sum().backward()
    torch.testing.assert_close(loss.detach(), row(*expected))
    torch.testing.assert_close(by.grad, row(*slopes))


ALL = torch.tensor([[True, True]])


CHOSEN = torch.tensor([[True, False, False]])
WIDE, GMPO_CLIP = {"clip_low": 0.9, "clip_high": 9.0}, {"clip_low": 0.4, "clip_high": 0.4}
BOUNDS = ("low", "high", "cap")
TEMPERATURES: dict[str, Any] = {"temperature_positive": 2.0, "temperature_negative": 4.0}
BEHAVIOR = torch.tensor([[0.25, 0.5, 0.5 / 1.1]], dtype=torch.float64).log()
LOG_HALF, S1, S2 = math.log(0.5), 1 / (1 + math.exp(-1)), 1 / (1 + math.exp(-2))


def gspo(x: Tensor, a: Tensor, clip: dict[str, float] = CLIP) -> Tensor:
    return losses.sequence_clipped_surrogate_loss(x, a, ALL, **clip)


def gmpo(x: Tensor, a: Tensor) -> Tensor:
    return losses.geometric_mean_loss(x, a, ALL, **GMPO_CLIP)


def cispo(x: Tensor, a: Tensor) -> Tensor:
    return losses.clipped_importance_loss(x - BEHAVIOR, a, logprobs=x, **CLIP)


KL_COV = partial(losses.covariance_kl_loss, chosen=CHOSEN, coef=0.7)
E10, E25 = math.exp(0.1), math.exp(0.25)
# Loss, ratios (probabilities for cispo and reinforce), advantages; expected losses and gradient.
BY_HAND: list[tuple[Callable[..., Tensor], Any, Any, list[float], list[float]]] = [
    # The geometric mean of 4 and 1 is 2, of 1/4 and 1 1/2; a token's gradient is its own.
    (partial(gspo, clip=WIDE), (4, 1), (1, 3), [-2, -6], [-2, -6]),
    (gspo, (4, 1), (1, 1), [-1.28, -1.28], [0, 0]),
    (gspo, (4, 1), (-1, -1), [2, 2], [2, 2]),
    (gspo, (0.25, 1), (-1, -1), [0.8, 0.8], [0, 0]),
    # The weights 2, 1/2 and 1.1 are clamped to [0.8, 1.28] and have no gradient.
    (
        *(cispo, (0.5, 0.25, 0.5), (2, 3, -1)),
        [-2.56 * LOG_HALF, -4.8 * LOG_HALF, 1.1 * LOG_HALF],
        [-2.56, -2.4, 1.1],
    ),
    # Log-ratios 0.1 and 0.6 clipped to 0.4: a mean of 0.25; clipped tokens have no gradient.
    (gmpo, (E10, math.exp(0.6)), (2, 2), [-2 * E25, -2 * E25], [-2 * E25, 0]),
    # Log-ratios 0.6 and -0.6 clipped to -0.4: a mean of 0.1.
    (gmpo, (math.exp(0.6), math.exp(-0.6)), (-1, -1), [E10, E10], [E10, 0]),
    # r = 1: half of 4 / tau. r = 2, tau = 1: 4 sigmoid(1), with a gradient of 4 s (1 - s) r.
    (
        *(losses.soft_adaptive_loss, (1, 1, 2), (3, -3, 1)),
        [-6, 6 / 1.05, -4 * S1],
        [-3, 3, -4 * S1 * (1 - S1) * 2],
    ),
    (
        *(partial(losses.soft_adaptive_loss, **TEMPERATURES), (1.5, 1.5), (1, -1)),
        [-S1 * 2, S2],
        [-6 * S1 * (1 - S1), 6 * S2 * (1 - S2)],
    ),
    (
        *(partial(losses.covariance_clip_loss, chosen=CHOSEN, **CLIP), (1.1, 1.1, 2), (2, 2, 2)),
        [0, -2.2, -2.56],
        [0, -2.2, 0],
    ),
    (KL_COV, (2, 2, 2), (3, 3, -1), [-6 - 0.7 * LOG_HALF, -6, 2], [-6 + 0.7, -6, 2]),
    (KL_COV, (0.5,) * 3, (3, 3, -1), [-1.5 - 0.7 * LOG_HALF, -1.5, 0.5], [-1.5 - 0.7, -1.5, 0.5]),
    (losses.score_function_loss, (0.5, 0.25), (2, -1), [-2 * LOG_HALF, 2 * LOG_HALF], [-2, 1]),
]


@pytest.mark.parametrize(("loss", "ratios", "advantages", "expected", "slopes"), BY_HAND)
def test_policy_losses_and_gradients_by_hand(loss, ratios, advantages, expected, slopes):
    x = logs(*ratios)
    check(loss(x, row(*advantages)), x, expected, slopes)


@pytest.mark.parametrize(("x", "ratio"), [(12.0, math.exp(12)), (23.0, 4 * math.exp(20))])
def test_a_large_sequence_ratio_keeps_its_gradient(x, ratio):
    log_ratio = row(x, x).requires_grad_()
    loss = losses.sequence_clipped_surrogate_loss(log_ratio, row(-1, -1), ALL, **CLIP)
    check(loss, log_ratio, [ratio] * 2, [math.exp(min(x, 20))] * 2)


def test_gspo_with_seq_mean_token_mean_has_the_papers_gradient():
    batch = ragged.make_batch(3)
    mask, weights = batch["loss_mask"], batch["scores"][:, None]
    gradients = []
    for is_paper in (False, True):
        leaf = batch["log_ratio"].clone().requires_grad_()
        log_ratio = apply_mask(leaf, mask)
        if is_paper:  # The paper: -A s of each rollout, s = exp(mean of its log-ratios).
            lengths = mask.sum(-1, keepdim=True).clamp(min=1)
            loss = -(weights * (log_ratio.sum(-1, keepdim=True) / lengths).exp())
            loss = loss[mask.any(-1)].mean()
        else:
            wide = {"clip_low": 1.0, "clip_high": 99.0}
            token_losses = losses.sequence_clipped_surrogate_loss(log_ratio, weights, mask, **wide)
            loss = aggregate_loss(token_losses, mask, mode="seq-mean-token-mean")
        loss.backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(gradients[0], gradients[1])


# Log-probabilities -1, -2, -3 and advantages 3, 0, 0 where it counts: means -2 and 1.
COV_LOGPROBS = torch.tensor([[-1.0, math.nan], [-2.0, -3.0]])
COV_ADVANTAGES = torch.tensor([[3.0, math.nan], [0.0, 0.0]])
COV_MASK = torch.tensor([[True, False], [True, True]])
COV = COV_LOGPROBS, COV_ADVANTAGES, COV_MASK


def test_covariances_by_hand():
    # (3 - 1)(-1 + 2), (0 - 1)(-2 + 2), (0 - 1)(-3 + 2)
    assert losses.token_covariances(*COV).tolist() == [[2.0, 0.0], [0.0, 1.0]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_covariances_equal_the_reference_in_python_loops(dtype):
    for seed in range(1, 9):
        batch = ragged.make_batch(seed, dtype)
        rows = ragged.list_counted_rows(batch)
        mask, names = batch["loss_mask"], ("advantages", "logprobs")
        mean_a, mean_x = (mean([x for row in rows for x in row[name]]) for name in names)
        tokens = [zip(row["advantages"], row["logprobs"], strict=True) for row in rows]
        expected = [[(a - mean_a) * (x - mean_x) for a, x in row] for row in tokens]
        result = losses.token_covariances(batch["logprobs"], batch["advantages"], mask)
        ragged.assert_equals_rows(result, expected, mask, torch.float64)


OF_COVARIANCES: dict[str, Callable[..., Tensor]] = {
    "covariances": losses.token_covariances,
    "top": partial(losses.covariance_top_mask, fraction=0.3),
    "band": partial(losses.covariance_band_mask, low=-0.1, high=0.3, fraction=1.0),
}


def test_clip_cov_chooses_a_fraction_of_all_tokens_from_the_band():
    def chosen(low: float, high: float, fraction: float) -> list[list[bool]]:
        return losses.covariance_band_mask(*COV, low=low, high=high, fraction=fraction).tolist()

    assert chosen(0.5, 3.0, 1.0) == [[True, False], [False, True]]
    assert chosen(0.5, 3.0, 0.67) == [[True, False], [False, True]]  # 2 of 3
    assert chosen(1.0, 3.0, 1.0) == [[True, False], [False, False]]  # bounds are outside
    assert chosen(0.5, 2.0, 1.0) == [[False, False], [False, True]]
    assert chosen(-0.5, 0.5, 1.0) == [[False, False], [True, False]]  # padding never
    assert chosen(3.0, 9.0, 1.0) == [[False, False], [False, False]]
    for fraction in (0.66, 0.0):  # 1 of 3, and at least 1
        assert sum(map(sum, chosen(0.5, 3.0, fraction))) == 1


def test_clip_cov_choices_follow_from_the_draws():
    def drawn(seed: int) -> list[list[bool]]:
        draws = torch.rand(2, 2, generator=torch.Generator().manual_seed(seed))
        return losses.covariance_band_mask(
            *COV, low=0.5, high=3.0, fraction=0.4, draws=draws
        ).tolist()

    assert [drawn(seed) for seed in range(9)] == [drawn(seed) for seed in range(9)]
    assert {str(drawn(seed)) for seed in range(9)} == {
        "[[True, False], [False, False]]",
        "[[False, False], [False, True]]",
    }


def test_kl_cov_chooses_the_largest_covariances():
    assert losses.covariance_top_mask(*COV, fraction=0.67).tolist() == [
        [True, False],
        [False, True],
    ]
    for fraction in (0.0, 0.34, 0.66):
        chosen = losses.covariance_top_mask(*COV, fraction=fraction)
        assert chosen.tolist() == [[True, False], [False, False]]
    assert losses.covariance_top_mask(*COV, fraction=1.0).tolist() == COV_MASK.tolist()


@pytest.mark.parametrize(
    ("kind", "distance"),
    # Between 1/4 and 1/2: KL(q || p) of q = 1/2 or of q = 1/4.
    [("tv", (0.25, 0.25)), ("kl", (0.1438, 0.1308))],
)
def test_dppo_masks_tokens_that_would_move_further_beyond_the_bound(kind, distance):
    # A good token that rose from 1/4 to 1/2, a bad token that fell back; the opposite of each.
    for p, q, far in ((0.5, 0.25, distance[1]), (0.25, 0.5, distance[0])):
        ratio, away = p / q, 1.0 if p > q else -1.0
        for advantage, bound, stays in (
            (away, far + 0.001, True),
            (away, far - 0.001, False),
            (-away, 0.0, True),
        ):
            logprobs = logs(p)
            limits = {"low": 9.0, "high": 9.0} | {"high" if advantage > 0 else "low": bound}
            options = {"logprobs": logprobs, "kind": kind, "cap": 20.0, **limits}
            loss = losses.divergence_masked_loss(logprobs - math.log(q), row(advantage), **options)
            slope = -ratio * advantage if stays else 0.0
            check(loss, logprobs, [slope * math.log(p)], [slope])


@pytest.mark.parametrize("kind", ["tv", "kl"])
def test_dppo_caps_the_weight(kind):
    logprobs, bounds = logs(0.5, 0.25), {"low": 1.0, "high": 1.0, "cap": 1.5}
    log_ratio = logprobs - logs(0.25, 0.25).detach()
    loss = losses.divergence_masked_loss(
        log_ratio, row(1, 1), logprobs=logprobs, kind=kind, **bounds
    )
    check(loss, logprobs, [-1.5 * math.log(0.5), -math.log(0.25)], [-1.5, -1])


@pytest.mark.parametrize(
    ("p", "q", "advantage", "divergence"),
    [
        (0.5, 1.0, -1.0, math.log(2)),
        (1.0, 0.5, 1.0, 0.5 * math.log(0.5) + 0.5 * math.log(0.5 / 1e-8)),
    ],
)
def test_dppo_divergence_is_finite_for_tokens_of_probability_1(p, q, advantage, divergence):
    for bound, stays in ((divergence + 0.01, True), (divergence - 0.01, False)):
        logprobs, bounds = logs(p), {"low": bound, "high": bound, "cap": 20.0, "kind": "kl"}
        log_ratio = logprobs - math.log(q)
        loss = losses.divergence_masked_loss(log_ratio, row(advantage), logprobs=logprobs, **bounds)
        slope = -p / q * advantage if stays else 0.0
        check(loss, logprobs, [slope * math.log(p)], [slope])

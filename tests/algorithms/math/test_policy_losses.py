"""Policy losses besides PPO's, and the critic's; test_every_loss.py has common properties."""

import math
from typing import Any

import pytest
import torch

from streamrl.algorithms.math import losses

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


@pytest.mark.parametrize(("x", "ratio"), [(12.0, math.exp(12)), (23.0, 4 * math.exp(20))])
def test_a_large_sequence_ratio_keeps_its_gradient(x, ratio):
    log_ratio = row(x, x).requires_grad_()
    loss = losses.sequence_clipped_surrogate_loss(log_ratio, row(-1, -1), ALL, **CLIP)
    check(loss, log_ratio, [ratio] * 2, [math.exp(min(x, 20))] * 2)


def test_a_rollout_of_twice_the_probability_has_a_soft_weight():
    # w = 4 / 2 = 2: 4 exp(-3) for the positive advantage, 8 exp(-2) for the negative one.
    logprobs = row(-0.5, -1.5).requires_grad_()
    log_ratio = logprobs - (logprobs.detach() - row(4, 0.5).log())
    options = {"power_positive": 2, "decay_positive": 3, "power_negative": 3, "decay_negative": 2}
    loss = losses.sequence_gamma_loss(log_ratio, row(1, -2), ALL, logprobs=logprobs, **options)
    up, down = 4 * math.exp(-3), 8 * math.exp(-2)
    check(loss, logprobs, [0.5 * up, -3 * down], [-up, 2 * down])


@pytest.mark.parametrize("far", [2000.0, -2000.0])
def test_a_rollout_far_off_has_no_weight(far):
    logprobs = row(-1, -1).requires_grad_()
    log_ratio = logprobs + far
    options = {"power_positive": 2, "decay_positive": 3, "power_negative": 3, "decay_negative": 2}
    loss = losses.sequence_gamma_loss(log_ratio, row(1, -1), ALL, logprobs=logprobs, **options)
    check(loss, logprobs, [0, 0], [0, 0])


def test_a_quadratic_penalty_pulls_back_to_the_older_policy():
    logprobs = row(-1, -2).requires_grad_()
    log_ratio = logprobs - row(-1.5, -1)
    loss = losses.quadratic_penalty_loss(log_ratio, row(2, 0), logprobs=logprobs, coef=0.4)
    check(loss, logprobs, [2 + 0.2 * 0.25, 0.2], [-2 + 0.4 * 0.5, -0.4])


# Log-probabilities -1, -2, -3 and advantages 3, 0, 0 where it counts: means -2 and 1.
COV_LOGPROBS = torch.tensor([[-1.0, math.nan], [-2.0, -3.0]])
COV_ADVANTAGES = torch.tensor([[3.0, math.nan], [0.0, 0.0]])
COV_MASK = torch.tensor([[True, False], [True, True]])
COV = COV_LOGPROBS, COV_ADVANTAGES, COV_MASK


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

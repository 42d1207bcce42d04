"""PPO's loss, entropy, and the aggregation of token losses."""

import math

import pytest
import torch

from streamrl.algorithms.math.losses import (
    clipped_surrogate_loss,
    entropy_from_logits,
    outside_clip_mask,
)
from streamrl.algorithms.math.tokens import probability_ratio
from tests.algorithms import ragged

CLIP = {"clip_low": 0.2, "clip_high": 0.28}


def test_the_clip_mask_marks_tokens_without_gradient():
    log_ratio = torch.tensor([[0.5, -0.5, 0.1, 0.5, -0.5]], requires_grad=True)
    advantages = torch.tensor([[1.0, 1.0, 1.0, -1.0, -1.0]])
    clipped_surrogate_loss(log_ratio, advantages, **CLIP).sum().backward()
    stopped = outside_clip_mask(log_ratio, advantages, **CLIP)
    assert stopped.tolist() == [[True, False, False, False, True]]
    assert torch.equal(ragged.gradient(log_ratio) == 0, stopped)


def test_clip_mask_by_hand_with_inclusive_bounds():
    log_ratio = torch.tensor([1.5, 0.75, 1.6, 0.7, 1.6, 0.7, 1.6, 0.7]).log()
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, -1.0, 1.0, 0.0, 0.0])
    high, low, *_ = probability_ratio(log_ratio).tolist()  # 1.5 and 0.75, as rounded
    bounds = {"clip_low": 1 - low, "clip_high": high - 1}
    stopped = outside_clip_mask(log_ratio, advantages, **bounds)
    assert stopped.tolist() == [False, False, True, True, False, False, False, False]


def test_probability_ratio_by_hand_and_for_large_log_ratios():
    log_ratio = torch.tensor([math.log(3), 0.0, -math.log(4), 30, -30], dtype=torch.float64)
    expected = [3, 1, 0.25, 11 * math.exp(20), math.exp(-30)]
    slopes = [3, 1, 0.25, math.exp(20), math.exp(-30)]  # beyond 20 the tangent
    ratio = probability_ratio(log_ratio.requires_grad_())
    ratio.sum().backward()
    assert ratio.tolist() == pytest.approx(expected, rel=1e-9)
    assert ragged.gradient(log_ratio).tolist() == pytest.approx(slopes, rel=1e-9)
    assert probability_ratio(torch.tensor([1e4, -1e4])).square().isfinite().all()


def test_entropy_by_hand():
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.25], [1 / 3, 1 / 3, 1 / 3]]))
    expected = torch.tensor([1.5 * math.log(2), math.log(3)])
    torch.testing.assert_close(entropy_from_logits(logits + 7.0), expected)


def test_forbidden_tokens_do_not_affect_entropy_or_gradient():
    logits = torch.tensor([0.0, 1.0, -torch.inf], dtype=torch.float64, requires_grad=True)
    without = logits.detach()[:2].clone().requires_grad_()
    torch.testing.assert_close(entropy_from_logits(logits), entropy_from_logits(without))
    (gradient,) = torch.autograd.grad(entropy_from_logits(logits), logits)
    (expected,) = torch.autograd.grad(entropy_from_logits(without), without)
    torch.testing.assert_close(gradient, torch.cat([expected, torch.zeros(1)]))

"""The critic's loss and metrics."""

import pytest
import torch

from streamrl.algorithms.math.losses import critic_loss
from streamrl.algorithms.math.training_metrics import summarize_critic
from streamrl.dataflow import CRITIC

MASK = torch.tensor([[False, True, True, True]])
BATCH = {
    "loss_mask": MASK,
    "returns": torch.tensor([[9.0, 1.0, 2.0, 0.0]]),
    "values": torch.tensor([[9.0, 0.0, 1.0, 0.0]]),
}
VALUES = torch.tensor([[9.0, 0.4, 2.0, -0.5]])


def sums_of(loss_and_sums):
    return {name: value.item() for name, value in loss_and_sums[1].items()}


def test_value_loss_by_hand_takes_the_larger_error_of_value_and_clipped_value():
    # (0.4 - 1)^2, (2 - 2)^2 and (-0.5 - 0)^2, halved.
    assert critic_loss(BATCH, VALUES, clip=None)[0].item() == pytest.approx((0.36 + 0 + 0.25) / 2)
    # Clamped within 0.2 of 0, 1 and 0 the values are 0.2, 1.2 and -0.2: errors 0.64, 0.64, 0.04.
    loss, sums = critic_loss(BATCH, VALUES, clip=0.2)
    assert loss.item() == pytest.approx((0.64 + 0.64 + 0.25) / 2)
    assert sums["value_clipped_sum"] == 3


def test_critic_metrics_by_hand():
    metrics = summarize_critic(sums_of(critic_loss(BATCH, VALUES, clip=0.45)), CRITIC)
    # Errors 0.6, 0 and 0.5; returns 1, 2 and 0 have a variance of 2/3.
    errors = torch.tensor([0.6, 0.0, 0.5])
    assert metrics["critic/value_mean"] == pytest.approx(1.9 / 3)
    assert metrics["critic/clip_frac"] == pytest.approx(2 / 3)
    expected = 1 - errors.var(correction=0).item() / (2 / 3)
    assert metrics["critic/explained_variance"] == pytest.approx(expected, rel=1e-5)
    assert summarize_critic({}, CRITIC) == {}

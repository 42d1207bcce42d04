"""KL estimators, and the adaptive coefficient."""

import math

import pytest
import torch

from streamrl.algorithms.config import KL_KINDS
from streamrl.algorithms.math.tokens import kl_estimate
from tests.algorithms.ragged import gradient


@pytest.mark.parametrize(
    ("x", "value", "slope"),
    [
        (-2.7, math.exp(2.7) - 3.7, 1 - math.exp(2.7)),
        (-19.0, math.exp(19) - 20, 1 - math.exp(19)),
        (-25.0, 6 * math.exp(20) - 26, 1 - math.exp(20)),  # the tangent at -20
        (1000.0, 999.0, 1.0),
        (1e-4, 5e-9, 1e-4),  # near the reference, where exp(-x) - 1 would cancel
    ],
)
def test_k3_and_its_gradient_follow_the_formula_to_20_and_its_tangent_beyond(x, value, slope):
    logprobs = torch.tensor(x, requires_grad=True)
    estimate = kl_estimate(logprobs, torch.tensor(0.0), "k3")
    estimate.backward()
    assert estimate.item() == pytest.approx(value, rel=1e-3 if abs(x) < 1 else 1e-6)
    assert gradient(logprobs).item() == pytest.approx(slope, rel=1e-3 if abs(x) < 1 else 1e-6)


@pytest.mark.parametrize("kind", KL_KINDS)
def test_kl_estimates_and_gradients_are_finite_for_distant_policies(kind):
    logprobs = torch.tensor([-1e6, 0.0], requires_grad=True)
    estimates = kl_estimate(logprobs, torch.tensor([0.0, -1e6]), kind)
    estimates.sum().backward()
    assert estimates.isfinite().all()
    assert gradient(logprobs).isfinite().all()

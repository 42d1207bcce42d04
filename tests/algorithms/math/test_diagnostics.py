"""Additive sums of the divergence between policies."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streamrl.algorithms.math.correction import divergence_sums
from streamrl.algorithms.math.training_metrics import (
    MIN_LOG_RATIO,
    summarize_divergence,
)

NAN = math.nan


def sums_of(batch):
    sums = divergence_sums(batch["log_ratio"], batch["loss_mask"])
    return {name: value.item() for name, value in sums.items()}


def summary(log_ratio: list[list[float]], mask: list[list[bool]]) -> dict[str, float]:
    x, counts = torch.tensor(log_ratio, dtype=torch.float64), torch.tensor(mask)
    return summarize_divergence(sums_of({"log_ratio": x, "loss_mask": counts}), int(counts.sum()))


def test_metrics_by_hand():
    # Ratios 2 and 2 in one rollout, 1 in another: sum 5, sum of squares 9; per sequence 4 and 1.
    two = math.log(2)
    x = [[two, NAN, two], [NAN, 0.0, NAN], [NAN] * 3]
    metrics = summary(x, [[True, False, True], [False, True, False], [False] * 3])
    assert metrics == {
        "policy/ratio_mean": pytest.approx(5 / 3),
        "policy/ess": pytest.approx(25 / (3 * 9)),
        "correction/kl": pytest.approx(-2 * two / 3),
        "correction/chi2_token": pytest.approx(9 / 3 - 1),
        "correction/chi2_sequence": pytest.approx((16 + 1) / 2 - 1),
        "correction/ratio_p01": 1.0,
        "correction/ratio_p50": pytest.approx(2, rel=0.1),
        "correction/ratio_p99": pytest.approx(2, rel=0.1),
    }


def test_a_ratio_that_is_no_number_is_counted_and_its_means_are_none_either():
    metrics = summary([[NAN, 0.0]], [[True, True]])
    assert math.isnan(metrics["correction/kl"]) and metrics["correction/ratio_p01"] == 1.0


@given(seed=st.integers(0, 9999), spread=st.floats(-4, 1), shift=st.floats(-1, 1))
def test_quantiles_are_accurate_to_half_a_bin(seed, spread, shift):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(20, 15, generator=draw).double() * 10**spread + shift
    sums = sums_of({"log_ratio": x.clamp(-20, 20), "loss_mask": torch.ones_like(x).bool()})
    metrics = summarize_divergence(sums, 300)
    true = x.clamp(-20, 20).flatten().sort().values.tolist()
    # The rank of a quantile among 300 values; half a bin is an eighth of the value.
    for name, rank in (("p01", 3), ("p50", 150), ("p99", 297)):
        exact = true[rank - 1]
        error = abs(math.log(metrics[f"correction/ratio_{name}"]) - exact)
        assert error <= 0.14 * (abs(exact) + MIN_LOG_RATIO)

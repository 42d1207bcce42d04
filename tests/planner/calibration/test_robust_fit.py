"""Robust fits with outliers, and with measurements of a single size."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.planner.calibration.fit_timings import fit_line


@given(st.floats(1e-3, 1.0), st.floats(1e-6, 1e-3), st.integers(0, 1000))
def test_an_exact_line_is_recovered(batch_s: float, token_s: float, seed: int):
    tokens = np.random.default_rng(seed).uniform(batch_s / token_s, 5 * batch_s / token_s, 30)
    fit = fit_line([(1.0, t) for t in tokens], [batch_s + token_s * t for t in tokens])
    assert [estimate.value for estimate in fit] == pytest.approx([batch_s, token_s], rel=0.02)
    assert fit[0].residual < 1e-3


def test_outliers_do_not_change_the_fit():
    tokens = [100.0 * (i + 1) for i in range(20)]
    seconds = [0.05 + 1e-4 * t for t in tokens]
    seconds[3] *= 6
    seconds[11] *= 4
    fit = fit_line([(1.0, t) for t in tokens], seconds)
    assert [estimate.value for estimate in fit] == pytest.approx([0.05, 1e-4], rel=0.1)


def test_inseparable_parts_are_equal_with_a_large_error():
    fit = fit_line([(1.0, 500.0)] * 8, [0.1, 0.11, 0.1, 0.09, 0.1, 0.1, 0.11, 0.09])
    batch_s, token_s = (estimate.value for estimate in fit)
    assert batch_s + 500 * token_s == pytest.approx(0.1, rel=0.02)
    assert batch_s == pytest.approx(0.05, rel=0.1)


def test_coefficients_are_nonnegative():
    fit = fit_line([(1.0, float(t)) for t in range(1, 9)], [1.0 - 0.1 * t for t in range(1, 9)])
    assert min(estimate.value for estimate in fit) >= 0

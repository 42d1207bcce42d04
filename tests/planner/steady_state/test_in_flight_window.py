"""Delays between steps in flight."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.planner.steady_state.stragglers import (
    compute_mean_time_in_flight,
)

LENGTHS = np.exp(np.random.default_rng(1).normal(6.0, 0.8, 4096))


@given(st.integers(1, 6))
def test_equal_steps_do_not_delay_each_other(window: int):
    assert compute_mean_time_in_flight(np.full(3, 7.0), window=window) == pytest.approx(7.0)


def test_more_steps_in_flight_are_longer_in_flight():
    times = [compute_mean_time_in_flight(LENGTHS, window=window) for window in (1, 2, 4)]
    assert times[0] == pytest.approx(LENGTHS.mean(), rel=0.05)
    assert times == sorted(times)


def test_two_steps_in_flight_delay_each_other():
    # Steps that take 1 or 9, by hand: a step starts when the step before the previous one ends, and
    # ends in order.
    durations = np.random.default_rng(3).choice([1.0, 9.0], 20_000)
    ends = [0.0, 0.0]
    for duration in durations.tolist():
        ends.append(max(ends[-1], ends[-2] + duration))
    expected = 2 * ends[-1] / len(durations)
    assert compute_mean_time_in_flight(np.array([1.0, 9.0]), window=2) == pytest.approx(
        expected, rel=0.05
    )

"""Delays between steps in flight."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.planner.steady_state.stragglers import (
    compute_mean_time_in_flight,
)

LENGTHS = np.exp(np.random.default_rng(1).normal(6.0, 0.8, 4096))


@given(st.integers(1, 6), st.integers(1, 40))
def test_equal_steps_do_not_delay_each_other(window: int, groups: int):
    time_in_flight = compute_mean_time_in_flight(np.full(3, 7.0), window=window, groups=groups)
    assert time_in_flight == pytest.approx(7.0)


def test_single_step_takes_its_longest_group():
    expected = np.random.default_rng(2).choice(LENGTHS, (4000, 16)).max(axis=1).mean()
    assert compute_mean_time_in_flight(LENGTHS, window=1, groups=16) == pytest.approx(
        expected, rel=0.05
    )


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


def test_time_in_flight_grows_with_filtering_and_groups():
    by_filtered = [
        compute_mean_time_in_flight(LENGTHS, window=2, groups=64, filtered=f)
        for f in (0.0, 0.2, 0.5, 0.8, 0.95)
    ]
    assert by_filtered == sorted(by_filtered)
    by_groups = [
        compute_mean_time_in_flight(LENGTHS, window=3, groups=n, filtered=0.5)
        for n in (1, 8, 64, 512)
    ]
    assert by_groups == sorted(by_groups)

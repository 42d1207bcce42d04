"""How steps that are under way together hold one another up."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.messages import Array
from streamrl.placement.steady_state import in_flight_window
from streamrl.placement.steady_state.in_flight_window import _draw_values, mean_time_in_flight

UNLIKE = np.exp(np.random.default_rng(1).normal(6.0, 0.8, 4096))


@given(st.integers(1, 6), st.integers(1, 40))
def test_steps_that_are_alike_do_not_hold_one_another_up(window: int, groups: int) -> None:
    found = mean_time_in_flight(np.full(3, 7.0), window=window, groups=groups)
    assert found == pytest.approx(7.0)


def test_one_by_one_a_step_takes_what_its_longest_group_does() -> None:
    expected = np.random.default_rng(2).choice(UNLIKE, (4000, 16)).max(axis=1).mean()
    assert mean_time_in_flight(UNLIKE, window=1, groups=16) == pytest.approx(expected, rel=0.05)


def test_of_two_at_a_time_every_other_is_held_up_by_the_one_before() -> None:
    # Of steps that take 1 or 9, with others behind them: by hand as a sum over what was drawn.
    drawn = np.random.default_rng(3).choice([1.0, 9.0], 20_000)
    ends = [0.0, 0.0]
    for one in drawn.tolist():
        ends.append(max(ends[-1], ends[-2] + one))
    expected = 2 * ends[-1] / len(drawn)
    assert mean_time_in_flight(np.array([1.0, 9.0]), window=2) == pytest.approx(expected, rel=0.05)


def test_the_more_are_filtered_and_the_more_groups_a_step_has_the_longer_it_takes() -> None:
    by_filtered = [
        mean_time_in_flight(UNLIKE, window=2, groups=64, filtered=f)
        for f in (0.0, 0.2, 0.5, 0.8, 0.95)
    ]
    assert by_filtered == sorted(by_filtered)
    by_groups = [
        mean_time_in_flight(UNLIKE, window=3, groups=n, filtered=0.5) for n in (1, 8, 64, 512)
    ]
    assert by_groups == sorted(by_groups)


@pytest.mark.parametrize(("groups", "filtered"), [(20_000, 0.5), (20_000, 0.995), (1, 0.999)])
def test_no_step_is_so_large_that_it_is_looked_at_for_long(
    groups: int, filtered: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[int] = []

    def counted(values: Array | None) -> Iterator[float]:
        for one in _draw_values(values):
            drawn.append(1)
            yield one

    monkeypatch.setattr(in_flight_window, "_draw_values", counted)
    assert mean_time_in_flight(UNLIKE, window=5, groups=groups, filtered=filtered) > 0
    assert len(drawn) < 1_000_000

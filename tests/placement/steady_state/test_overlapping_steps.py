"""Rollouts of several steps in the same engines, by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.placement.steady_state.overlapping_steps import OverlappedGeneration, RolloutProfile
from tests.placement.simple_costs import sampler

TIMING = sampler(0.01, rollout_s=0.001)


def stream(places: float = 100.0) -> RolloutProfile:
    """16 rollouts for 100 decode steps, then 4 for as many: half of the groups, and the rest."""
    return RolloutProfile(TIMING, [0, 100, 200], [16, 4], [0, 0], [0, 0], [100, 200], places)


def times(flow: OverlappedGeneration, until: float = math.inf) -> list[float]:
    found = []
    while (result := flow.advance(until)) is not None:
        found.append(result.at_s)
    return found


def test_a_step_alone_takes_what_its_decode_steps_take() -> None:
    flow = OverlappedGeneration(stream())
    flow.admit_step(0)
    assert times(flow) == pytest.approx([2.6, 2.6 + 1.4])


def test_steps_beside_one_another_are_slower_by_each_others_rollouts() -> None:
    flow = OverlappedGeneration(stream())
    flow.admit_step(0)
    assert flow.advance(2.5) is None
    assert times(flow, 2.6 + 1e-6) == pytest.approx([2.6])
    flow.admit_step(1)
    # 100 decode steps of 20 rollouts, at the end of which both have a result; then 100 of 4.
    assert times(flow) == pytest.approx([2.6 + 3.0, 2.6 + 3.0, 2.6 + 3.0 + 1.4])


def test_who_came_first_has_places_first() -> None:
    flow = OverlappedGeneration(stream(places=16))
    flow.admit_step(0)
    flow.admit_step(1)
    # The second has no place for 100 steps; then 12 of 16, and is so far by three quarters.
    first, second = 2.6, 2.6 + 100 * 0.026
    third = second + 25 * 0.026
    assert times(flow) == pytest.approx([first, second, third, third + 100 * 0.014])


def test_nothing_is_sampled_while_others_have_the_devices() -> None:
    flow = OverlappedGeneration(stream())
    flow.admit_step(0)
    flow.block_devices(1.0, 4.0)
    flow.block_devices(3.0, 5.0)
    assert times(flow) == pytest.approx([6.6, 8.0])


@given(
    st.lists(st.floats(0.0, 5.0), min_size=1, max_size=6),
    st.lists(st.tuples(st.floats(0.0, 20.0), st.floats(0.0, 3.0)), max_size=5),
    st.floats(1.0, 40.0),
)
def test_all_results_come_in_order_and_none_sooner_than_alone(
    gaps: list[float], blocks: list[tuple[float, float]], places: float
) -> None:
    flow, now, found = OverlappedGeneration(stream(places)), 0.0, []
    for start, seconds in blocks:
        flow.block_devices(start, start + seconds)
    admitted = []
    for step, gap in enumerate(gaps):
        while (result := flow.advance(now + gap)) is not None:
            found.append(result)
        now += gap
        admitted.append(now)
        flow.admit_step(step)
    while (result := flow.advance(math.inf)) is not None:
        found.append(result)
    assert sorted((each.step, each.result_index) for each in found) == [
        (step, number) for step in range(len(gaps)) for number in (0, 1)
    ]
    assert [each.at_s for each in found] == sorted(each.at_s for each in found)
    for each in found:
        alone = 2.6 if each.result_index == 0 else 4.0
        assert each.at_s - admitted[each.step] >= alone - 1e-6

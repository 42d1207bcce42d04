"""Rollouts of several steps in the same engines, by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.planner.steady_state.list_scheduler import OverlappedGeneration, RolloutProfile
from tests.planner.notations import sampler

TIMING = sampler(0.01, rollout_s=0.001)


def make_profile(slots: float = 100.0) -> RolloutProfile:
    """Return a profile of 16 rollouts for 100 decode steps, then 4 for 100; two results."""
    return RolloutProfile(TIMING, [0, 100, 200], [16, 4], [0, 0], [0, 0], [100, 200], slots)


def collect_times(generation: OverlappedGeneration, until: float = math.inf) -> list[float]:
    result_times = []
    while (result := generation.advance(until)) is not None:
        result_times.append(result.at_s)
    return result_times


def test_earlier_steps_get_slots_first():
    generation = OverlappedGeneration(make_profile(slots=16))
    generation.admit_step(0)
    generation.admit_step(1)
    # The second step has no slots for 100 steps; then 12 for 16 rollouts, so it advances by three
    # quarters.
    first, second = 2.6, 2.6 + 100 * 0.026
    third = second + 25 * 0.026
    assert collect_times(generation) == pytest.approx([first, second, third, third + 100 * 0.014])


def test_generation_stops_while_devices_are_blocked():
    generation = OverlappedGeneration(make_profile())
    generation.admit_step(0)
    generation.block_devices(1.0, 4.0)
    generation.block_devices(3.0, 5.0)
    assert collect_times(generation) == pytest.approx([6.6, 8.0])


@given(
    st.lists(st.floats(0.0, 5.0), min_size=1, max_size=6),
    st.lists(st.tuples(st.floats(0.0, 20.0), st.floats(0.0, 3.0)), max_size=5),
    st.floats(1.0, 40.0),
)
def test_results_are_ordered_and_never_earlier_than_alone(
    gaps: list[float], blocks: list[tuple[float, float]], slots: float
):
    generation, now, results = OverlappedGeneration(make_profile(slots)), 0.0, []
    for start, seconds in blocks:
        generation.block_devices(start, start + seconds)
    admitted = []
    for step, gap in enumerate(gaps):
        while (result := generation.advance(now + gap)) is not None:
            results.append(result)
        now += gap
        admitted.append(now)
        generation.admit_step(step)
    while (result := generation.advance(math.inf)) is not None:
        results.append(result)
    expected = [(step, number) for step in range(len(gaps)) for number in (0, 1)]
    assert sorted((event.step, event.result_index) for event in results) == expected
    assert [event.at_s for event in results] == sorted(event.at_s for event in results)
    for event in results:
        single_step_s = 2.6 if event.result_index == 0 else 4.0
        assert event.at_s - admitted[event.step] >= single_step_s - 1e-6

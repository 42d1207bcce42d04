"""CPU work clocks: more busy processes than cores, pauses, crowding."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.planner.calibration.cpu_clocks import PausableClock, WorkClock, merge_intervals

spans = st.lists(
    st.tuples(st.floats(0, 50), st.floats(0.01, 20)).map(lambda p: (p[0], p[0] + p[1])), max_size=6
)


def test_two_busy_processes_share_one_core_equally():
    clock = WorkClock([[(0.0, 4.0)], [(2.0, 6.0)]], cores=1)
    assert clock.measure_work(0.0, 2.0) == pytest.approx(2.0)
    assert clock.measure_work(2.0, 4.0) == pytest.approx(1.0)
    assert clock.measure_work(0.0, 6.0) == pytest.approx(5.0)
    assert clock.measure_work(6.0, 9.0) == pytest.approx(3.0)


def test_overlapping_spans_of_a_process_count_once():
    clock = WorkClock([[(0.0, 4.0), (1.0, 3.0)], [(0.0, 4.0)]], cores=1)
    assert clock.measure_work(0.0, 4.0) == pytest.approx(2.0)


def test_a_pausable_clock_stops_during_pauses():
    clock = PausableClock([(1.0, 3.0)], WorkClock([], cores=0))
    assert np.diff(clock.read_at(np.array([0.0, 1.0, 2.0, 3.0, 5.0]))) == pytest.approx(
        [1, 0, 0, 2]
    )


def test_crowding_slows_processes_even_with_enough_cores():
    clock = WorkClock([[(0.0, 4.0)], [(2.0, 6.0)]], cores=4, crowding=0.25)
    assert clock.measure_work(0.0, 2.0) == pytest.approx(2.0)
    assert clock.measure_work(2.0, 4.0) == pytest.approx(1.6)


def test_cores_of_other_programs_are_not_available():
    clock = WorkClock([[(0.0, 4.0)], [(2.0, 6.0)]], cores=2, other_cores=0.5)
    assert clock.measure_work(0.0, 2.0) == pytest.approx(2.0)
    assert clock.measure_work(2.0, 4.0) == pytest.approx(1.5)


@given(st.lists(spans, min_size=1, max_size=4), st.integers(1, 3))
def test_work_never_exceeds_time_and_equals_it_with_enough_cores(
    busy: list[list[tuple[float, float]]], cores: int
):
    enough = WorkClock(busy, cores=len(busy))
    few = WorkClock(busy, cores=cores)
    for start, end in (span for process_spans in busy for span in process_spans):
        assert enough.measure_work(start, end) == pytest.approx(end - start)
        least = (end - start) * min(1.0, cores / len(busy))
        assert least - 1e-9 <= few.measure_work(start, end) <= end - start + 1e-9


@given(spans)
def test_merged_intervals_cover_the_same_time_once(intervals: list[tuple[float, float]]):
    merged = merge_intervals(intervals)
    assert all(a[1] < b[0] for a, b in itertools.pairwise(merged))
    assert all(any(s <= start and end <= e for s, e in merged) for start, end in intervals)

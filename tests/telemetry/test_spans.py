import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.telemetry.spans import Span, SpanRecorder, compute_busy_s, compute_idle_fraction
from tests.virtual_time import ManualClock


def span(start, end, process="p"):
    return Span(process, "work", 0, start, end)


def test_a_span_is_recorded_when_its_block_ends():
    clock = ManualClock(10.0)
    recorder = SpanRecorder("trainer-0", clock)
    with recorder.record_span("train", rollouts=4):
        clock.now = 12.5
    assert recorder.drain_spans() == [Span("trainer-0", "train", 0, 10.0, 12.5, {"rollouts": 4})]
    assert recorder.drain_spans() == []


def test_an_open_span_is_drained_in_part_and_later_complete():
    clock = ManualClock(1.0)
    recorder = SpanRecorder("p", clock)
    with recorder.record_span("work", groups=4) as fields:
        part = recorder.drain_spans(now=3.0)
        fields["lengths"] = "3 4"
        clock.now = 5.0
    assert part == [Span("p", "work", 0, 1.0, 3.0, {"groups": 4}, is_open=True)]
    complete = Span("p", "work", 0, 1.0, 5.0, {"groups": 4, "lengths": "3 4"})
    assert recorder.drain_spans() == [complete]


def test_paused_spans_are_recorded_in_pieces():
    clock = ManualClock(1.0)
    recorder = SpanRecorder("p", clock)
    with recorder.record_span("work"), recorder.record_span("other"):
        clock.now = 2.0
        recorder.pause_spans(["work"])
        with recorder.record_span("work"):
            clock.now = 3.0
            assert {(s.name, s.start_s, s.end_s) for s in recorder.drain_spans()} == {
                ("work", 1.0, 2.0),
                ("other", 1.0, 3.0),
            }
        clock.now = 5.0
        recorder.resume_spans()
        clock.now = 6.0
    pieces = [(s.name, s.start_s, s.end_s) for s in recorder.drain_spans()]
    assert pieces == [("other", 1.0, 6.0), ("work", 5.0, 6.0)]


def test_overlapping_spans_take_the_lowest_free_lane():
    recorder = SpanRecorder("p", ManualClock())
    first, second, third = (recorder.record_span(name) for name in ("a", "b", "c"))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    third.__enter__()
    second.__exit__(None, None, None)
    third.__exit__(None, None, None)
    assert {s.name: s.lane for s in recorder.drain_spans()} == {"a": 0, "b": 1, "c": 0}


def test_a_clock_that_is_set_back_gives_an_empty_span():
    clock = ManualClock(10.0)
    recorder = SpanRecorder("p", clock)
    with recorder.record_span("work"):
        clock.now = 4.0
    assert recorder.drain_spans() == [Span("p", "work", 0, 10.0, 10.0)]


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([], 0.0),
        ([(2, 5)], 3.0),
        ([(2, 5), (4, 7)], 5.0),
        ([(2, 5), (6, 7)], 4.0),
        ([(2, 9), (3, 4)], 7.0),
        ([(-5, 1), (9, 30)], 2.0),
        ([(-5, 30)], 10.0),
        ([(-5, 0), (10, 12)], 0.0),
    ],
)
def test_busy_time_is_the_union_within_the_window(spans, expected):
    assert compute_busy_s([span(*s) for s in spans], start=0.0, end=10.0) == expected


INTERVALS = st.lists(st.tuples(st.floats(-10, 20), st.floats(0, 15)), max_size=12)


@given(INTERVALS, st.floats(0.0, 10.0))
def test_busy_time_is_additive_over_windows(intervals, cut):
    spans = [span(start, start + length) for start, length in intervals]
    parts = compute_busy_s(spans, start=0.0, end=cut) + compute_busy_s(spans, start=cut, end=10.0)
    assert parts == pytest.approx(compute_busy_s(spans, start=0.0, end=10.0), abs=1e-9)


def test_idle_fraction_includes_processes_without_spans():
    spans = [span(0, 10, "a"), span(0, 5, "b")]
    assert compute_idle_fraction(spans, start=0.0, end=10.0, num_processes=2) == pytest.approx(0.25)
    assert compute_idle_fraction(spans, start=0.0, end=10.0, num_processes=3) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="is empty"):
        compute_idle_fraction(spans, start=1.0, end=1.0)

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.telemetry.console import SPARKLINE_BLOCKS, RunProgress, render_sparkline
from streamrl.telemetry.progress import format_duration, format_number
from tests.telemetry.rows import full_row, make_run_info


@pytest.fixture
def progress(tmp_path):
    return RunProgress(make_run_info(tmp_path, num_steps=10))


def test_all_values_of_an_evaluation_are_kept(progress):
    parts = {"eval/interval/pass_at_1_low": 0.0, "eval/source/easy/pass_at_1": 0.2}
    assert progress.add_row(0, {"eval/pass_at_1": 0.1, **parts}) == {"pass_at_1": 0.1}
    assert progress.add_row(1, full_row(1)) == {}
    progress.add_row(2, {"eval/pass_at_1": 0.3, "eval/mean_at_4": 0.2})
    progress.add_row(3, {"eval/pass_at_1": 0.5})
    assert progress.evals == {"pass_at_1": [0.1, 0.3, 0.5], "mean_at_4": [0.2]}


def test_remaining_time_is_the_median_step_time_times_the_remaining_steps(progress):
    for step, (step_s, tokens) in enumerate(((2.0, 5.0), (30.0, math.nan), (3.0, 7.0)), start=1):
        progress.add_row(step, {"time/step_s": step_s, "throughput/tokens_per_s": tokens})
    assert progress.num_tokens == 2 * 5 + 3 * 7
    assert progress.estimate_remaining_s() == 7 * 3.0
    assert progress.estimate_remaining_s(since_step_s=1.0) == 20.0
    assert progress.estimate_remaining_s(since_step_s=99.0) == 0.0


def test_a_sparkline_goes_from_the_lowest_to_the_highest_block():
    assert render_sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == SPARKLINE_BLOCKS
    assert render_sparkline([5, 5, 5], 8) == SPARKLINE_BLOCKS[0] * 3


@given(st.lists(st.floats(-1e6, 1e6), max_size=50), st.integers(-1, 30))
def test_a_sparkline_never_exceeds_its_width(values, width):
    line = render_sparkline(values, width)
    assert len(line) == min(len(values), max(width, 0))
    assert set(line) <= set(SPARKLINE_BLOCKS)


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (0.4116, 3, "0.412"),
        (9_999, 0, "9999"),
        (12_345, 0, "12.3k"),
        (4_560_000, 3, "4.6M"),
        (math.nan, 3, "-"),
        (math.inf, 3, "-"),
    ],
)
def test_numbers_take_few_characters(value, digits, text):
    assert format_number(value, digits) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(7, "0:07"), (59.6, "1:00"), (252, "4:12"), (3723, "1:02:03"), (math.nan, "-")],
)
def test_durations_are_formatted_like_a_clock(seconds, text):
    assert format_duration(seconds) == text

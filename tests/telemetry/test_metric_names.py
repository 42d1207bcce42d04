import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.telemetry.metric_names import (
    MAX_BINS,
    METRICS,
    Histogram,
    find_metric,
    to_json_value,
    validate_row,
)
from tests.telemetry.rows import full_row


def test_every_metric_has_a_meaning_in_ascii():
    for metric in METRICS:
        assert metric.meaning and (metric.name + metric.unit + metric.meaning).isascii()


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("reward/format", "reward/<component>"),
        ("queue/depth/train", "queue/depth/<stage>"),
        ("idle/generate", "idle/<stage>"),
        ("drops/reward_error", "drops/<cause>"),
        ("eval/pass_at_1", "eval/<name>"),
        ("eval/source/openai~gsm8k/pass_at_1", "eval/source/<source>/<name>"),
        ("reward/mean", "reward/mean"),
    ],
)
def test_a_placeholder_stands_for_one_segment(name, line):
    assert find_metric(name).name == line


@pytest.mark.parametrize("name", ["idle/", "idle/a/b", "idle", "queue/depth", "reward", "x/idle/a"])
def test_a_name_that_is_not_in_the_contract_raises(name):
    with pytest.raises(ValueError, match=f"metric {name} is not in the metrics contract"):
        validate_row({name: 1.0})


def test_a_full_row_and_numbers_of_python_and_numpy_pass():
    validate_row(full_row(3))
    values: list[Any] = [1, 0.5, math.nan, np.float32(0.5), np.int64(3)]
    for value in values:
        validate_row({"reward/mean": value})


BINS = Histogram((0, 1), (1,))


@pytest.mark.parametrize(
    ("name", "kind", "value"),
    [
        *(("reward/mean", "Real", value) for value in (True, "0.5", None, [1.0], BINS)),
        ("staleness/histogram", "Histogram", 1.0),
    ],
)
def test_other_types_are_rejected(name, kind, value):
    with pytest.raises(ValueError, match=f"must be a {kind}"):
        validate_row({name: value})


@pytest.mark.parametrize(
    ("edges", "counts", "rule"),
    [
        ((0, 1), (1, 2), "wanted one more"),
        ((0,), (), "wanted one more"),
        (tuple(range(MAX_BINS + 2)), (1,) * (MAX_BINS + 1), "1 to 512 bins"),
    ],
)
def test_an_invalid_histogram_raises(edges, counts, rule):
    with pytest.raises(ValueError, match=rule):
        Histogram(edges, counts)


def test_a_histogram_of_integers_has_a_bin_for_each_up_to_the_maximum():
    assert Histogram.from_integer_counts({0: 5, 2: 1}) == Histogram((0, 1, 2, 3), (5, 0, 1))
    assert Histogram.from_integer_counts({}, maximum=2) == Histogram((0, 1, 2, 3), (0, 0, 0))
    with pytest.raises(ValueError, match="-1 is negative"):
        Histogram.from_integer_counts({-1: 3})


@given(st.dictionaries(st.integers(0, 2 * MAX_BINS), st.integers(0, 1000)))
def test_integer_counts_are_preserved(counts):
    assert sum(Histogram.from_integer_counts(counts).counts) == sum(counts.values())


def test_a_histogram_survives_json():
    histogram = Histogram((0, 1.5, 3), (4, 5))
    text = json.dumps(histogram.to_json())
    assert text == '{"edges": [0, 1.5, 3], "counts": [4, 5]}'
    assert Histogram.from_json(json.loads(text)) == histogram


@pytest.mark.parametrize(
    ("value", "expected"),
    [(math.nan, None), (math.inf, None), (-math.inf, None), (np.float32(0.5), 0.5), (7, 7)],
)
def test_nan_and_infinities_are_null_in_json(value, expected):
    assert to_json_value(value) == expected

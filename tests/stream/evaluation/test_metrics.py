"""Metrics of an evaluation: worked examples."""

import itertools
import math
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.stream.evaluation.metrics import (
    compute_evaluation_result,
    compute_fraction_interval,
    compute_maj_at_k,
    compute_mean_interval,
    compute_pass_at_k,
)


def make_passes(*counts, samples=4):
    """Return a row per prompt with this number of passing completions."""
    return np.array([[i < count for i in range(samples)] for count in counts])


tables = st.lists(st.integers(0, 5), min_size=1, max_size=6).map(
    lambda c: make_passes(*c, samples=5)
)


@given(tables)
def test_pass_at_k_is_the_mean_over_all_choices_of_k_completions(passed):
    for k in range(1, 6):
        chosen = [
            passed[:, list(subset)].any(axis=1) for subset in itertools.combinations(range(5), k)
        ]
        assert compute_pass_at_k(passed, k) == pytest.approx(np.mean(chosen))


@given(tables, st.integers(1, 4))
def test_pass_at_k_stays_unbiased_when_a_random_completion_has_no_score(passed, k):
    remaining = [
        compute_pass_at_k([np.delete(row, i) for row in passed], k) for i in range(passed.shape[1])
    ]
    assert np.mean(remaining) == pytest.approx(compute_pass_at_k(passed, k))


def test_pass_at_k_needs_k_completions_of_a_prompt():
    rows = [np.array([True, False]), np.array([False] * 4)]
    assert compute_pass_at_k(rows, 1) == (1 / 2 + 0) / 2
    assert compute_pass_at_k(rows, 2) == (1 + 0) / 2
    assert compute_pass_at_k(rows, 4) == 0.0
    assert math.isnan(compute_pass_at_k(rows, 5))


@pytest.mark.parametrize(("samples", "ks"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6])])
def test_k_is_every_power_of_two_and_all_samples(samples, ks):
    scores = np.ones((2, samples), np.float32)
    result = compute_evaluation_result(scores, None, samples=samples, pass_score=1.0)
    assert list(result.pass_at) == ks
    assert result.pass_at_k == result.pass_at[samples] == 1.0


@pytest.mark.parametrize(
    ("answers", "passed", "expected"),
    [
        ([5, 5, 7, 5], [1, 1, 0, 1], 1.0),
        ([5, 7, 7, 7], [1, 0, 0, 0], 0.0),
        # A tie counts half: 5 passes, 7 does not.
        ([5, 5, 7, 7], [1, 1, 0, 0], 0.5),
        # Four answers with a vote each; a single one passes.
        ([5, 6, 7, 8], [1, 0, 0, 0], 0.25),
        # Completions without an answer do not vote.
        ([0, 0, 0, 7], [0, 0, 0, 1], 1.0),
        ([0, 0, 0, 0], [0, 0, 0, 0], 0.0),
        # Equal answers with different outcomes (such as by format): half of them pass.
        ([5, 5, 0, 0], [1, 0, 0, 0], 0.5),
    ],
)
def test_maj_at_k_scores_the_majority_answer(answers, passed, expected):
    single = np.array([passed], np.bool_)
    assert compute_maj_at_k(single, np.array([answers], np.int64)) == expected
    two_prompts = np.concatenate([single, np.zeros((1, 4), np.bool_)])
    assert (
        compute_maj_at_k(two_prompts, np.array([answers, [1, 1, 1, 1]], np.int64)) == expected / 2
    )


def test_the_mean_interval_is_clustered_by_prompt():
    # Means 0, 1, 1, 0: standard deviation sqrt(1/3), standard error sqrt(1/12).
    interval = compute_mean_interval(np.array([0.0, 1.0, 1.0, 0.0]))
    assert interval == pytest.approx((0.5 - 1.96 / math.sqrt(12), 0.5 + 1.96 / math.sqrt(12)), 4)
    assert compute_mean_interval(np.array([1.0])) is None


def test_the_interval_of_a_perfect_score_has_a_width():
    # Wilson's lower bound for 20 of 20 is n / (n + z^2).
    low, high = compute_fraction_interval(make_passes(*[4] * 20))
    assert (low, high) == (pytest.approx(20 / (20 + 1.96**2), abs=1e-4), 1.0)
    assert compute_fraction_interval(make_passes(4))[0] < 0.25


@given(tables)
def test_an_interval_contains_the_estimate_and_lies_within_0_and_1(passed):
    low, high = compute_fraction_interval(passed)
    assert 0 <= low <= passed.mean() + 1e-12
    assert passed.mean() - 1e-12 <= high <= 1


def metric_segments(*names):
    """Return the metric segments of sources with these names."""
    scores = np.ones((1, 1), np.float32)
    result = compute_evaluation_result(scores, None, samples=1, pass_score=1.0)
    row = replace(result, by_source=dict.fromkeys(names, result)).to_metrics()
    matches = [re.fullmatch(r"eval/source/([^/]+)/pass_at_1", name) for name in row]
    return [match[1] for match in matches if match]


def test_sources_with_special_characters_have_distinct_metrics():
    names = ["a/b", "a_b", "a~b", "a%2Fb", "a b", "", "none", "%6Eone", "a.b-1"]
    names += ["\u00e4/", "\ud800"]
    assert metric_segments(*names) == [
        *("a~b", "a_b", "a%7Eb", "a%252Fb", "a%20b", "none", "%6Eone", "%256Eone", "a.b-1"),
        *("\u00e4~", "%ED%A0%80"),
    ]


def test_intervals_cover_the_true_value_in_about_95_percent():
    random = np.random.default_rng(0)
    num_covered = {"mean": 0, "fraction": 0}
    for _ in range(400):
        probabilities = random.beta(1, 1, size=100)  # prompts of every difficulty; true value 0.5
        passed = random.random((100, 8)) < probabilities[:, None]
        for name, interval in (
            ("mean", compute_mean_interval(passed.mean(axis=1))),
            ("fraction", compute_fraction_interval(passed)),
        ):
            assert interval is not None
            num_covered[name] += interval[0] <= 0.5 <= interval[1]
    assert all(0.92 < count / 400 < 0.98 for count in num_covered.values())

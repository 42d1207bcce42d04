"""Logprob check: differences that pass or fail."""

import math
from contextlib import nullcontext

import numpy as np
import pytest

from streamrl.errors import LogprobCheckError
from streamrl.weights.logprob_check import LogprobCheck, make_check_sequences

SEQUENCES = [np.array([3, 1, 4], np.int32), np.array([1, 5], np.int32)]


def test_the_first_token_is_ignored_and_nan_fails():
    logprobs = [np.array([0, -1, -2], np.float32)]
    check = LogprobCheck([np.array([3, 1, 4], np.int32)], logprobs, limit=0.1)
    assert check.compare_logprobs([np.array([9, -1, -2.0625], np.float32)], "generator-0") == 0.0625
    with pytest.raises(LogprobCheckError, match="by nan nats"):
        check.compare_logprobs([np.array([0, math.nan, -2], np.float32)], "generator-0")


def make_difference(*parts: tuple[int, float]) -> LogprobCheck:
    """Make a check whose follower, with zeros, differs by the given nats in so many tokens."""
    values = np.concatenate([np.zeros(1), *(np.full(count, nats) for count, nats in parts)])
    return LogprobCheck([np.zeros(len(values), np.int32)], [values], limit=0.1)


@pytest.mark.parametrize(
    ("parts", "passes"),
    [
        ([(1000, 0.09)], True),
        ([(1000, 0.11)], False),  # the mean
        ([(985, 0.01), (15, 5.0)], True),  # flipped experts
        ([(960, 0.01), (40, 5.0)], False),
        ([(850, 0.0), (150, 0.3)], False),  # the quantile
        ([(500, 20.0), (500, 40.0)], False),
    ],
)
def test_limits_hold_for_the_mean_and_for_nine_tokens_in_ten(
    parts: list[tuple[int, float]], passes: bool
):
    check = make_difference(*parts)
    zeros = [np.zeros_like(check.logprobs[0])]
    with nullcontext() if passes else pytest.raises(LogprobCheckError, match=r"probe_limit=0\.1"):
        check.compare_logprobs(zeros, "generator-0")


@pytest.mark.parametrize(("nats", "passes"), [(0.29, True), (0.31, False)])
def test_the_limit_grows_with_the_spread_of_the_logprobs(nats: float, passes: bool):
    # A standard deviation of 10 nats: rounding of large logits may be three times the limit.
    values = np.array([0.0, *[-5.0, -25.0] * 50])
    check = LogprobCheck([np.zeros(len(values), np.int32)], [values], limit=0.1)
    with nullcontext() if passes else pytest.raises(LogprobCheckError, match=r"may be 0\.3 and"):
        check.compare_logprobs([values + nats], "generator-0")


def test_one_token_sequences_compare_nothing_and_pass():
    sequences = make_check_sequences(vocab_size=50, max_length=2)
    assert {len(ids) for ids in sequences} == {1}
    logprobs = [np.zeros(1, np.float32)] * len(sequences)
    assert (
        LogprobCheck(sequences, logprobs, limit=0.1).compare_logprobs(logprobs, "generator-0")
        == 0.0
    )


def test_check_sequences_are_reproducible_and_fit_the_model():
    sequences = make_check_sequences(vocab_size=50, max_length=20)
    repeated = make_check_sequences(vocab_size=50, max_length=20)
    assert all(np.array_equal(a, b) for a, b in zip(sequences, repeated, strict=True))
    assert {len(ids) for ids in sequences} == {19}
    assert all(ids.min() >= 0 and ids.max() < 50 for ids in sequences)

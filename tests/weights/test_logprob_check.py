"""Logprob check: differences that pass or fail."""

import math

import numpy as np
import pytest

from streamrl.errors import LogprobCheckError
from streamrl.weights.logprob_check import LogprobCheck, make_check_sequences

SEQUENCES = [np.array([3, 1, 4], np.int32), np.array([1, 5], np.int32)]


def test_the_first_token_is_ignored_and_nan_fails():
    logprobs = [np.array([0, -1, -2], np.float32)]
    check = LogprobCheck([np.array([3, 1, 4], np.int32)], logprobs, max_difference=0.1)
    assert check.compare_logprobs([np.array([9, -1, -2.0625], np.float32)], "generator-0") == 0.0625
    with pytest.raises(LogprobCheckError, match="by up to nan"):
        check.compare_logprobs([np.array([0, math.nan, -2], np.float32)], "generator-0")


def test_nan_in_any_sequence_fails():
    logprobs = [np.array([0, -1], np.float32)] * 2
    check = LogprobCheck([np.array([3, 1], np.int32)] * 2, logprobs, max_difference=0.1)
    with pytest.raises(LogprobCheckError, match="by up to nan"):
        check.compare_logprobs([logprobs[0], np.array([0, math.nan], np.float32)], "generator-0")


def test_one_token_sequences_compare_nothing_and_pass():
    sequences = make_check_sequences(vocab_size=50, max_length=2)
    assert {len(ids) for ids in sequences} == {1}
    logprobs = [np.zeros(1, np.float32)] * len(sequences)
    assert (
        LogprobCheck(sequences, logprobs, max_difference=0.1).compare_logprobs(
            logprobs, "generator-0"
        )
        == 0.0
    )


def test_check_sequences_are_reproducible_and_fit_the_model():
    sequences = make_check_sequences(vocab_size=50, max_length=20)
    repeated = make_check_sequences(vocab_size=50, max_length=20)
    assert all(np.array_equal(a, b) for a, b in zip(sequences, repeated, strict=True))
    assert {len(ids) for ids in sequences} == {19}
    assert all(ids.min() >= 0 and ids.max() < 50 for ids in sequences)

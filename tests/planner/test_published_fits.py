"""Fits of constants to published parts of synchronous steps, by least squares."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.published import nemo, nemo_fit, verl, verl_fit

VERL_NAMES = ("fsdp2", "megatron", "entropy", "handoff_token_s", "update_s", "decode_layer_s")


@pytest.mark.parametrize(
    ("iter_log_errors", "fitted", "name"),
    [
        *((verl_fit.iter_log_errors, verl.DEFAULT_CALIBRATION, name) for name in VERL_NAMES),
        *((nemo_fit.iter_log_errors, nemo.CONSTANTS, name) for name in nemo_fit.NAMES),
    ],
)
def test_fitted_constants_are_a_local_minimum(
    iter_log_errors: Callable[[Any], Iterator[float]], fitted: Any, name: str
):
    less, best, more = (
        sum(e**2 for e in iter_log_errors(replace(fitted, **{name: factor * vars(fitted)[name]})))
        for factor in (0.9, 1.0, 1.1)
    )
    assert best < min(less, more)

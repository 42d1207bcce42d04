"""Fits of constants to published parts of synchronous steps, by least squares."""

from dataclasses import replace

import pytest

from benchmarks.published import nemo, nemo_fit, verl, verl_fit
from streamrl.planner.costs.constants import CostConstants


def sum_squares(calibration: verl.VerlCalibration) -> float:
    return sum(error**2 for error in verl_fit.iter_log_errors(calibration))


def sum_nemo_squares(constants: CostConstants) -> float:
    return sum(error**2 for error in nemo_fit.iter_log_errors(constants))


@pytest.mark.parametrize(
    "name", ["fsdp2", "megatron", "entropy", "handoff_token_s", "update_s", "decode_layer_s"]
)
def test_verl_constants_are_a_local_minimum(name: str):
    best = sum_squares(verl.DEFAULT_CALIBRATION)
    for factor in (0.9, 1.1):
        perturbed = replace(
            verl.DEFAULT_CALIBRATION, **{name: factor * vars(verl.DEFAULT_CALIBRATION)[name]}
        )
        assert sum_squares(perturbed) > best


@pytest.mark.parametrize("name", nemo_fit.NAMES)
def test_nemo_constants_are_a_local_minimum(name: str):
    best = sum_nemo_squares(nemo.CONSTANTS)
    for factor in (0.9, 1.1):
        perturbed = replace(nemo.CONSTANTS, **{name: factor * vars(nemo.CONSTANTS)[name]})
        assert sum_nemo_squares(perturbed) > best

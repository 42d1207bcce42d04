"""Fits of constants to published parts of synchronous steps, by least squares."""

from dataclasses import replace

import pytest

from benchmarks.published import nemo, nemo_fit, verl, verl_fit
from benchmarks.published.batches import predict_calls_s, predict_one_ahead_s
from benchmarks.published.points import VERL, VerlRun
from streamrl.planner.costs.constants import CostConstants


def find_run(name: str, train: int, generate: int = 0) -> VerlRun:
    (match,) = [
        run for run in VERL if (run.name, run.train, run.generate) == (name, train, generate)
    ]
    return match


def sum_squares(calibration: verl.VerlCalibration) -> float:
    return sum(error**2 for error in verl_fit.iter_log_errors(calibration))


def sum_nemo_squares(constants: CostConstants) -> float:
    return sum(error**2 for error in nemo_fit.iter_log_errors(constants))


def test_rest_is_the_step_minus_its_parts():
    assert find_run("7b-20k", 16).rest_s == pytest.approx(749 - 321 - 88 - 286)
    # Mean of two steps; the step that is left out of the fit does not count.
    assert verl.average_rest_s("7b-28k") == pytest.approx((10.89 + 10.72) / 2)


def test_handover_of_a_padded_batch_ignores_the_number_of_devices():
    # 512 prompts of 12 responses, each with 2,048 and 20,480 tokens, at 1 us per token.
    slow = replace(verl.DEFAULT_CALIBRATION, handoff_token_s=1e-6)
    for run in (find_run("7b-20k", 16), find_run("7b-20k", 12, 4)):
        assert verl.compute_handoff_s(run, slow) == pytest.approx(512 * 12 * 22528 * 1e-6)


@pytest.mark.parametrize("part", ["own", "update"])
def test_scoring_and_training_wait_for_one_handover(part: str):
    run = find_run("7b-28k", 64)
    without_handoff = replace(verl.DEFAULT_CALIBRATION, handoff_token_s=0.0)
    handoff_s = (
        verl_fit.predict_parts(run, verl.DEFAULT_CALIBRATION)[part][1]
        - verl_fit.predict_parts(run, without_handoff)[part][1]
    )
    assert handoff_s == pytest.approx(verl.compute_handoff_s(run), rel=0.01)


def test_entropy_adds_time_only_with_megatron():
    doubled = replace(verl.DEFAULT_CALIBRATION, entropy=2 * verl.DEFAULT_CALIBRATION.entropy)

    def own_s(run: VerlRun, calibration: verl.VerlCalibration) -> float:
        return verl_fit.predict_parts(run, calibration)["own"][1] - verl.compute_handoff_s(
            run, calibration
        )

    fsdp2, megatron = find_run("7b-20k", 16), find_run("7b-8k", 16)
    assert own_s(fsdp2, doubled) == own_s(fsdp2, verl.DEFAULT_CALIBRATION)
    assert own_s(megatron, doubled) == pytest.approx(
        2 * own_s(megatron, verl.DEFAULT_CALIBRATION), rel=0.01
    )


def test_slowest_replica_exceeds_the_mean_as_printed():
    for name in ("7b-20k", "7b-8k"):
        parts = verl_fit.predict_parts(find_run(name, 16), verl.DEFAULT_CALIBRATION)
        printed, predicted = (parts["gen"][side] - parts["sampled"][side] for side in (0, 1))
        assert predicted == pytest.approx(printed, rel=0.2)


def test_one_step_off_takes_the_longer_of_generation_and_training():
    run = find_run("7b-20k", 12, 4)
    problem = verl.build_problem(run)
    model, placement = verl.VerlCosts(run, problem), verl.build_placement(run, problem)
    call_seconds = predict_calls_s(problem, model, placement)
    assert set(call_seconds) == {"generate", "reward", "train"}
    weights = model.predict_timings(placement).weights["generate"]
    longer = max(call_seconds["generate"], call_seconds["reward"] + call_seconds["train"])
    step_s = weights.publish_s + weights.pull_s + longer
    assert predict_one_ahead_s(problem, model, placement) == pytest.approx(step_s)


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


def test_calibration_round_trips_through_logarithms():
    back = verl_fit.from_logarithms(verl_fit.to_logarithms(verl.DEFAULT_CALIBRATION))
    assert back.fsdp2 == pytest.approx(verl.DEFAULT_CALIBRATION.fsdp2)
    assert back.medians == pytest.approx(verl.DEFAULT_CALIBRATION.medians)

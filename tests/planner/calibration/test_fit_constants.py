"""Fit of cost constants: the cost model reproduces the fitted timings of a run."""

from dataclasses import dataclass, fields, replace
from pathlib import Path

import pytest

from streamrl.cli.calibrate import CalibrationResult, fit_constants
from streamrl.planner.calibration.fit_timings import FittedTimings, fit_timings
from streamrl.planner.calibration.prediction import PlannedRun
from streamrl.planner.calibration.run_trace import load_run_trace
from streamrl.planner.costs.cost_model import CostModel
from streamrl.planner.problem.stage_timings import StageTimings
from tests.planner.calibration.runs import TRUE, play, recipe, write_run


@dataclass(frozen=True)
class FittedRun:
    """A run with its fitted timings and constants."""

    planned: PlannedRun
    fitted: FittedTimings
    calibration: CalibrationResult

    @property
    def predicted_timings(self) -> StageTimings:
        model = CostModel(self.planned.problem, self.calibration.constants)
        return model.predict_timings(self.planned.placement)


@pytest.fixture(scope="module")
def fitted_run(tmp_path_factory: pytest.TempPathFactory) -> FittedRun:
    folder: Path = tmp_path_factory.mktemp("fitted")
    config = recipe(folder)
    measured = load_run_trace(write_run(folder / "run", config, play(config)))
    planned = PlannedRun.from_trace(measured, measured.config)
    fitted = fit_timings(measured, planned.base_timings)
    calibration = fit_constants(
        fitted, planned.problem, planned.placement, planned.initial_constants
    )
    return FittedRun(planned, fitted, calibration)


def test_cost_model_with_fitted_constants_predicts_the_fitted_timings(fitted_run: FittedRun):
    assert not [
        name
        for name, constant in fitted_run.calibration.fitted_constants.items()
        if constant.is_clamped
    ]
    predicted, expected = fitted_run.predicted_timings, fitted_run.fitted.timings
    # Size and recomputation of the KV cache come from the run's settings.
    settings = ("kv_tokens", "recompute_token_s")
    generator = replace(predicted.generator, **{k: vars(expected.generator)[k] for k in settings})
    for field in fields(generator):
        value = vars(expected.generator)[field.name]
        assert vars(generator)[field.name] == pytest.approx(value, rel=1e-6), field.name
    for name, value in vars(expected.train["policy"]).items():
        assert vars(predicted.train["policy"])[name] == pytest.approx(value, rel=1e-6, abs=1e-12), (
            name
        )
    for name, value in vars(expected.weights["generate"]).items():
        assert vars(predicted.weights["generate"])[name] == pytest.approx(value, rel=1e-6), name
    assert predicted.hop_s == pytest.approx(expected.hop_s)
    assert predicted.step_s == pytest.approx(expected.step_s)


def test_rule_batches_are_normalized_to_one_group(fitted_run: FittedRun):
    batch_s = fitted_run.fitted.timings.score["reward"].batch_duration_s(32 * 4, 0)
    assert 32 * fitted_run.predicted_timings.score["reward"].batch_duration_s(
        4, 0
    ) == pytest.approx(batch_s)


def test_a_constant_beyond_its_bound_is_clamped(fitted_run: FittedRun):
    slow = replace(fitted_run.fitted, timings=replace(fitted_run.fitted.timings, hop_s=5000.0))
    calibration = fit_constants(
        slow,
        fitted_run.planned.problem,
        fitted_run.planned.placement,
        fitted_run.planned.initial_constants,
    )
    assert calibration.constants.hop_s == 3600
    assert [
        name for name, constant in calibration.fitted_constants.items() if constant.is_clamped
    ] == ["hop_s"]


def test_constants_that_the_run_does_not_determine_keep_their_defaults(fitted_run: FittedRun):
    calibration = fitted_run.calibration
    start = vars(fitted_run.planned.initial_constants)
    changed = {name for name, value in vars(calibration.constants).items() if value != start[name]}
    assert changed <= set(calibration.fitted_constants)
    assert "network_fraction" not in calibration.fitted_constants
    true = TRUE.train["policy"].update_s
    assert calibration.fitted_constants["update_s"].estimate.value == pytest.approx(true, rel=0.05)

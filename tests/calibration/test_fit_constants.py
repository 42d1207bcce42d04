"""Constants fitted to a run reproduce its timings in the cost model."""

from dataclasses import dataclass, fields, replace
from pathlib import Path

import pytest

from streamrl.calibration.fit_constants import CalibrationResult, fit_constants
from streamrl.calibration.fit_timings import FittedTimings, fit_timings
from streamrl.calibration.prediction import PlannedRun
from streamrl.calibration.run_trace import load_run_trace
from streamrl.placement.costs.cost_model import CostModel
from streamrl.placement.stage_timings import StageTimings
from tests.calibration.runs import TRUE, play, recipe, write_run


@dataclass(frozen=True)
class Made:
    """A run with its fitted timings and constants, and the cost model's timings with these."""

    planned: PlannedRun
    fitted: FittedTimings
    found: CalibrationResult

    @property
    def again(self) -> StageTimings:
        model = CostModel(self.planned.problem, self.found.constants)
        return model.predict_timings(self.planned.placement)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder: Path = tmp_path_factory.mktemp("made")
    config = recipe(folder)
    measured = load_run_trace(write_run(folder / "run", config, play(config)))
    planned = PlannedRun.from_trace(measured, measured.config)
    fitted = fit_timings(measured, planned.base_timings)
    found = fit_constants(fitted, planned.problem, planned.placement, planned.initial_constants)
    return Made(planned, fitted, found)


def test_a_cost_model_gives_the_fitted_timings_back(made: Made):
    assert not [name for name, one in made.found.fitted_constants.items() if one.is_clamped]
    again, wanted = made.again, made.fitted.timings
    # Size and recomputation of the KV cache come from the run's settings.
    settings = ("kv_tokens", "recompute_token_s")
    mine = replace(again.generator, **{k: vars(wanted.generator)[k] for k in settings})
    for field in fields(mine):
        value = vars(wanted.generator)[field.name]
        assert vars(mine)[field.name] == pytest.approx(value, rel=1e-6), field.name
    for name, value in vars(wanted.train["policy"]).items():
        assert vars(again.train["policy"])[name] == pytest.approx(value, rel=1e-6, abs=1e-12), name
    for name, value in vars(wanted.weights["generate"]).items():
        assert vars(again.weights["generate"])[name] == pytest.approx(value, rel=1e-6), name
    assert again.hop_s == pytest.approx(wanted.hop_s)
    assert again.step_s == pytest.approx(wanted.step_s)


def test_rule_batches_are_normalized_to_one_group(made: Made):
    whole = made.fitted.timings.score["reward"].batch_duration_s(32 * 4, 0)
    assert 32 * made.again.score["reward"].batch_duration_s(4, 0) == pytest.approx(whole)


def test_a_constant_beyond_its_bound_is_clamped(made: Made):
    slow = replace(made.fitted, timings=replace(made.fitted.timings, hop_s=100.0))
    found = fit_constants(
        slow, made.planned.problem, made.planned.placement, made.planned.initial_constants
    )
    assert found.constants.hop_s == 60
    assert [name for name, one in found.fitted_constants.items() if one.is_clamped] == ["hop_s"]


def test_constants_that_the_run_does_not_determine_keep_their_defaults(made: Made):
    found = made.found
    start = vars(made.planned.initial_constants)
    changed = {name for name, value in vars(found.constants).items() if value != start[name]}
    assert changed <= set(found.fitted_constants)
    assert "network_fraction" not in found.fitted_constants
    true = TRUE.train["policy"].update_s
    assert found.fitted_constants["update_s"].estimate.value == pytest.approx(true, rel=0.05)

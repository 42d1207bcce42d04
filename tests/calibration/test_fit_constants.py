"""The constants of a run give its timings back."""

from dataclasses import dataclass, fields, replace
from pathlib import Path

import pytest

from streamrl.calibration.fit_constants import Calibration, calibrate
from streamrl.calibration.fit_timings import Fitted, fit
from streamrl.calibration.prediction import PlannedRun
from streamrl.calibration.run_trace import read_run
from streamrl.placement import Timings
from streamrl.placement.costs import CostModel
from tests.calibration.runs import TRUE, play, recipe, write_run


@dataclass(frozen=True)
class Made:
    """A run, what is fitted to it, its constants, and what a cost model makes of these."""

    planned: PlannedRun
    fitted: Fitted
    found: Calibration

    @property
    def again(self) -> Timings:
        model = CostModel(self.planned.problem, self.found.constants)
        return model.timings(self.planned.placement)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder: Path = tmp_path_factory.mktemp("made")
    config = recipe(folder)
    measured = read_run(write_run(folder / "run", config, play(config)))
    planned = PlannedRun.of(measured, measured.config)
    fitted = fit(measured, planned.base)
    found = calibrate(fitted, planned.problem, planned.placement, planned.start)
    return Made(planned, fitted, found)


def test_a_cost_model_gives_the_fitted_timings_back(made: Made) -> None:
    assert not [name for name, one in made.found.determined.items() if one.is_cut]
    again, wanted = made.again, made.fitted.timings
    # Room for keys and values, and whether they are kept, is a matter of the run's settings.
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


def test_a_rule_takes_as_long_for_full_batches_one_group_at_a_time(made: Made) -> None:
    whole = made.fitted.timings.score["reward"].batch_of(32 * 4, 0)
    assert 32 * made.again.score["reward"].batch_of(4, 0) == pytest.approx(whole)


def test_what_is_beyond_the_bound_of_a_constant_is_cut_to_it(made: Made) -> None:
    slow = replace(made.fitted, timings=replace(made.fitted.timings, hop_s=100.0))
    found = calibrate(slow, made.planned.problem, made.planned.placement, made.planned.start)
    assert found.constants.hop_s == 60
    assert [name for name, one in found.determined.items() if one.is_cut] == ["hop_s"]


def test_what_a_run_says_nothing_of_keeps_its_default(made: Made) -> None:
    found = made.found
    start = vars(made.planned.start)
    changed = {name for name, value in vars(found.constants).items() if value != start[name]}
    assert changed <= set(found.determined)
    assert "network_fraction" not in found.determined
    true = TRUE.train["policy"].update_s
    assert found.determined["update_s"].found.value == pytest.approx(true, rel=0.05)

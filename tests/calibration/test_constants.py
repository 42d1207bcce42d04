"""The constants of a run give its timings back."""

from dataclasses import fields, replace
from pathlib import Path

import pytest

from streamrl.calibration.constants import calibrate
from streamrl.calibration.fit import fit
from streamrl.calibration.measured import read_run
from streamrl.calibration.prediction import Planned
from streamrl.placement.costs import CostModel
from tests.calibration.runs import TRUE, play, recipe, write_run


def test_a_cost_model_gives_the_fitted_timings_back(tmp_path: Path) -> None:
    config = recipe(tmp_path)
    measured = read_run(write_run(tmp_path / "run", config, play(config)))
    planned = Planned.of(measured, measured.config)
    fitted = fit(measured, planned.base)
    found = calibrate(fitted, planned.problem, planned.placement, planned.start)
    again = CostModel(planned.problem, found.constants).timings(planned.placement)
    cut = {name for name, one in found.determined.items() if one.is_cut}
    assert not cut
    wanted = fitted.timings
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


def test_a_rule_takes_as_long_for_full_batches_one_group_at_a_time(tmp_path: Path) -> None:
    config = recipe(tmp_path)
    measured = read_run(write_run(tmp_path / "run", config, play(config)))
    planned = Planned.of(measured, measured.config)
    fitted = fit(measured, planned.base)
    found = calibrate(fitted, planned.problem, planned.placement, planned.start)
    again = CostModel(planned.problem, found.constants).timings(planned.placement)
    whole = fitted.timings.score["reward"].batch_of(32 * 4, 0)
    assert 32 * again.score["reward"].batch_of(4, 0) == pytest.approx(whole)


def test_what_a_run_says_nothing_of_keeps_its_default(tmp_path: Path) -> None:
    config = recipe(tmp_path)
    measured = read_run(write_run(tmp_path / "run", config, play(config)))
    planned = Planned.of(measured, measured.config)
    found = calibrate(
        fit(measured, planned.base), planned.problem, planned.placement, planned.start
    )
    changed = {
        name for name, value in vars(found.constants).items() if value != vars(planned.start)[name]
    }
    assert changed <= set(found.determined)
    assert "network_fraction" not in found.determined
    assert found.determined["update_s"].found.value == pytest.approx(
        TRUE.train["policy"].update_s, rel=0.05
    )

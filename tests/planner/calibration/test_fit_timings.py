"""Fitting the spans of a simulated run recovers its timings."""

from dataclasses import replace
from pathlib import Path

import pytest

from streamrl.planner.calibration.fit_timings import FittedTimings, fit_timings
from streamrl.planner.calibration.prediction import PlannedRun
from streamrl.planner.calibration.run_trace import load_run_trace
from streamrl.planner.problem.stage_timings import StageTimings
from tests.planner.calibration.runs import TRUE, play, recipe, write_run


def fit_simulated_run(
    folder: Path, timings: StageTimings, *overrides: str, seed: int = 0
) -> FittedTimings:
    config = recipe(folder, *overrides)
    simulated = play(config, timings, seed=seed)
    measured = load_run_trace(write_run(folder / "run", config, simulated))
    planned = PlannedRun.from_trace(measured, measured.config)
    base = planned.base_timings
    like = replace(
        base.generator,
        weights_s=timings.generator.weights_s,
        kv_token_s=timings.generator.kv_token_s,
        compute_rollout_s=timings.generator.compute_rollout_s,
    )
    return fit_timings(measured, replace(base, generator=like))


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("staleness", [0, 1])
def test_fitting_recovers_the_coefficients_of_a_run(tmp_path: Path, staleness: int, seed: int):
    timings = fit_simulated_run(
        tmp_path, TRUE, f"pipeline.max_staleness={staleness}", seed=seed
    ).timings
    generator, true = timings.generator, TRUE.generator
    for name in ("step_s", "rollout_s", "prefill_token_s"):
        assert vars(generator)[name] == pytest.approx(vars(true)[name], rel=0.05), name
    train, true_train = timings.train["policy"], TRUE.train["policy"]
    assert train.micro_batch_s == pytest.approx(true_train.micro_batch_s, rel=0.05)
    assert train.token_s == pytest.approx(true_train.token_s, rel=0.05)
    assert train.update_s == pytest.approx(true_train.update_s, rel=0.05)
    score, true_score = timings.score["reward"], TRUE.score["reward"]
    # Most batches are one group, so the time per batch and per group cannot be separated.
    assert score.batch_duration_s(4, 0) == pytest.approx(
        true_score.batch_duration_s(4, 0), rel=0.05
    )
    assert timings.hop_s == pytest.approx(TRUE.hop_s, rel=0.05)
    assert timings.step_s == pytest.approx(TRUE.step_s, rel=0.05)
    assert timings.weights["generate"].pull_s == pytest.approx(0.006, rel=0.05)
    assert timings.weights["generate"].publish_s == pytest.approx(0.004, rel=0.05)


def test_pull_time_excludes_the_wait_for_a_decode_step(tmp_path: Path):
    slow = replace(TRUE, generator=replace(TRUE.generator, step_s=0.06))
    timings = fit_simulated_run(tmp_path, slow, "pipeline.max_staleness=1").timings
    # A pull of 6 ms waits for half a decode step on average, 30 ms.
    assert timings.weights["generate"].pull_s < 0.006 + 0.02

"""Simulations with fitted timings predict measured runs."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from streamrl.errors import ConfigError
from streamrl.placement.clusters import Cluster
from streamrl.planner.calibration.fit_timings import fit_timings
from streamrl.planner.calibration.prediction import PlannedRun, SteadyMetrics, predict_metrics
from streamrl.planner.calibration.run_trace import load_run_trace
from tests.planner.calibration.runs import play, recipe, write_run


@pytest.mark.parametrize(
    ("bound", "other_bound", "mode"),
    [(0, 1, "colocated"), (1, 0, "disaggregated")],
)
def test_a_run_predicts_another_with_a_different_max_staleness(
    tmp_path: Path, bound: int, other_bound: int, mode: str
):
    runs = []
    for staleness in (bound, other_bound):
        words = (f"pipeline.max_staleness={staleness}", f"placement.mode={mode}")
        config = recipe(tmp_path, *words)
        simulated = play(config, steps=24, seed=staleness)
        runs.append(load_run_trace(write_run(tmp_path / f"run{staleness}", config, simulated)))
    source, target = runs
    timings = fit_timings(source, PlannedRun.from_trace(source, source.config).base_timings).timings
    figures = predict_metrics(PlannedRun.from_trace(source, target.config), timings)
    comparison = figures.compare_with(SteadyMetrics.from_run(target))
    assert abs(comparison["step_s"]["error"]) < 0.1, comparison
    assert figures.staleness_mean == pytest.approx(target.staleness_mean, abs=0.1)
    for stage, idle in target.idle_fractions.items():
        assert figures.idle[stage] == pytest.approx(idle, abs=0.1), stage


def test_errors_are_differences_for_idle_and_relative_otherwise():
    predicted = SteadyMetrics(1.1, {"train": 0.10}, 0.0)
    measured = SteadyMetrics(1.0, {"train": 0.05}, 0.0)
    errors = {
        name: comparison["error"] for name, comparison in predicted.compare_with(measured).items()
    }
    expected = {"step_s": 0.1, "idle/train": 0.05, "staleness_mean": 0.0}
    assert errors == pytest.approx(expected)


def test_a_cluster_must_hold_the_run(tmp_path: Path):
    config = recipe(tmp_path, "generator.replicas=3")
    measured = load_run_trace(write_run(tmp_path / "run", config, play(config)))
    with pytest.raises(ConfigError, match="the run uses 4 devices"):
        PlannedRun.from_trace(measured, measured.config, Cluster.from_text("2xCPU"))


def test_a_gpu_run_requires_the_cluster_option(tmp_path: Path):
    config = recipe(tmp_path)
    measured = load_run_trace(write_run(tmp_path / "run", config, play(config)))
    events = tmp_path / "run" / "events.jsonl"
    events.write_text(events.read_text().replace('"on_gpu": false', '"on_gpu": true'))
    assert load_run_trace(tmp_path / "run").cores == 0
    with pytest.raises(ConfigError, match="--cluster: missing"):
        PlannedRun.from_trace(load_run_trace(tmp_path / "run"), measured.config)


def test_simulation_samples_the_filtered_fraction_of_the_run(tmp_path: Path):
    config = recipe(tmp_path)
    run = write_run(tmp_path / "run", config, play(config))
    assert load_run_trace(run).filtered_fraction == 0.0
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row["ledger/filtered"] = row["ledger/trained"] / 3
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    measured = load_run_trace(run)
    assert measured.filtered_fraction == pytest.approx(0.25)
    assert PlannedRun.from_trace(
        measured, config
    ).problem.workload.filtered_fraction == pytest.approx(0.25)


def test_the_chosen_placement_is_read_from_the_run(tmp_path: Path):
    config = recipe(tmp_path, "placement.mode=auto", "placement.cpus=1")
    simulated = play(replace(config, placement=replace(config.placement, mode="colocated")))
    run = write_run(tmp_path / "run", config, simulated)
    assert load_run_trace(run).config.placement.mode == "auto"
    events = run / "events.jsonl"
    events.write_text(events.read_text().replace('"auto"', '"colocated"'))
    measured = load_run_trace(run)
    assert measured.config.placement.mode == "colocated"
    assert PlannedRun.from_trace(measured, measured.config).placement.overlaps("generate", "train")

"""Simulator against real runs: `python -m benchmarks.simulator_vs_runs` prints one JSON object.

Runs three recipes of the arithmetic task on this machine's cores, each on policy (max_staleness 0)
and one step ahead (1), with two seeds. Fits timings to a run, simulates another run with these, and
compares predicted with measured step time (mean and median), idle fraction of each stage and
staleness. `same_mode`: timings from the run with the other seed and the same bound; `other_mode`:
other seed and other bound; `itself`: from the predicted run, which shows the error of the
simulation alone. Errors are relative; for idle fractions, differences.

With --runs, run directories are kept there, and existing ones are reused. The machine should be
idle otherwise.
"""

import argparse
import contextlib
import tempfile
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.command import ROOT, BenchmarkParser, at_least, report_progress, run_benchmark
from benchmarks.runs import load_quiet, make_arithmetic, train_run
from streamrl.actors.engine_factory import RealEngineFactory
from streamrl.planner.calibration.fit_timings import fit_timings
from streamrl.planner.calibration.prediction import PlannedRun, SteadyMetrics, predict_metrics
from streamrl.planner.calibration.run_trace import RunTrace, load_run_trace

RECIPES = ("grpo", "ppo", "remax")
MODES = {"on_policy": 0, "ahead": 1}
"""max_staleness by mode."""
OVER = {"on_policy": "ahead", "ahead": "on_policy"}
OTHER = {0: 1, 1: 0}
"""By seed, the seed of the runs from which its runs are predicted."""
SOURCES = ("same_mode", "other_mode", "itself")
Key = tuple[str, str, int]
"""Recipe, mode and seed of a run."""


def make_parser() -> BenchmarkParser:
    """Declare the runs."""
    parser = BenchmarkParser("simulator_vs_runs", __doc__)
    parser.add_argument("--runs", type=Path, metavar="DIR", help="keep run directories there")
    parser.add_argument("--steps", type=at_least(1), default=36, help="steps of each run")
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.set_quick(steps=12, recipes=["grpo"], modes=["ahead"])
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Make missing runs and print the results."""
    run_benchmark(make_parser(), measure, argv)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Make every missing run, and predict each."""
    make_arithmetic()
    with contextlib.ExitStack() as end:
        folder = arguments.runs or Path(end.enter_context(tempfile.TemporaryDirectory()))
        runs = {
            key: load_or_train_run(folder, *key, steps=arguments.steps)
            for key in product(arguments.recipes, arguments.modes, OTHER)
        }
        results = {recipe: compare_runs(recipe, runs) for recipe in arguments.recipes}
    return {"worst_error": find_worst_errors(results), "recipes": results}


def load_or_train_run(folder: Path, recipe: str, mode: str, seed: int, *, steps: int) -> RunTrace:
    """Return the run of a recipe in a mode; train it if missing."""
    name = f"{recipe}_{mode}_{seed}"
    if not (folder / name / "metrics.jsonl").exists():
        report_progress(f"{name}: {steps} steps")
        settings = [f"pipeline.max_staleness={MODES[mode]}", f"run.seed={seed}"]
        settings += [f"run.dir={folder}", f"run.name={name}", f"run.steps={steps}"]
        settings += ["run.overwrite=true", "data.eval=''", "checkpoint.every=0"]
        config = load_quiet(ROOT / f"configs/{recipe}_arithmetic.yaml", settings)
        train_run(config, RealEngineFactory())
    return load_run_trace(folder / name)


def compare_runs(recipe: str, runs: Mapping[Key, RunTrace]) -> dict[str, Any]:
    """Compare each run of a recipe with predictions from the other runs and from itself."""
    results = {}
    for (mode, over), (seed, other) in product(OVER.items(), OTHER.items()):
        keys = ((recipe, mode, other), (recipe, over, other), (recipe, mode, seed))
        sources = {name: runs[key] for name, key in zip(SOURCES, keys, strict=True) if key in runs}
        if (measured := sources.get("itself")) is not None:
            results[f"{mode}, seed {seed}"] = {
                "steps": len(measured.steps),
                "left_out": dict(measured.excluded_steps),
                **{name: predict_run(measured, source) for name, source in sources.items()},
            }
    return results


def predict_run(measured: RunTrace, source: RunTrace) -> dict[str, dict[str, float]]:
    """Predict a run from the timings and lengths of another."""
    of_source = PlannedRun.from_trace(source, source.config)
    timings = fit_timings(source, of_source.base_timings).timings
    figures = predict_metrics(PlannedRun.from_trace(source, measured.config), timings)
    return figures.compare_with(SteadyMetrics.from_run(measured))


def find_worst_errors(results: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return by source of timings and metric the error furthest from 0."""
    errors: dict[str, dict[str, float]] = {source: {} for source in SOURCES}
    for runs, source in product(results.values(), SOURCES):
        for run in runs.values():
            for name, one in run.get(source, {}).items():
                own = errors[source]
                # Over all stages.
                figure = name.partition("/")[0]
                own[figure] = max(own.get(figure, 0.0), one["error"], key=abs)
    return errors


if __name__ == "__main__":
    main()

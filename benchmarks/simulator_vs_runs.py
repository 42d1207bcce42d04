"""The simulator against reality: `python -m benchmarks.simulator_vs_runs` prints one JSON object.

Three recipes of the arithmetic task are played on this machine's cores, each on policy
(max_staleness 0) and one step ahead (1), twice. The timings of a run are fitted to another run,
which has another seed, and simulated: step time (mean and median), idle of each stage and
staleness, predicted and measured. `same_mode` is from the run with the same bound, `other_mode`
from that with the other one, and `itself` from the run itself: what a simulation gets wrong even
so. An error is a part of what was measured; of idle time, which is a part of a step's, it is the
difference.

With --runs the run directories are kept there, and those that are there are not played again. The
machine should have nothing else to do.
"""

import argparse
import contextlib
import tempfile
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.command import ROOT, BenchmarkParser, at_least, report_progress, run_benchmark
from benchmarks.runs import load_quiet, make_arithmetic, play
from streamrl.actors.engine_factory import RealEngineFactory
from streamrl.calibration.fit_timings import fit_timings
from streamrl.calibration.prediction import PlannedRun, SteadyMetrics, predict_metrics
from streamrl.calibration.run_trace import RunTrace, load_run_trace

RECIPES = ("grpo", "ppo", "remax")
MODES = {"on_policy": 0, "ahead": 1}
"""By name, the bound of staleness."""
OVER = {"on_policy": "ahead", "ahead": "on_policy"}
OTHER = {0: 1, 1: 0}
"""By seed, that of the runs which runs with it are predicted from."""
SOURCES = ("same_mode", "other_mode", "itself")
Key = tuple[str, str, int]
"""A run: its recipe, mode and seed."""


def make_parser() -> BenchmarkParser:
    """Declare which runs are played."""
    parser = BenchmarkParser("simulator_vs_runs", __doc__)
    parser.add_argument("--runs", type=Path, metavar="DIR", help="keep run directories there")
    parser.add_argument("--steps", type=at_least(1), default=36, help="steps of each run")
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.set_quick(steps=12, recipes=["grpo"], modes=["ahead"])
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Play what is not there, and print the figures."""
    run_benchmark(make_parser(), measure, argv)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Play every run that is not there, and predict each."""
    make_arithmetic()
    with contextlib.ExitStack() as end:
        folder = arguments.runs or Path(end.enter_context(tempfile.TemporaryDirectory()))
        runs = {
            key: played(folder, *key, steps=arguments.steps)
            for key in product(arguments.recipes, arguments.modes, OTHER)
        }
        found = {recipe: compared(recipe, runs) for recipe in arguments.recipes}
    return {"worst_error": worst(found), "recipes": found}


def played(folder: Path, recipe: str, mode: str, seed: int, *, steps: int) -> RunTrace:
    """Return the run of a recipe in a mode; play it unless it is there."""
    name = f"{recipe}_{mode}_{seed}"
    if not (folder / name / "metrics.jsonl").exists():
        report_progress(f"{name}: {steps} steps")
        settings = [f"pipeline.max_staleness={MODES[mode]}", f"run.seed={seed}"]
        settings += [f"run.dir={folder}", f"run.name={name}", f"run.steps={steps}"]
        settings += ["run.overwrite=true", "data.eval=''", "checkpoint.every=0"]
        config = load_quiet(ROOT / f"configs/{recipe}_arithmetic.yaml", settings)
        play(config, RealEngineFactory())
    return load_run_trace(folder / name)


def compared(recipe: str, runs: Mapping[Key, RunTrace]) -> dict[str, Any]:
    """Return what is predicted of each run of a recipe, from the others and from itself."""
    found = {}
    for (mode, over), (seed, other) in product(OVER.items(), OTHER.items()):
        keys = ((recipe, mode, other), (recipe, over, other), (recipe, mode, seed))
        sources = {name: runs[key] for name, key in zip(SOURCES, keys, strict=True) if key in runs}
        if (measured := sources.get("itself")) is not None:
            found[f"{mode}, seed {seed}"] = {
                "steps": len(measured.steps),
                "left_out": dict(measured.excluded_steps),
                **{name: predicted(measured, source) for name, source in sources.items()},
            }
    return found


def predicted(measured: RunTrace, source: RunTrace) -> dict[str, dict[str, float]]:
    """Figures of a run, from the timings and the lengths of another."""
    of_source = PlannedRun.from_trace(source, source.config)
    timings = fit_timings(source, of_source.base_timings).timings
    figures = predict_metrics(PlannedRun.from_trace(source, measured.config), timings)
    return figures.compare_with(SteadyMetrics.from_trace(measured))


def worst(found: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """By where timings come from and by figure, the error that is furthest from 0."""
    errors: dict[str, dict[str, float]] = {source: {} for source in SOURCES}
    for runs, source in product(found.values(), SOURCES):
        for run in runs.values():
            for name, one in run.get(source, {}).items():
                own = errors[source]
                # Of all stages together.
                figure = name.partition("/")[0]
                own[figure] = max(own.get(figure, 0.0), one["error"], key=abs)
    return errors


if __name__ == "__main__":
    main()

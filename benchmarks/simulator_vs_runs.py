"""The simulator against reality: `python -m benchmarks.simulator_vs_runs` prints one JSON object.

Three recipes of the arithmetic task are played on this machine's cores, each on policy
(max_staleness 0) and one step ahead (1). The timings of each run are fitted to the other run of its
recipe, which has another seed and another bound, and simulated: step time (mean and median), idle
of each stage and staleness, predicted and measured. `itself` is the same with timings fitted to the
run itself: what a simulation gets wrong even so.

With --runs the run directories are kept there, and those that are there are not played again. The
machine should have nothing else to do. The arithmetic task must have been made:
`python examples/arithmetic/make.py`.
"""

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.overlap import QUIET
from streamrl.actors.real_engines import RealEngines
from streamrl.calibration.fit import fit
from streamrl.calibration.measured import Measured, read_run
from streamrl.calibration.prediction import Figures, PlannedRun, predict
from streamrl.cli.train import train
from streamrl.config import load_config

RECIPES = ("grpo", "ppo", "remax")
MODES: Mapping[str, Sequence[str]] = {
    "on_policy": ("pipeline.max_staleness=0", "run.seed=0"),
    "ahead": ("pipeline.max_staleness=1", "run.seed=1"),
}
"""Settings of the runs of a recipe; each is predicted from the other."""
OVER = {"on_policy": "ahead", "ahead": "on_policy"}


def main(argv: Sequence[str] | None = None) -> None:
    """Play what is not there, and print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=Path, metavar="DIR", help="keep run directories there")
    parser.add_argument("--steps", type=int, default=36, help="steps of each run")
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--json", action="store_true", help="the object on one line")
    arguments = parser.parse_args(argv)
    with contextlib.redirect_stdout(sys.stderr), contextlib.ExitStack() as end:
        folder = arguments.runs or Path(end.enter_context(tempfile.TemporaryDirectory()))
        runs = {
            key: played(folder, *key, steps=arguments.steps)
            for key in product(arguments.recipes, MODES)
        }
        found = {recipe: compared(recipe, runs) for recipe in arguments.recipes}
    summary = {"median_error": typical(found), "recipes": found}
    print(json.dumps(summary, indent=None if arguments.json else 1))


def played(folder: Path, recipe: str, mode: str, *, steps: int) -> Measured:
    """The run of a recipe in a mode, played unless it is there."""
    name = f"{recipe}_{mode}"
    if not (folder / name / "metrics.jsonl").exists():
        settings = [*QUIET, *MODES[mode], f"run.dir={folder}", f"run.name={name}"]
        more = [f"run.steps={steps}", "run.overwrite=true", "data.eval=''", "checkpoint.every=0"]
        config = load_config(Path(f"configs/{recipe}_arithmetic.yaml"), [*settings, *more])
        train(config, None, RealEngines())
    return read_run(folder / name)


def compared(recipe: str, runs: Mapping[tuple[str, str], Measured]) -> dict[str, Any]:
    """By mode, what was predicted of its run, from the other one and from itself."""
    found = {}
    for mode in MODES:
        measured = runs[recipe, mode]
        found[mode] = {
            "steps": len(measured.steps),
            "left_out": dict(measured.left_out),
            "other": predicted(measured, runs[recipe, OVER[mode]]),
            "itself": predicted(measured, measured),
        }
    return found


def predicted(measured: Measured, source: Measured) -> dict[str, dict[str, float]]:
    """Figures of a run, from the timings and the lengths of another."""
    of_source = PlannedRun.of(source, source.config)
    timings = fit(source, of_source.base).timings
    figures = predict(PlannedRun.of(source, measured.config), timings)
    return figures.against(Figures.of(measured))


def typical(found: Mapping[str, Any]) -> dict[str, float]:
    """By figure, the median of how far predictions from other runs are off."""
    errors: dict[str, list[float]] = {}
    for runs in found.values():
        for run in runs.values():
            for name, one in run["other"].items():
                errors.setdefault(name, []).append(abs(one["error"]))
    return {name: statistics.median(own) for name, own in errors.items()}


if __name__ == "__main__":
    main()

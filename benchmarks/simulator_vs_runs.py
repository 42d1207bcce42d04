"""The simulator against reality: `python -m benchmarks.simulator_vs_runs` prints one JSON object.

Three recipes of the arithmetic task are played on this machine's cores, each on policy
(max_staleness 0) and one step ahead (1), twice. The timings of a run are fitted to another run,
which has another seed, and simulated: step time (mean and median), idle of each stage and
staleness, predicted and measured. `same_mode` is from the run with the same bound, `other_mode`
from that with the other one, and `itself` from the run itself: what a simulation gets wrong even
so. An error is a part of what was measured; of idle time, which is a part of a step's, it is the
difference.

With --runs the run directories are kept there, and those that are there are not played again. The
machine should have nothing else to do. The arithmetic task must have been made:
`python examples/arithmetic/make.py`.
"""

import argparse
import contextlib
import json
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
MODES = {"on_policy": 0, "ahead": 1}
"""By name, the bound of staleness."""
OVER = {"on_policy": "ahead", "ahead": "on_policy"}
OTHER = {0: 1, 1: 0}
"""By seed, that of the runs which runs with it are predicted from."""
SOURCES = ("same_mode", "other_mode", "itself")
Key = tuple[str, str, int]
"""A run: its recipe, mode and seed."""


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
            for key in product(arguments.recipes, MODES, OTHER)
        }
        found = {recipe: compared(recipe, runs) for recipe in arguments.recipes}
    summary = {"worst_error": worst(found), "recipes": found}
    print(json.dumps(summary, indent=None if arguments.json else 1))


def played(folder: Path, recipe: str, mode: str, seed: int, *, steps: int) -> Measured:
    """The run of a recipe in a mode, played unless it is there."""
    name = f"{recipe}_{mode}_{seed}"
    if not (folder / name / "metrics.jsonl").exists():
        settings = [*QUIET, f"pipeline.max_staleness={MODES[mode]}", f"run.seed={seed}"]
        settings += [f"run.dir={folder}", f"run.name={name}"]
        more = [f"run.steps={steps}", "run.overwrite=true", "data.eval=''", "checkpoint.every=0"]
        config = load_config(Path(f"configs/{recipe}_arithmetic.yaml"), [*settings, *more])
        train(config, None, RealEngines())
    return read_run(folder / name)


def compared(recipe: str, runs: Mapping[Key, Measured]) -> dict[str, Any]:
    """Of each run of a recipe, what was predicted of it, from others and from itself."""
    found = {}
    for (mode, over), (seed, other) in product(OVER.items(), OTHER.items()):
        measured = runs[recipe, mode, seed]
        found[f"{mode}, seed {seed}"] = {
            "steps": len(measured.steps),
            "left_out": dict(measured.left_out),
            "same_mode": predicted(measured, runs[recipe, mode, other]),
            "other_mode": predicted(measured, runs[recipe, over, other]),
            "itself": predicted(measured, measured),
        }
    return found


def predicted(measured: Measured, source: Measured) -> dict[str, dict[str, float]]:
    """Figures of a run, from the timings and the lengths of another."""
    of_source = PlannedRun.of(source, source.config)
    timings = fit(source, of_source.base).timings
    figures = predict(PlannedRun.of(source, measured.config), timings)
    return figures.against(Figures.of(measured))


def worst(found: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """By where timings come from and by figure, the error that is furthest from 0."""
    errors: dict[str, dict[str, float]] = {source: {} for source in SOURCES}
    for runs, source in product(found.values(), SOURCES):
        for run in runs.values():
            for name, one in run[source].items():
                own = errors[source]
                # Of all stages together.
                figure = name.partition("/")[0]
                own[figure] = max(own.get(figure, 0.0), one["error"], key=abs)
    return errors


if __name__ == "__main__":
    main()

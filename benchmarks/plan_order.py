"""The planner's order of placements against real runs: `python -m benchmarks.plan_order`.

Trains one PPO task in each placement on three devices, and simulates the same configs. A device is
a share of a core (benchmarks/core_shares.py), so three of them fit a machine of two cores and other
work on the machine does not slow them down; `late` is the share of device time that was. The
constants of all simulations come from one calibration, on a run with another seed in a placement
that is not compared: `streamrl calibrate` on generator, policy and critic apart, on policy.

Policy and critic are random models of 1 M parameters with 32 tokens, one of which ends a
completion, so lengths are geometric. A run's figure is its mean step, as steps with generation
ahead come in bursts, without the first three and the last. Rounds run every placement once; results
are medians over rounds, `spread` is their range over the median.

loss           measured step of the planner's first over the best measured step, minus 1
spearman, kendall    correlation of simulated and measured steps
ties           pairs of placements whose measured ranges overlap
inverted       other pairs that the planner orders the other way round

With --runs, run directories are kept there, and existing ones are reused.
"""

import argparse
import contextlib
import io
import json
import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from benchmarks.command import (
    BenchmarkError,
    BenchmarkParser,
    at_least,
    report_progress,
    run_benchmark,
)
from benchmarks.core_shares import CoreShares
from benchmarks.placement_modes import NUM_WORDS, WARM_UP_STEPS, write_rows
from benchmarks.random_model import write_model
from benchmarks.runs import load_quiet, train_run
from streamrl.cli import main as cli

DEVICES = 3
MAX_SLOTS = 8
"""Devices, and the slots of rewards, which have none."""
ONE_POOL = ("placement.mode=mixed", "placement.pools=[{policy: 1, critic: 1}]")
ACTORS = ("placement.mode=mixed", "placement.pools=[{policy: 1, generator: 1}]")
APART = ("placement.mode=disaggregated",)


@dataclass(frozen=True)
class ComparedRun:
    """Settings of a placement, its numbers of ranks, and max_staleness."""

    settings: Sequence[str]
    bound: int
    policy: int = 1
    critic: int = 1
    generators: int = 1

    def to_settings(self) -> list[str]:
        return [
            *self.settings,
            f"trainer.world_size={self.policy}",
            f"critic.trainer.world_size={self.critic}",
            f"generator.replicas={self.generators}",
            f"pipeline.max_staleness={self.bound}",
        ]


CALIBRATED = ComparedRun(APART, 0)
COLOCATED = ("placement.mode=colocated",)
RUNS: Mapping[str, ComparedRun] = {
    "colocated, 0": ComparedRun(COLOCATED, 0, 3, 3, 3),
    "colocated, 1": ComparedRun(COLOCATED, 1, 3, 3, 3),
    "1 trains, 2 generate, 1": ComparedRun(ONE_POOL, 1, 1, 1, 2),
    "2 train, 1 generates, 1": ComparedRun(ONE_POOL, 1, 2, 2, 1),
    "critic apart, 1": ComparedRun(APART, 1),
    "critic apart of 2 actors, 0": ComparedRun(ACTORS, 0, 2, 1, 2),
}
"""By devices and max_staleness."""
MIN_CALIBRATION_STEPS = WARM_UP_STEPS + 6
SIMULATED_STEPS = 60
RECIPE = """
model: {{path: {folder}/model}}
data: {{train: {folder}/rows.jsonl}}
run: {{dir: {folder}/runs, overwrite: true}}
algorithm: {{name: ppo, group_size: 4}}
pipeline: {{groups_per_step: 20, micro_batch_tokens: 1024}}
generator: {{max_new_tokens: 96, max_concurrent_rollouts: 128}}
rewards: [{{kind: length, unit: words, least: 32, tolerance: 32}}]
# Too small to change the lengths of completions.
trainer: {{lr: 1.0e-7}}
critic: {{trainer: {{lr: 1.0e-7}}}}
# A fraction of a step.
placement: {{slice_s: 0.5}}
"""


def make_parser() -> BenchmarkParser:
    """Declare the runs."""
    parser = BenchmarkParser("plan_order", __doc__)
    parser.add_argument("--runs", type=Path, metavar="DIR", help="keep run directories there")
    parser.add_argument("--steps", type=at_least(5), default=10, help="steps of each run")
    parser.add_argument("--rounds", type=at_least(1), default=2, help="runs of each placement")
    parser.add_argument("--share", type=float, default=0.2, help="share of a core of a device")
    parser.add_argument("--placements", nargs="+", choices=RUNS, default=list(RUNS))
    parser.set_quick(steps=6, rounds=1, share=1.0, placements=list(RUNS)[::4])
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run all placements and print the results."""
    run_benchmark(make_parser(), measure, argv)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Calibrate, run every placement in turn, and compare with the simulations."""
    with contextlib.ExitStack() as end:
        folder = arguments.runs or Path(end.enter_context(tempfile.TemporaryDirectory()))
        recipe = write_inputs(folder)
        steps = max(arguments.steps, MIN_CALIBRATION_STEPS)
        train(recipe, "calibrated", [*CALIBRATED.to_settings(), "run.seed=1"], steps, arguments)
        constants = folder / "constants.yaml"
        run_streamrl("calibrate", folder / "runs" / "calibrated", "-o", constants)
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in arguments.placements}
        for number in range(arguments.rounds):
            for name, results in runs.items():
                run = f"{name.translate(str.maketrans(' ', '_', ','))}-{number}"
                settings = RUNS[name].to_settings()
                results.append(train(recipe, run, settings, arguments.steps, arguments))
        simulated = {name: simulate(recipe, RUNS[name], constants) for name in runs}
    return compare_orders(simulated, runs) | {"share": arguments.share, "load": os.getloadavg()}


def write_inputs(folder: Path) -> Path:
    """Write model, prompts and recipe into a folder; return the recipe."""
    folder.mkdir(parents=True, exist_ok=True)
    write_model(1, folder / "model", num_words=NUM_WORDS)
    write_rows(folder / "rows.jsonl")
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE.format(folder=folder))
    return recipe


def train(
    recipe: Path, name: str, settings: Sequence[str], steps: int, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Train a run if missing; return its mean step, idle fractions and share of late time."""
    run_dir = recipe.parent / "runs" / name
    engines = CoreShares(arguments.share, recipe.parent / f"{name}.devices")
    settings = [*settings, f"run.steps={steps}", f"run.name={name}"]
    config = load_quiet(recipe, settings)
    if not (run_dir / "metrics.jsonl").exists():
        report_progress(f"{name}: {steps} steps")
        engines.make_devices(MAX_SLOTS)
        train_run(config, engines)
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    # The same prompts of every run; one step ahead, the stream fills first and drains last.
    rows = [json.loads(line) for line in lines][WARM_UP_STEPS + 1 : -1]
    seconds = [row["time/step_s"] for row in rows]
    stages = [call.stage for call in config.dataflow.ordered_calls]
    idle = {s: float(np.average([r[f"idle/{s}"] for r in rows], weights=seconds)) for s in stages}
    late = engines.read_late_fraction()
    return {"step_s": statistics.fmean(seconds), "idle": idle, "late": late}


def run_streamrl(*words: object) -> str:
    """Run a command in this process; return its output."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        if cli.main([*map(str, words)]):
            raise BenchmarkError(f"streamrl {words[0]}: failed, see above")
    return output.getvalue()


def simulate(recipe: Path, run: ComparedRun, constants: Path) -> dict[str, Any]:
    """Return the simulated step and idle fractions of a placement."""
    options = ["--cluster", f"{DEVICES}xCPU", "--constants", constants, "--json"]
    options += ["--lengths", recipe.parent / "runs" / "calibrated", "--steps", SIMULATED_STEPS]
    figures: dict[str, Any] = json.loads(
        run_streamrl("simulate", recipe, *run.to_settings(), *options)
    )
    return figures


def compare_orders(
    simulated: Mapping[str, Mapping[str, Any]], runs: Mapping[str, Sequence[Mapping[str, Any]]]
) -> dict[str, Any]:
    """Compare the order of simulated with that of measured steps."""
    steps = {name: [run["step_s"] for run in results] for name, results in runs.items()}
    measured = {name: statistics.median(seconds) for name, seconds in steps.items()}
    predicted = {name: figures["step_s"] for name, figures in simulated.items()}
    orders = {
        "planner": sorted(predicted, key=predicted.__getitem__),
        "measured": sorted(measured, key=measured.__getitem__),
    }
    pairs = [sorted(pair, key=measured.__getitem__) for pair in combinations(steps, 2)]
    ties = [[a, b] for a, b in pairs if max(steps[a]) >= min(steps[b])]
    values = [list(predicted.values()), [measured[name] for name in predicted]]
    return {
        "orders": orders,
        "spearman": float(stats.spearmanr(*values).statistic),
        "kendall": float(stats.kendalltau(*values).statistic),
        "loss": measured[orders["planner"][0]] / min(measured.values()) - 1,
        "ties": ties,
        "inverted": [p for p in pairs if p not in ties and predicted[p[0]] > predicted[p[1]]],
        "placements": {
            name: {
                "simulated_s": predicted[name],
                "measured_s": measured[name],
                "error": predicted[name] / measured[name] - 1,
                "spread": (max(steps[name]) - min(steps[name])) / measured[name],
                "late": max(run["late"] for run in runs[name]),
                "idle": {
                    stage: [simulated[name]["idle"][stage], idle]
                    for stage, idle in runs[name][0]["idle"].items()
                },
            }
            for name in orders["measured"]
        },
    }


if __name__ == "__main__":
    main()

"""RL from a base that solves nothing: `python -m benchmarks.warm_start` prints one JSON object.

The example countdown: a gate measures pass@8 of an untrained model on the training problems and
refuses RL, sft on demonstrations makes the base, the gate lets it pass, and GRPO trains it. `cold`
is GRPO from the untrained model without gate, the same number of steps. Results are medians over
the seeds with minimum and maximum; pass_at_1 on held-out problems.
"""

import argparse
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.command import (
    ROOT,
    BenchmarkParser,
    at_least,
    report_progress,
    run_benchmark,
    run_command,
)
from benchmarks.distill import list_scores
from benchmarks.runs import MAKE_S, load_quiet, train_run
from benchmarks.staleness import summarize_seeds
from streamrl.actors.engine_factory import RealEngineFactory
from streamrl.errors import ConfigError

BUILD = ROOT / "examples" / "countdown" / "build"
BOUND = 0.2
"""Least pass@8 of the model that RL starts from."""
WARM = (
    "algorithm={name: sft}",
    "pipeline.groups_per_step=64",
    f"data.train={BUILD}/demonstrations.parquet",
    *("trainer.backend=torch", "trainer.optimizer=muon"),
    *("trainer.lr=3.0e-3", "trainer.lr_schedule=linear"),
    "checkpoint.at_end=true",
)


def make_parser() -> BenchmarkParser:
    """Declare the lengths of the runs."""
    parser = BenchmarkParser("warm_start", __doc__)
    parser.add_argument("--warm-steps", type=at_least(1), default=400, help="steps of sft")
    parser.add_argument("--steps", type=at_least(1), default=80, help="steps of GRPO")
    parser.add_argument("--seeds", type=at_least(0), nargs="+", default=[0, 1, 2])
    parser.set_quick(warm_steps=5, steps=2, seeds=[0])
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Make all runs and print the results."""
    run_benchmark(make_parser(), measure, argv)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    script = ROOT / "examples" / "countdown" / "make.py"
    run_command([sys.executable, str(script)], "making countdown", timeout_s=MAKE_S)
    figures = summarize_seeds(measure_seed(arguments, seed) for seed in arguments.seeds)
    shown = {name: vars(arguments)[name] for name in ("warm_steps", "steps", "seeds")}
    return {**shown, "bound": BOUND, **figures}


def measure_seed(arguments: argparse.Namespace, seed: int) -> dict[str, float]:
    """Return pass@8 of the untrained model, and pass@1 of each start, before and after GRPO."""
    with tempfile.TemporaryDirectory() as folder:
        run = [f"run.dir={folder}", f"run.seed={seed}", "checkpoint.every=0"]
        climb = [*run, f"run.steps={arguments.steps}", "evaluation.at_start=true"]
        climb += ["evaluation.at_end=true", "evaluation.every=0"]
        untrained = f"model.path={BUILD}/untrained"
        report_progress(f"seed {seed}: the gate")
        covered = find_coverage([*climb, untrained, "run.name=gate"])
        report_progress(f"seed {seed}: {arguments.warm_steps} steps of sft")
        warm = [*run, untrained, "run.name=warm", f"run.steps={arguments.warm_steps}", *WARM]
        train(warm)
        (made,) = Path(folder, "warm", "checkpoints").glob("step_*/model")
        report_progress(f"seed {seed}: {arguments.steps} steps of GRPO, warm and cold")
        results = {"untrained_pass_at_8": covered}
        for name, start in {"warm": f"model.path={made}", "cold": untrained}.items():
            scores = train([*climb, start, f"run.name=from_{name}"])
            results |= {f"{name}_before": scores[0], f"{name}_after": scores[max(scores)]}
        return results


def train(settings: Sequence[str]) -> dict[int, float]:
    """Run countdown with these settings; return its evaluations by step, 0 before the first."""
    config = load_quiet(ROOT / "configs" / "grpo_countdown.yaml", settings)
    return list_scores(train_run(config, RealEngineFactory()), config.run_dir)


def find_coverage(settings: Sequence[str]) -> float:
    """Return pass@8 as the gate finds it below BOUND; BOUND if the gate lets the model pass."""
    try:
        train([*settings, f"evaluation.coverage={BOUND}"])
    except ConfigError as error:
        found = re.search(r"pass@8 of the initial policy is ([\d.]+)", str(error))
        if found is None:
            raise
        return float(found[1])
    return BOUND


if __name__ == "__main__":
    main()

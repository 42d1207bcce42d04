"""Credit by turn against credit by episode: `python -m benchmarks.credit` prints one JSON object.

The examples calculator and guess, trained with a baseline per episode (grpo), per turn (grpo_turn)
and per state (gigpo), same number of steps, several seeds. pass_at_1: fraction of the held-out
tasks solved by the last policy; over_episode: ratio of the medians to credit by episode. Results
are medians over the seeds with minimum and maximum.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from benchmarks.command import (
    ROOT,
    BenchmarkParser,
    at_least,
    report_progress,
    run_benchmark,
    run_command,
)
from benchmarks.runs import MAKE_S, load_quiet, train_run
from benchmarks.staleness import summarize_seeds
from streamrl.actors.engine_factory import RealEngineFactory

TASKS = ("calculator", "guess")
CREDITS = {"episode": "grpo", "turn": "grpo_turn", "state": "gigpo"}
ADVANTAGES = (
    "algorithm.advantage_scale=none",
    "algorithm.loss_aggregation=token-mean",
)
"""Settings in which the algorithms would differ besides their credit."""


def make_parser() -> BenchmarkParser:
    """Declare tasks, credits and the length of a run."""
    parser = BenchmarkParser("credit", __doc__)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
    parser.add_argument("--credits", nargs="+", default=list(CREDITS), choices=CREDITS)
    parser.add_argument("--steps", type=at_least(1), default=60, help="steps of each run")
    parser.add_argument("--seeds", type=at_least(0), nargs="+", default=[0, 1, 2])
    parser.set_quick(tasks=["calculator"], credits=["turn"], steps=2, seeds=[0])
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Make all runs and print the results."""
    run_benchmark(make_parser(), measure, argv)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Make every run, with credit by episode first."""
    results = []
    for task in arguments.tasks:
        script = ROOT / "examples" / task / "make.py"
        run_command([sys.executable, str(script)], f"making {task}", timeout_s=MAKE_S)
        baseline = 0.0
        for credit in dict.fromkeys(["episode", *arguments.credits]):
            runs = (measure_run(task, credit, arguments.steps, seed) for seed in arguments.seeds)
            figures = summarize_seeds(runs)
            solved = figures["pass_at_1"]["median"]
            baseline = baseline or solved
            over_episode = solved / baseline if baseline else 0.0
            results.append(
                {"task": task, "credit": credit, **figures, "over_episode": over_episode}
            )
    return {"steps": arguments.steps, "seeds": arguments.seeds, "runs": results}


def measure_run(task: str, credit: str, steps: int, seed: int) -> dict[str, float]:
    """Return the fraction of tasks that the last policy solves, and the mean reward on the way."""
    report_progress(f"{task}, credit by {credit}, seed {seed}: {steps} steps")
    with tempfile.TemporaryDirectory() as folder:
        run = [f"run.dir={folder}", "run.name=credit", f"run.steps={steps}", f"run.seed={seed}"]
        chosen = [f"algorithm.name={CREDITS[credit]}", *ADVANTAGES]
        ends = ["evaluation.every=0", "evaluation.at_end=true", "checkpoint.every=0"]
        config = load_quiet(ROOT / "configs" / f"grpo_{task}.yaml", [*run, *chosen, *ends])
        rows = train_run(config, RealEngineFactory())
    rewards = [row["reward/mean"] for row in rows]
    return {"pass_at_1": rows[-1]["eval/pass_at_1"], "reward": sum(rewards) / len(rewards)}


if __name__ == "__main__":
    main()

"""On-policy distillation against GRPO: `python -m benchmarks.distill` prints one JSON object.

The demo's student is trained with GRPO by the recipe, constant steps. Its last checkpoint then
teaches the same student: by samples (distill) and by the divergence over words (gkd), several
updates a step. The score is pass@1 on the held-out sums after each `--every` steps. The bound is
the base's score plus 95 % of the teacher's gain; steps_to_bound is the first evaluation at or above
it, null if there is none, and over_grpo divides it by GRPO's. grpo_updates is GRPO with as many
updates a step as the students have.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.command import BenchmarkParser, at_least, report_progress, run_benchmark
from benchmarks.runs import RECIPE, Row, load_quiet, make_arithmetic, train_run
from streamrl.actors.engine_factory import RealEngineFactory

SCORE = "eval/pass_at_1"
SHARE_OF_GAIN = 0.95
UPDATES = ("algorithm.mini_batches=4",)
STUDENTS = {"grpo_updates": UPDATES, "distill": UPDATES, "gkd": UPDATES}
"""Settings of each way to learn, besides the recipe's."""


def make_parser() -> BenchmarkParser:
    """Declare the lengths of the runs."""
    parser = BenchmarkParser("distill", __doc__)
    parser.add_argument("--steps", type=at_least(1), default=80, help="steps of GRPO, the teacher")
    parser.add_argument("--student-steps", type=at_least(1), default=30, help="of the others")
    parser.add_argument("--every", type=at_least(1), default=3, help="steps between evaluations")
    parser.add_argument("--seeds", type=at_least(0), nargs="+", default=[0, 1, 2])
    parser.set_quick(steps=2, student_steps=1, every=1, seeds=[0])
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Make all runs and print the results."""
    run_benchmark(make_parser(), measure, argv)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Make the runs of every seed."""
    make_arithmetic()
    seeds = [measure_seed(arguments, seed) for seed in arguments.seeds]
    return {"steps": arguments.steps, "student_steps": arguments.student_steps, "seeds": seeds}


def measure_seed(arguments: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Train the teacher, then the students."""
    with tempfile.TemporaryDirectory() as folder:
        every = arguments.every
        common = [f"run.dir={folder}", f"run.seed={seed}", f"evaluation.every={every}"]

        def train(name: str, steps: int, *settings: str) -> dict[int, float]:
            report_progress(f"{name}, seed {seed}: {steps} steps")
            run = [*common, f"run.name={name}", f"run.steps={steps}"]
            config = load_quiet(RECIPE, [*run, *settings])
            return list_scores(train_run(config, RealEngineFactory()), config.run_dir)

        kept = ("checkpoint.at_end=true", "evaluation.at_start=true", "evaluation.at_end=true")
        scores = {"grpo": train("grpo", arguments.steps, *kept)}
        teacher = f"reference.path={Path(folder) / 'grpo'}"
        for name, settings in STUDENTS.items():
            teaches = () if name == "grpo_updates" else (f"algorithm.name={name}", teacher)
            scores[name] = train(name, arguments.student_steps, *settings, *teaches)
    base, last = scores["grpo"][0], scores["grpo"][max(scores["grpo"])]
    bound = base + SHARE_OF_GAIN * (last - base)
    steps = {name: find_step(curve, bound) for name, curve in scores.items()}
    of_grpo = steps["grpo"]
    return {
        "seed": seed,
        "base": base,
        "teacher": last,
        "bound": bound,
        "steps_to_bound": steps,
        "over_grpo": {n: s / of_grpo if s and of_grpo else None for n, s in steps.items()},
        "scores": scores,
    }


def list_scores(rows: Sequence[Row], run_dir: Path) -> dict[int, float]:
    """Return the evaluations of a run by step; 0 is the base's."""
    events = map(json.loads, (run_dir / "events.jsonl").read_text().splitlines())
    base = [(0, event[SCORE]) for event in events if event["event"] == "base_evaluation"]
    return dict(base) | {row["step"]: row[SCORE] for row in rows if row.get(SCORE) is not None}


def find_step(scores: dict[int, float], bound: float) -> int | None:
    """Return the first step whose score is at least `bound`; None if none is."""
    return next((step for step, score in sorted(scores.items()) if score >= bound), None)


if __name__ == "__main__":
    main()

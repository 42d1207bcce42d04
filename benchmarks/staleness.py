"""Cost of staleness in learning: `python -m benchmarks.staleness` prints one JSON object.

GRPO on the demo's task with increasing max_staleness, without and with off-policy correction
(decoupled PPO with truncated token weights), same number of steps, several seeds. The engine has
slots for everything in flight, so that only the bound limits staleness. reward: mean over the last
steps; over_on_policy: ratio to max_staleness 0 without correction; ess: effective sample size as a
fraction, over the whole run. Results are medians over the seeds with minimum and maximum.
"""

import argparse
import statistics
import tempfile
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.command import BenchmarkParser, at_least, report_progress, run_benchmark
from benchmarks.runs import RECIPE, load_quiet, make_arithmetic, train_run
from streamrl.actors.engine_factory import RealEngineFactory

LAST_STEPS = 5
KV_CACHE_MB = 64
"""Room for all rollouts of a step."""
CORRECTIONS: dict[str, list[str]] = {
    "none": [],
    "decoupled": [
        "algorithm.correction.proximal=trainer",
        "algorithm.correction.weights=token",
        "algorithm.correction.weight_high=2.0",
    ],
}


def make_parser() -> BenchmarkParser:
    """Declare bounds, corrections and the length of a run."""
    parser = BenchmarkParser("staleness", __doc__)
    parser.add_argument("--steps", type=at_least(1), default=40, help="steps of each run")
    parser.add_argument(
        "--bounds",
        type=at_least(0),
        nargs="+",
        default=[0, 1, 4, 8],
        help="max_staleness, in addition to 0",
    )
    parser.add_argument("--corrections", nargs="+", default=list(CORRECTIONS), choices=CORRECTIONS)
    parser.add_argument("--seeds", type=at_least(0), nargs="+", default=[0, 1, 2])
    parser.set_quick(steps=3, bounds=[0], corrections=["none"], seeds=[0])
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Make all runs and print the results."""
    run_benchmark(make_parser(), measure, argv)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Make every run, on policy and without correction first."""
    make_arithmetic()
    results = [
        {"max_staleness": bound, "correction": name}
        | summarize_seeds(
            measure_run(arguments.steps, bound, name, seed) for seed in arguments.seeds
        )
        for bound in sorted({0, *arguments.bounds})
        for name in dict.fromkeys(["none", *arguments.corrections])
    ]
    baseline = results[0]["reward"]["median"]
    for figures in results:
        figures["over_on_policy"] = figures["reward"]["median"] / baseline
    return {"steps": arguments.steps, "seeds": arguments.seeds, "runs": results}


def summarize_seeds(runs: Iterable[dict[str, float]]) -> dict[str, Any]:
    """Return median, minimum and maximum of each result."""
    rows = list(runs)
    return {
        name: {
            "median": statistics.median(row[name] for row in rows),
            "least": min(row[name] for row in rows),
            "largest": max(row[name] for row in rows),
        }
        for name in rows[0]
    }


def measure_run(steps: int, bound: int, correction: str, seed: int) -> dict[str, float]:
    report_progress(f"max_staleness {bound}, correction {correction}, seed {seed}: {steps} steps")
    with tempfile.TemporaryDirectory() as folder:
        run = [f"run.dir={folder}", "run.name=staleness", f"run.steps={steps}", f"run.seed={seed}"]
        chosen = [f"pipeline.max_staleness={bound}", *CORRECTIONS[correction]]
        config = load_quiet(RECIPE, [*run, *chosen])
        per_step = config.algorithm.group_size * config.pipeline.groups_per_step
        config.generator.max_concurrent_rollouts = (bound + 1) * per_step
        config.generator.kv_cache_mb = (bound + 1) * KV_CACHE_MB
        rows = train_run(config, RealEngineFactory())
    return {
        "reward": statistics.fmean(row["reward/mean"] for row in rows[-LAST_STEPS:]),
        "ess": statistics.fmean(row["policy/ess"] for row in rows),
        "staleness": statistics.fmean(row["staleness/mean"] for row in rows),
        "clip_frac": statistics.fmean(row["policy/clip_frac"] for row in rows),
        "kl": statistics.fmean(row["correction/kl"] for row in rows),
    }


if __name__ == "__main__":
    main()

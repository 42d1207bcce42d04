"""What staleness costs in learning: `python -m benchmarks.staleness` prints one JSON object.

GRPO on the demo's task under growing max_staleness, as it is and with off-policy correction
(decoupled PPO with truncated token weights), the same number of steps each, several seeds. All that
may be in flight has a place in the engine, so that it is the bound that holds staleness back.
reward is the mean over the last steps, over_on_policy the same over that of max_staleness 0 and no
correction, ess the effective share of the sample over the whole run. Medians over the seeds, with
the least and the largest beside them.
"""

import argparse
import statistics
import tempfile
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.command import BenchmarkParser, at_least, report_progress, run_benchmark
from benchmarks.runs import RECIPE, load_quiet, make_arithmetic, play
from streamrl.actors.engine_factory import RealEngineFactory

LAST_STEPS = 5
KV_CACHE_MB = 64
"""Enough for the rollouts of a step."""
CORRECTIONS: dict[str, list[str]] = {
    "none": [],
    "decoupled": [
        "algorithm.correction.proximal=trainer",
        "algorithm.correction.weights=token",
        "algorithm.correction.weight_high=2.0",
    ],
}


def make_parser() -> BenchmarkParser:
    """Declare the bounds, the corrections and how long a run of each is."""
    parser = BenchmarkParser("staleness", __doc__)
    parser.add_argument("--steps", type=at_least(1), default=40, help="steps of each run")
    parser.add_argument(
        "--bounds", type=at_least(0), nargs="+", default=[0, 1, 4, 8], help="beside 0"
    )
    parser.add_argument("--corrections", nargs="+", default=list(CORRECTIONS), choices=CORRECTIONS)
    parser.add_argument("--seeds", type=at_least(0), nargs="+", default=[0, 1, 2])
    parser.set_quick(steps=3, bounds=[0], corrections=["none", "decoupled"], seeds=[0])
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Make all runs and print the figures."""
    run_benchmark(make_parser(), measure, argv)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Make every run, on policy and without correction first."""
    make_arithmetic()
    found = [
        {"max_staleness": bound, "correction": name}
        | over_seeds(play_run(arguments.steps, bound, name, seed) for seed in arguments.seeds)
        for bound in sorted({0, *arguments.bounds})
        for name in dict.fromkeys(["none", *arguments.corrections])
    ]
    baseline = found[0]["reward"]["median"]
    for figures in found:
        figures["over_on_policy"] = figures["reward"]["median"] / baseline
    return {"steps": arguments.steps, "seeds": arguments.seeds, "runs": found}


def over_seeds(runs: Iterable[dict[str, float]]) -> dict[str, Any]:
    """Median, least and largest of each figure."""
    rows = list(runs)
    return {
        name: {
            "median": statistics.median(row[name] for row in rows),
            "least": min(row[name] for row in rows),
            "largest": max(row[name] for row in rows),
        }
        for name in rows[0]
    }


def play_run(steps: int, bound: int, correction: str, seed: int) -> dict[str, float]:
    """Make one run, and return its figures."""
    report_progress(f"max_staleness {bound}, correction {correction}, seed {seed}: {steps} steps")
    with tempfile.TemporaryDirectory() as folder:
        run = [f"run.dir={folder}", "run.name=staleness", f"run.steps={steps}", f"run.seed={seed}"]
        chosen = [f"pipeline.max_staleness={bound}", *CORRECTIONS[correction]]
        config = load_quiet(RECIPE, [*run, *chosen])
        per_step = config.algorithm.group_size * config.pipeline.groups_per_step
        config.generator.max_concurrent_rollouts = (bound + 1) * per_step
        config.generator.kv_cache_mb = (bound + 1) * KV_CACHE_MB
        rows = play(config, RealEngineFactory())
    return {
        "reward": statistics.fmean(row["reward/mean"] for row in rows[-LAST_STEPS:]),
        "ess": statistics.fmean(row["policy/ess"] for row in rows),
        "staleness": statistics.fmean(row["staleness/mean"] for row in rows),
        "clip_frac": statistics.fmean(row["policy/clip_frac"] for row in rows),
        "kl": statistics.fmean(row["correction/kl"] for row in rows),
    }


if __name__ == "__main__":
    main()

"""Cost of sharing a device pool: `python -m benchmarks.placement_modes` prints one JSON object.

The same GRPO run in every placement on two cores, with max_staleness 0 and 1. Disaggregated: one
core for the generator, one for the trainer. Colocated and sequential: two generators and two ranks
take turns on both cores. one_slot: colocated on one core. Every engine computes with one thread.

The generator is a random model of 1 M parameters with 32 tokens, one of which ends a completion. So
lengths are geometric, and in every step the longest is several times the mean. Results are over the
steps after the first ones. step_s is a mean with quartiles, because steps come in bursts when the
pool changes hands; over_disaggregated is the ratio of these means; idle fractions are means.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from itertools import product
from operator import itemgetter, mul
from pathlib import Path
from typing import Any

from benchmarks.command import BenchmarkParser, at_least, report_progress, run_benchmark
from benchmarks.random_model import write_model
from benchmarks.runs import compute_medians, load_quiet, train_run
from streamrl.actors.engine_factory import RealEngineFactory

RUNS: Mapping[str, Sequence[str]] = {
    "disaggregated": ("placement.mode=disaggregated",),
    "colocated": ("placement.mode=colocated", "trainer.world_size=2"),
    "sequential": ("placement.mode=sequential", "trainer.world_size=2", "generator.replicas=2"),
    "one_slot": ("placement.mode=colocated",),
}
"""Settings by placement."""
BOUNDS = (0, 1)
STAGES = ("generate", "reward", "train")
WARM_UP_STEPS = 2
NUM_WORDS = 32
"""Vocabulary size: one token in NUM_WORDS ends a completion."""
RECIPE = """
model: {{path: {folder}/model}}
data: {{train: {folder}/rows.jsonl}}
run: {{dir: {folder}/runs, overwrite: true}}
algorithm: {{name: grpo, group_size: 8}}
pipeline: {{groups_per_step: 8, micro_batch_tokens: 1024}}
generator: {{max_new_tokens: 224, max_concurrent_rollouts: 128}}
rewards: [{{kind: length, unit: words, least: 32, tolerance: 32}}]
# Too small to change the lengths of completions.
trainer: {{lr: 1.0e-7}}
# A fraction of a step.
placement: {{slice_s: 0.2}}
"""


def make_parser() -> BenchmarkParser:
    """Declare the number of runs and steps."""
    parser = BenchmarkParser("placement_modes", __doc__)
    parser.add_argument("--steps", type=at_least(2), default=12, help="measured steps of each run")
    parser.add_argument(
        "--repeats",
        type=at_least(1),
        default=1,
        help="runs of each placement; the result is the median",
    )
    parser.add_argument(
        "--bounds", type=at_least(0), nargs="+", default=BOUNDS, help="max_staleness"
    )
    parser.add_argument(
        "--placements",
        nargs="+",
        default=list(RUNS),
        choices=RUNS,
        help="in addition to disaggregated",
    )
    parser.set_quick(steps=2, bounds=[1], placements=["one_slot"])
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Measure all runs and print the results."""
    run_benchmark(make_parser(), measure, argv)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure every run `repeats` times."""
    placements = dict.fromkeys(["disaggregated", *arguments.placements])
    with tempfile.TemporaryDirectory() as folder:
        recipe = write_inputs(Path(folder))
        runs = [
            {
                key: measure_run(recipe, *key, arguments.steps)
                for key in product(arguments.bounds, placements)
            }
            for _ in range(arguments.repeats)
        ]
    return compare_placements(runs)


def compare_placements(runs: Sequence[Mapping[tuple[int, str], dict[str, Any]]]) -> dict[str, Any]:
    """Return by bound and placement the median run, and its step time relative to disaggregated."""
    results: dict[str, Any] = {}
    for bound, placement in runs[0]:
        by_step_s = sorted((run[bound, placement] for run in runs), key=itemgetter("step_s"))
        results.setdefault(f"max_staleness_{bound}", {})[placement] = by_step_s[len(by_step_s) // 2]
    for runs_of in results.values():
        for figures in runs_of.values():
            figures["over_disaggregated"] = figures["step_s"] / runs_of["disaggregated"]["step_s"]
    return results


def write_inputs(folder: Path) -> Path:
    """Write model, prompts and recipe into a folder; return the recipe."""
    write_model(1, folder / "model", num_words=NUM_WORDS)
    write_rows(folder / "rows.jsonl")
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE.format(folder=folder))
    return recipe


def write_rows(file: Path) -> None:
    """Write the prompts: two words each."""
    rows = [
        {
            "data_source": "words",
            "prompt": f"t{5 + i % 20} t{5 + i // 20}",
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": i},
        }
        for i in range(400)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def measure_run(recipe: Path, bound: int, placement: str, steps: int) -> dict[str, Any]:
    report_progress(f"{placement}, max_staleness {bound}: {steps} steps")
    settings = [
        *RUNS[placement],
        f"pipeline.max_staleness={bound}",
        f"run.steps={steps + WARM_UP_STEPS}",
    ]
    rows = train_run(load_quiet(recipe, settings), RealEngineFactory(), skip=WARM_UP_STEPS)
    names = {"length_mean": "rollout/length_mean", "length_max": "rollout/length_max"}
    seconds = [row["time/step_s"] for row in rows]
    rates = [row["throughput/tokens_per_s"] for row in rows]
    return {
        "steps": len(rows),
        "step_s": statistics.fmean(seconds),
        "step_s_quartiles": statistics.quantiles(seconds, n=4),
        "tokens_per_s": sum(map(mul, rates, seconds)) / sum(seconds),
        "idle": {stage: statistics.fmean(row[f"idle/{stage}"] for row in rows) for stage in STAGES},
        "staleness_mean": statistics.fmean(row["staleness/mean"] for row in rows),
        **compute_medians(rows, names),
    }


if __name__ == "__main__":
    main()

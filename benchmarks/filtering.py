"""Cost of a group filter: `python -m benchmarks.filtering` prints one JSON object.

PPO with a critic and a reference on 16 devices, simulated in virtual time: without a filter, and
with a filter that rejects a fraction of all groups, on policy and one step ahead.

- side_by_side: all stages work on a group at once, regardless of its verdict.
- gated: stages that do not contribute to the verdict wait for it.
- gated_auto: gated, with `filter.oversample=auto`.
- computed_reference, computed_value: groups computed by reference and critic per trained group.
- surplus: sampled groups dropped per trained group, because the step was complete without them.
- over_unfiltered: step time over that of the same run without a filter.
"""

import argparse
from collections.abc import Sequence
from typing import Any

from benchmarks.command import BenchmarkParser, at_least, report_progress, run_benchmark
from streamrl.dataflow import Dataflow, build_dataflow
from streamrl.messages import ROLLOUT_COLUMNS
from streamrl.placement.meshes import Mesh
from streamrl.placement.placements import CallAssignment, Placement
from streamrl.planner.problem.problem import RunOptions
from streamrl.planner.problem.stage_timings import (
    GeneratorTiming,
    ScoreTiming,
    StageTimings,
    TrainTiming,
    WeightsTiming,
)
from streamrl.planner.problem.workload import LognormalLengths, Workload
from streamrl.planner.simulator.results import SimulationResult
from streamrl.planner.simulator.simulation import run_simulation
from streamrl.resharding.grids import RankGrid

COLUMNS = (*ROLLOUT_COLUMNS, "scores", "ref_logprobs", "values")
BESIDE, GATED = build_dataflow(COLUMNS), build_dataflow(COLUMNS, has_filter=True)
WAYS = {"side_by_side": (BESIDE, 1.0), "gated": (GATED, 1.0), "gated_auto": (GATED, None)}
"""By variant: its calls and filter.oversample."""


def assign_devices(first: int, devices: int) -> CallAssignment:
    """Return one replica on each of `devices` devices, from device `first` on."""
    return CallAssignment(Mesh(first, devices), RankGrid.from_text(f"1-1-{devices}"))


CALLS = {
    "generate": assign_devices(0, 8),
    "reference": assign_devices(8, 1),
    "value": assign_devices(9, 1),
    "train": assign_devices(10, 4),
    "train_critic": assign_devices(14, 2),
}
TIMINGS = StageTimings(
    generator=GeneratorTiming(
        replicas=8,
        max_running=256,
        kv_tokens=400_000,
        weights_s=0.006,
        kv_token_s=2e-8,
        compute_rollout_s=4e-5,
        step_s=0.002,
        rollout_s=1e-5,
        prefill_token_s=2e-6,
    ),
    score={
        "reward": ScoreTiming(4, 8, 0.01, 0.001, 0.0),
        "reference": ScoreTiming(1, 8, 0.02, 0.0, 2e-5),
        "value": ScoreTiming(1, 8, 0.02, 0.0, 2e-5),
    },
    train={"policy": TrainTiming(4, 0.05, 6e-5, 0.5), "critic": TrainTiming(2, 0.05, 6e-5, 0.5)},
    weights={"generate": WeightsTiming(0.5, 0.5, 0.1), "value": WeightsTiming(0.5, 0.5, 0.1)},
    hop_s=0.005,
    step_s=0.1,
)
"""Roughly a model of 1.5 billion parameters."""


def make_parser() -> BenchmarkParser:
    """Declare the filtered fractions and the length of a simulation."""
    parser = BenchmarkParser("filtering", __doc__)
    parser.add_argument("--steps", type=at_least(4), default=30, help="steps of each run")
    parser.add_argument(
        "--percents",
        type=at_least(1),
        nargs="+",
        default=[50, 90],
        help="percentage of filtered groups",
    )
    parser.set_quick(steps=4, percents=[50])
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    run_benchmark(make_parser(), measure, argv)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Simulate every variant for each bound and each filtered fraction."""
    return {
        f"max_staleness_{bound}": measure_bound(bound, arguments.percents, arguments.steps)
        for bound in (0, 1)
    }


def measure_bound(bound: int, percents: Sequence[int], steps: int) -> dict[str, Any]:
    """Simulate the runs of one bound."""
    alone = simulate_variant(BESIDE, 1.0, bound, 0.0, steps)
    results: dict[str, Any] = {"unfiltered": summarize_run(alone, alone)}
    for percent in percents:
        for name, (flow, oversample) in WAYS.items():
            report_progress(f"max_staleness {bound}, {percent} % filtered, {name}")
            run = simulate_variant(flow, oversample, bound, percent / 100, steps)
            results[f"filtered_{percent}_{name}"] = summarize_run(run, alone)
    return results


def simulate_variant(
    flow: Dataflow, oversample: float | None, bound: int, filtered: float, steps: int
) -> SimulationResult:
    workload = Workload(64, 8, 256, LognormalLengths(600, 0.8, 4000), filtered_fraction=filtered)
    run_options, placement = RunOptions(oversample=oversample), Placement(CALLS, bound)
    return run_simulation(
        flow, placement, TIMINGS, workload, steps=steps, seed=1, run_options=run_options
    )


def summarize_run(run: SimulationResult, alone: SimulationResult) -> dict[str, float]:
    """Return the step time, and the groups computed by reference and critic."""
    trained = sum(len(outcome.groups) for outcome in run.outcomes)
    computed = {
        stage: sum(int(span.args["groups"]) for span in run.spans if span.name == stage)
        for stage in ("reference", "value")
    }
    drops = dict(run.outcomes[-1].ledger_counts.drops)
    return {
        "step_s": run.mean_step_s,
        "over_unfiltered": run.mean_step_s / alone.mean_step_s,
        "computed_reference": computed["reference"] / trained,
        "computed_value": computed["value"] / trained,
        "surplus": drops.get("surplus", 0) / trained,
    }


if __name__ == "__main__":
    main()

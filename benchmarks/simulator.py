"""Speed of the simulator: `python -m benchmarks.simulator` prints one JSON object.

GRPO with a reference on 1,024 devices: 128 generators of four devices, 512 groups of 16 rollouts
per step, lognormal lengths, two steps ahead; and the same on all devices in turn, on policy.
seconds: wall time; cpu_s: CPU time. An event is the end of a rollout or of another piece of work.
"""

import argparse
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.command import BenchmarkParser, at_least, report_progress, run_benchmark
from streamrl.dataflow import build_dataflow
from streamrl.messages import ROLLOUT_COLUMNS
from streamrl.placement.meshes import Mesh
from streamrl.placement.placements import CallAssignment, Placement
from streamrl.planner.problem.stage_timings import (
    GeneratorTiming,
    ScoreTiming,
    StageTimings,
    TrainTiming,
    WeightsTiming,
)
from streamrl.planner.problem.workload import LognormalLengths, Workload
from streamrl.planner.simulator.simulation import run_simulation
from streamrl.resharding.grids import RankGrid

FLOW = build_dataflow((*ROLLOUT_COLUMNS, "scores", "ref_logprobs"))
WORKLOAD = Workload(512, 16, 512, LognormalLengths(2000, 0.8, 12000))


def assign_devices(first: int, grid: str) -> CallAssignment:
    """Return the grid on the devices from `first` on."""
    parsed = RankGrid.from_text(grid)
    return CallAssignment(Mesh(first, parsed.num_ranks), parsed)


PLACEMENTS = {
    "apart": Placement(
        {
            "generate": assign_devices(0, "1-4-128"),
            "reference": assign_devices(512, "1-4-16"),
            "train": assign_devices(576, "1-8-56"),
        },
        max_staleness=2,
    ),
    "in_turn": Placement(
        {
            "generate": assign_devices(0, "1-4-256"),
            "reference": assign_devices(0, "1-4-256"),
            "train": assign_devices(0, "1-8-128"),
        }
    ),
}


def make_timings(placement: Placement) -> StageTimings:
    """Return roughly the timings of a model of 7 billion parameters on H100s."""
    calls = placement.assignments
    return StageTimings(
        generator=GeneratorTiming(
            replicas=calls["generate"].grid.dp_size,
            max_running=256,
            kv_tokens=1_000_000,
            weights_s=0.008,
            kv_token_s=2e-8,
            compute_rollout_s=4e-5,
            step_s=0.002,
            rollout_s=1e-5,
            prefill_token_s=2e-6,
            begin_s=0.01,
        ),
        score={
            "reward": ScoreTiming(16, 8, 0.01, 0.001, 0.0),
            "reference": ScoreTiming(calls["reference"].grid.dp_size, 8, 0.02, 0.0, 1e-5),
        },
        train={"policy": TrainTiming(calls["train"].grid.dp_size, 0.05, 1e-4, 0.5)},
        weights={"generate": WeightsTiming(1.0, 2.0, 0.3)},
        hop_s=0.005,
        step_s=0.1,
    )


def simulate_once(placement: Placement, steps: int) -> dict[str, Any]:
    wall, cpu = time.perf_counter(), time.process_time()
    result = run_simulation(FLOW, placement, make_timings(placement), WORKLOAD, steps=steps, seed=1)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    events = steps * WORKLOAD.num_rollouts + len(result.spans)
    return {
        "seconds": wall,
        "cpu_s": cpu,
        "events_per_s": events / cpu,
        "simulated_step_s": result.mean_step_s,
        "simulated_tokens_per_s": result.tokens_per_s,
    }


def make_parser() -> BenchmarkParser:
    """Declare the length of a simulation."""
    parser = BenchmarkParser("simulator", __doc__)
    parser.add_argument("--steps", type=at_least(1), default=100, help="steps of each run")
    parser.set_quick(steps=3)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    run_benchmark(make_parser(), measure, argv)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Simulate both placements."""
    figures = {}
    for name, placement in PLACEMENTS.items():
        report_progress(f"{name}: {arguments.steps} steps of 1,024 devices")
        figures[name] = simulate_once(placement, arguments.steps)
    return {"devices": 1024, "steps": arguments.steps, **figures}


if __name__ == "__main__":
    main()

"""What training without pipeline parallelism costs: `python -m benchmarks.pipelines` prints JSON.

Seconds of a training step by the planner's cost model, of the fastest layout that fits:

sharded    what streamrl's trainers do: FSDP2 or ZeRO, tensor parallelism within a node, experts
           distributed over its ranks
experts    the same, with experts distributed over any ranks (mixtures only)
pipelines  what Megatron does: pipeline stages, tensor parallelism, experts distributed over any
           ranks of a stage, and the optimizer's state sharded over data-parallel ranks

A step is one update on --rollouts rollouts of --tokens tokens. All choose among their layouts and
micro-batches of 4,096 to 65,536 tokens. The memory is counted as that of other systems, for all.
Stages of unequal depth count as equal, and stages are not interleaved.
"""

import argparse
import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

from benchmarks.command import BenchmarkParser, at_least, report_progress, run_benchmark
from streamrl.dataflow import build_dataflow
from streamrl.engines.models.model_shapes import MODEL_SHAPES, ModelShape
from streamrl.placement.clusters import Cluster
from streamrl.placement.meshes import Mesh
from streamrl.placement.placements import MAX_TP_SIZE, CallAssignment
from streamrl.planner.costs.constants import CostConstants
from streamrl.planner.costs.cost_model import CostModel
from streamrl.planner.problem.problem import PlacementProblem
from streamrl.planner.problem.workload import Workload, make_fixed_lengths
from streamrl.resharding.grids import RankGrid

GRPO = build_dataflow(("generator_logprobs", "scores"))
LLAMA3_405B = replace(
    MODEL_SHAPES["llama3-70b"],
    name="llama3-405b",
    layers=126,
    hidden=16384,
    intermediate=53248,
    heads=128,
)
SHAPES = {
    shape.name: shape
    for shape in (
        *(MODEL_SHAPES[name] for name in ("qwen2.5-32b", "llama3-70b", "qwen3-235b-a22b")),
        LLAMA3_405B,
        MODEL_SHAPES["deepseek-v3"],
    )
}
DEVICES = (32, 64, 128, 256, 512)
DEVICES_PER_NODE = 8
MICRO_BATCH_TOKENS = (4096, 8192, 16384, 32768, 65536)
MAX_STAGES = 32
KINDS = SHARDED, EXPERTS, PIPELINES = "sharded", "experts", "pipelines"


class TrainingLayout(NamedTuple):
    """Layout of the trainer, and the seconds of its step."""

    seconds: float
    assignment: CallAssignment
    micro_batch_tokens: int

    def to_json(self) -> dict[str, Any]:
        grid = self.assignment.grid
        return {
            "step_s": self.seconds,
            "stages": grid.pp_size,
            "tensor": grid.tp_size,
            "data": grid.dp_size,
            "expert": self.assignment.ep_size,
            "zero": self.assignment.zero_stage,
            "micro_batch_tokens": self.micro_batch_tokens,
        }


def make_parser() -> BenchmarkParser:
    parser = BenchmarkParser("python -m benchmarks.pipelines", __doc__)
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--devices", nargs="+", type=at_least(8), default=list(DEVICES))
    parser.add_argument("--rollouts", type=at_least(1), default=2048)
    parser.add_argument("--tokens", type=at_least(2), default=4096)
    parser.add_argument(
        "--network", type=at_least(1), default=3200, help="Gb/s of a node, each direction (3,200)"
    )
    parser.set_quick(models=["llama3-70b"], devices=[64])
    return parser


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name in arguments.models:
        results[name] = {}
        for devices in arguments.devices:
            nodes = f"{devices // DEVICES_PER_NODE}x{DEVICES_PER_NODE}xH100"
            cluster = Cluster.from_text(f"{nodes}@{arguments.network}Gb")
            fastest = {
                kind: find_fastest(
                    SHAPES[name], cluster, arguments.rollouts, arguments.tokens, kind
                )
                for kind in (KINDS if SHAPES[name].experts else (SHARDED, PIPELINES))
            }
            results[name][devices] = {
                kind: layout.to_json() if layout else None for kind, layout in fastest.items()
            }
            sharded, pipelined = fastest[SHARDED], fastest[PIPELINES]
            if sharded and pipelined:
                ratio = sharded.seconds / pipelined.seconds
                results[name][devices]["sharded_over_pipelines"] = ratio
                report_progress(f"{name} on {devices}: {ratio:.2f}")
    return results


def find_fastest(
    shape: ModelShape, cluster: Cluster, rollouts: int, tokens: int, kind: str
) -> TrainingLayout | None:
    """Return the fastest layout of a kind that fits; None if none does."""
    best = None
    for budget in MICRO_BATCH_TOKENS:
        lengths = make_fixed_lengths(tokens - 1)
        workload = Workload(rollouts, 1, 1, lengths, micro_batch_tokens=budget)
        problem = PlacementProblem(GRPO, {"policy": shape}, workload, cluster)
        costs = CostModel(problem, CostConstants())
        for assignment in iter_assignments(shape, Mesh(0, cluster.num_devices), kind):
            seconds = costs.call_duration_s("train", assignment)
            if math.isfinite(seconds) and (best is None or seconds < best.seconds):
                best = TrainingLayout(seconds, assignment, budget)
    return best


def iter_assignments(shape: ModelShape, mesh: Mesh, kind: str) -> Iterator[CallAssignment]:
    """Yield the trainer's layouts of a kind on a mesh."""
    depths = range(1, min(MAX_STAGES, shape.layers) + 1) if kind == PIPELINES else (1,)
    zero_stages = (1,) if kind == PIPELINES else (1, 3)
    for tensor, depth in product(powers_of_two(MAX_TP_SIZE), depths):
        if mesh.size % (tensor * depth):
            continue
        data = mesh.size // (tensor * depth)
        grid = RankGrid(depth, tensor, data, "mcore")
        most = max(1, min(shape.experts, tensor if kind == SHARDED else tensor * data))
        for experts, zero in product(powers_of_two(most), zero_stages):
            yield CallAssignment(mesh, grid, zero, experts)


def powers_of_two(most: int) -> list[int]:
    return [1 << i for i in range(most.bit_length())]


if __name__ == "__main__":
    run_benchmark(make_parser(), measure)

"""Accuracy of the steady-state estimate: `python -m benchmarks.schedule` prints JSON.

The planner searches by the analytic estimate, which takes a millisecond per placement. This
benchmark plans the best placements of every kind and bound for some algorithms, models and
clusters, and simulates each. errors: relative excess of the estimated over the simulated step, per
placement; with the median absolute error and the extremes, on policy and ahead, with and without a
filter.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median
from typing import Any

from benchmarks.command import BenchmarkParser, at_least, report_progress, run_benchmark
from streamrl.dataflow import build_dataflow
from streamrl.engines.models.model_shapes import load_model_shape
from streamrl.messages import ROLLOUT_COLUMNS
from streamrl.placement.clusters import Cluster
from streamrl.placement.placements import Placement
from streamrl.planner.costs.constants import CostConstants
from streamrl.planner.costs.cost_model import CostModel
from streamrl.planner.problem.problem import PlacementProblem
from streamrl.planner.problem.workload import LognormalLengths, Workload
from streamrl.planner.search.planner import PlacementCandidate, plan_placement
from streamrl.planner.simulator.quick_run import run_quick_simulation
from streamrl.planner.steady_state.estimator import (
    PlacementEstimator,
    PlacementKey,
    make_placement_key,
)

BOUNDS = (0, 1, 2, 4)
PROPOSALS = 200
COLUMNS = {
    "grpo": ("scores", "ref_logprobs"),
    "dapo": ("scores",),
    "remax": ("scores", "baseline_scores"),
    "ppo": ("scores", "ref_logprobs", "values"),
}


@dataclass(frozen=True)
class PlannedRun:
    """Run to plan; `sigma` is the parameter of the lognormal distribution of lengths."""

    algorithm: str
    model: str
    cluster: str
    groups: int
    group_size: int
    sigma: float
    max_running: int
    filtered: float = 0.0

    @cached_property
    def problem(self) -> PlacementProblem:
        """Return the planner's problem: every role has a model of this size."""
        shape = load_model_shape(self.model)
        models = {"policy": shape, "reference": shape}
        if self.algorithm == "ppo":
            models["critic"] = shape.to_critic()
        lengths = LognormalLengths(800, self.sigma, 4096)
        updates = 1 if self.algorithm == "grpo" else 4
        return PlacementProblem(
            build_dataflow((*ROLLOUT_COLUMNS, *COLUMNS[self.algorithm])),
            {role: models[role] for role in models if role in self._roles},
            Workload(
                *(self.groups, self.group_size, 512, lengths),
                mini_batches=updates,
                requires_whole_step=updates > 1,
                filtered_fraction=self.filtered,
            ),
            Cluster.from_text(self.cluster),
        )

    @property
    def _roles(self) -> set[str]:
        named = {"ref_logprobs": "reference", "values": "critic"}
        return {"policy", *(named[c] for c in COLUMNS[self.algorithm] if c in named)}

    def costs(self, problem: PlacementProblem) -> CostModel:
        """Return cost constants with engines that sample this many rollouts at a time."""
        constants = replace(CostConstants(), max_running=self.max_running)
        return CostModel(problem, constants)


CASES = (
    PlannedRun("grpo", "qwen2.5-1.5b", "4xA100", 64, 8, 0.8, 64),
    PlannedRun("grpo", "qwen2.5-7b", "8xA100", 64, 16, 0.8, 64),
    PlannedRun("grpo", "qwen2.5-7b", "4x8xH100@400Gb", 128, 16, 0.8, 256),
    PlannedRun("ppo", "llama-7b", "2x8xA100@200Gb", 512, 1, 0.6, 256),
    PlannedRun("ppo", "qwen2.5-1.5b", "8xA100", 256, 4, 0.6, 64),
    PlannedRun("remax", "qwen2.5-7b", "2x8xH100@400Gb", 256, 1, 0.8, 128),
    PlannedRun("dapo", "qwen2.5-7b", "8xH100", 32, 16, 0.8, 128, 0.5),
    PlannedRun("dapo", "qwen2.5-32b", "8x8xH100@400Gb", 128, 16, 0.8, 256, 0.3),
    PlannedRun("dapo", "qwen2.5-1.5b", "8xA100", 64, 8, 0.8, 64, 0.8),
)


def make_parser() -> BenchmarkParser:
    """Declare the cases."""
    parser = BenchmarkParser("schedule", __doc__)
    every = range(len(CASES))
    parser.add_argument("--cases", type=int, nargs="+", default=every, choices=every)
    parser.add_argument(
        "--proposals", type=at_least(1), default=PROPOSALS, help="proposals of each search"
    )
    parser.add_argument(
        "--bounds", type=at_least(0), nargs="+", default=BOUNDS, help="max_staleness"
    )
    parser.add_argument("--seed", type=at_least(0), default=0)
    parser.set_quick(cases=[0], proposals=20, bounds=[0, 1])
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    run_benchmark(make_parser(), measure, argv)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    rows = [row for number in arguments.cases for row in measure_errors(CASES[number], arguments)]
    return {"placements": len(rows), **summarize_errors(rows), "errors": rows}


def measure_errors(case: PlannedRun, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the error of each planned placement of a run."""
    report_progress(f"{case.algorithm} {case.model} {case.cluster}")
    problem, costs = case.problem, case.costs(case.problem)
    estimator = PlacementEstimator(problem, costs)
    for label, placement in plan_placements(case, arguments):
        step_s = estimator.estimate_step_s(placement)
        timings = costs.predict_timings(placement)
        played = run_quick_simulation(
            problem.dataflow,
            placement,
            timings,
            problem.workload,
            seed=arguments.seed,
            run_options=problem.run_options,
        )
        yield {
            "case": f"{case.algorithm} {case.model} {case.cluster}",
            "placement": label,
            "max_staleness": placement.max_staleness,
            "filtered": case.filtered,
            "simulated_s": round(played.mean_step_s, 3),
            "error": round(step_s / played.mean_step_s - 1, 4),
        }


def plan_placements(
    case: PlannedRun, arguments: argparse.Namespace
) -> Iterator[tuple[str, Placement]]:
    """Return the best placements of every kind and bound."""
    plan = plan_placement(
        case.problem,
        case.costs,
        max_staleness=arguments.bounds,
        seed=arguments.seed,
        proposals=arguments.proposals,
    )
    front = [point.candidate for point in plan.points]
    every: dict[PlacementKey, PlacementCandidate] = {}
    for candidate in (*front, *plan.candidates):
        if candidate.step_s < float("inf"):
            every.setdefault(make_placement_key(candidate.placement), candidate)
    for candidate in every.values():
        yield candidate.label, candidate.placement


def summarize_errors(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return medians and extremes."""
    kinds = {
        "on_policy": [r for r in rows if not r["max_staleness"] and not r["filtered"]],
        "on_policy_filtered": [r for r in rows if not r["max_staleness"] and r["filtered"]],
        "ahead": [r for r in rows if r["max_staleness"] and not r["filtered"]],
        "ahead_filtered": [r for r in rows if r["max_staleness"] and r["filtered"]],
    }
    results = {}
    for kind, some in kinds.items():
        every = [row["error"] for row in some]
        if every:
            results[kind] = {
                "placements": len(every),
                "median": round(median(abs(error) for error in every), 4),
                "lowest": min(every),
                "highest": max(every),
            }
    return results


if __name__ == "__main__":
    main()

"""Time and quality of planning: `python -m benchmarks.planner` prints one JSON object.

Takes ten minutes; progress is on stderr. All seconds are CPU seconds of one core.

- command: `streamrl plan` of PPO with four models of 7B on 128 GPUs with its four bounds: start,
  search, and simulation of the front; also with 20,000 groups per step.
- algorithms: the same command with 8,192 or 1,024 rollouts per step, by algorithm.
- hybridflow: the plan, on policy, of every setting of HybridFlow's Figures 9 to 11 (PPO; four
  models of one size; from the fewest A100 on which a size ran) and of Figure 13 (13B policy and
  reference, 70B critic and reward).
- seconds: the search alone, for models of one size on nodes of eight A100, by number of GPUs, on
  policy and one step ahead.
- seeds: the step time on policy by seed, and the relative excess of the longest over the shortest.
- gap: on clusters small enough for exhaustive search, the relative excess of the planned step over
  the best (0 if optimal), for Algorithm 1 alone and for the whole plan, with the seconds of the
  exhaustive search.

Each bounded result has its bound beside it as `limit`.
"""

import argparse
import json
import math
import resource
import sys
import time
from collections.abc import Sequence
from itertools import product
from typing import Any

from benchmarks.command import (
    ROOT,
    BenchmarkParser,
    at_least,
    report_progress,
    run_benchmark,
    run_command,
)
from benchmarks.exhaustive import ExhaustiveSearch
from streamrl.algorithms import ALGORITHMS
from streamrl.dataflow import build_dataflow
from streamrl.engines.models.model_shapes import MODEL_SHAPES, load_model_shape
from streamrl.errors import ConfigError
from streamrl.messages import ROLLOUT_COLUMNS
from streamrl.placement.clusters import Cluster
from streamrl.planner.costs.cost_model import CostModel
from streamrl.planner.problem.problem import PlacementProblem
from streamrl.planner.problem.workload import (
    LengthDistribution,
    LognormalLengths,
    Workload,
    make_fixed_lengths,
)
from streamrl.planner.search.hybridflow import ParallelismChoices, allow_any_split
from streamrl.planner.search.planner import DEFAULT_PROPOSALS, PlacementPlanner
from streamrl.planner.steady_state.estimator import PlacementEstimator

FIXED = make_fixed_lengths(1024)
LONG_TAILED = LognormalLengths(500, 0.8, 4096)
SMALL = (
    ("2xA100", "qwen2.5-0.5b", "grpo"),
    ("4xA100", "qwen2.5-1.5b", "grpo"),
    ("4xA100", "llama-7b", "grpo"),
    ("8xA100", "llama-7b", "grpo"),
    ("8xH200", "qwen3-30b-a3b", "grpo"),
    ("2xA100", "qwen2.5-0.5b", "ppo"),
    ("4xA100", "qwen2.5-1.5b", "ppo"),
    ("8xA100", "llama-7b", "ppo"),
)
"""Clusters, models and algorithms for exhaustive search."""
MOST_GAPS = 21
"""Of the 22 cases in SMALL: the last takes as long as all others together (`--gaps 22`)."""
COMMAND = (
    *("configs/ppo_arithmetic.yaml", "--cluster", "16x8xA100@200Gb"),
    *("--model", "llama-7b", "--model", "reward=llama-7b", "--prompt-tokens", "1024"),
    *("--lengths", "lognormal:600:0.6", "generator.max_new_tokens=1024"),
    *("generator.max_concurrent_rollouts=256", "trainer.gradient_checkpointing=true"),
)
PLAN_128 = ("--cluster", "16x8xA100@200Gb", "--model", "llama-7b", "--prompt-tokens", "1024")
"""A plan of any algorithm on 128 GPUs, with the lengths and groups below."""
STEP_128 = (
    *("--lengths", "lognormal:600:0.6", "generator.max_new_tokens=1024", "algorithm.group_size=8"),
    *("pipeline.groups_per_step=128", "pipeline.micro_batch_tokens=8192"),
)
RECIPES = {
    "ppo": ("ppo_arithmetic", "algorithm.group_size=1", "pipeline.groups_per_step=1024"),
    "remax": ("remax_arithmetic", "algorithm.group_size=1", "pipeline.groups_per_step=1024"),
    "safe_rlhf": ("safe_rlhf_toy", "algorithm.group_size=1", "pipeline.groups_per_step=1024"),
}
"""Recipe and changes by algorithm; others take that of GRPO."""
HYBRIDFLOW_NODES = {"llama-7b": 1, "llama-13b": 2, "llama-34b": 4, "llama-70b": 8}
"""Fewest nodes of eight A100 by model."""
NODES = (1, 2, 4, 8, 12, 16)
SETTINGS = (
    *((model, model, n) for model, few in HYBRIDFLOW_NODES.items() for n in NODES if n >= few),
    *(("llama-13b", "llama-70b", nodes) for nodes in (8, 12, 16)),
)
"""Model of policy and reference, of critic and reward, and nodes."""
HYBRIDFLOW_STEP = (
    *("--prompt-tokens", "1024", "--lengths", "fixed:1024", "--max-staleness", "0"),
    *("generator.max_new_tokens=1024", "generator.max_concurrent_rollouts=256"),
    *("pipeline.groups_per_step=1024", "algorithm.epochs=1", "algorithm.mini_batches=8"),
)
COMMAND_GROUPS, MANY_GROUPS = 1024, 20_000
COMMANDS = (COMMAND_GROUPS, MANY_GROUPS)
COMMAND_TIMEOUT_S = 600.0
GPUS = (16, 32, 64, 128)
MODELS = ("llama-7b", "llama-70b")
COMMAND_LIMIT_S, GAP_LIMIT = 10.0, 0.01
SEEDS = 5


def make_parser() -> BenchmarkParser:
    """Declare the plans to measure."""
    parser = BenchmarkParser("planner", __doc__)
    parser.add_argument(
        "--gpus", type=at_least(1), nargs="+", default=GPUS, help="sizes of the large clusters"
    )
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODEL_SHAPES)
    parser.add_argument("--proposals", type=at_least(1), default=DEFAULT_PROPOSALS)
    parser.add_argument("--seed", type=at_least(0), default=0)
    parser.add_argument(
        "--seeds", type=at_least(0), default=SEEDS, help="number of seeds, from 0 on; 0 for none"
    )
    parser.add_argument(
        "--gaps", type=at_least(0), default=MOST_GAPS, help="cases of small clusters"
    )
    parser.add_argument(
        "--commands", type=at_least(1), nargs="*", default=COMMANDS, help="groups a step"
    )
    parser.add_argument(
        "--settings", type=at_least(0), default=len(SETTINGS), help="settings of HybridFlow"
    )
    parser.add_argument("--algorithms", nargs="*", default=list(ALGORITHMS), choices=ALGORITHMS)
    parser.set_quick(
        settings=0,
        algorithms=[],
        gpus=[4],
        models=["qwen2.5-1.5b"],
        proposals=20,
        seeds=2,
        gaps=2,
        commands=[],
    )
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    run_benchmark(make_parser(), measure, argv)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure every part; report each plan before it starts."""
    sizes = list(product(arguments.models, map(name_a100_cluster, arguments.gpus)))
    largest = name_a100_cluster(max(arguments.gpus))
    small = [
        (cluster, model, algorithm, lengths, ahead)
        for cluster, model, algorithm in SMALL
        for lengths in (FIXED, LONG_TAILED)
        for ahead in ((0, 1) if algorithm == "grpo" and not cluster.startswith("8x") else (0,))
    ][: arguments.gaps]
    parts = ("command", "algorithms", "hybridflow", "seconds", "seeds", "gap")
    results: dict[str, Any] = {name: [] for name in parts}
    for name in arguments.algorithms:
        report_progress(f"algorithms: {name}")
        recipe, *changes = RECIPES.get(name, ("grpo_arithmetic",))
        words = [f"configs/{recipe}.yaml", *PLAN_128, *STEP_128, *changes]
        seconds, plan = run_plan([*words, f"algorithm.name={name}"])
        steps = {
            row["max_staleness"]: round(row["simulated"]["step_s"], 1) for row in plan["front"]
        }
        row = {"algorithm": name, "seconds": seconds, "limit": COMMAND_LIMIT_S, "step_s": steps}
        results["algorithms"].append(row)
    for policy, critic, nodes in SETTINGS[: arguments.settings]:
        report_progress(f"hybridflow: {policy}, {critic}, {8 * nodes} GPUs")
        results["hybridflow"].append(measure_setting(policy, critic, nodes))
    for groups in arguments.commands:
        report_progress(f"command: 128 GPUs, {groups} groups a step")
        results["command"].append(measure_command(groups))
    for model, cluster in sizes:
        report_progress(f"seconds: {model} on {cluster}")
        results["seconds"].append(
            measure_plan(make_problem("ppo", cluster, model, FIXED, 1024), arguments)
        )
    for model in arguments.models if arguments.seeds else ():
        report_progress(f"seeds: {model} on {largest}, {arguments.seeds} times")
        results["seeds"].append(
            measure_seeds(make_problem("ppo", largest, model, FIXED, 1024), arguments)
        )
    for number, (cluster, model, algorithm, lengths, ahead) in enumerate(small, 1):
        name = type(lengths).__name__
        report_progress(
            f"gap {number} of {len(small)}: {algorithm}, {model} on {cluster}, {name},"
            f" max_staleness {ahead}: every placement"
        )
        asked = make_problem(algorithm, cluster, model, lengths, 128)
        results["gap"].append(measure_gap(asked, ahead, arguments))
    return results


def name_a100_cluster(gpus: int) -> str:
    """Return the name of a cluster with at most eight GPUs per node. Raises ConfigError for partial
    nodes."""
    if gpus > 8 and gpus % 8:
        raise ConfigError(f"--gpus {gpus}: must be at most 8, or a multiple of 8")
    return f"{gpus}xA100" if gpus < 8 else f"{gpus // 8}x8xA100"


def make_problem(
    algorithm: str, cluster: str, model: str, lengths: LengthDistribution, groups: int
) -> PlacementProblem:
    """Return a problem in which every role has a model of this size."""
    columns = ["scores", "ref_logprobs", *(["values"] if algorithm == "ppo" else [])]
    shape = load_model_shape(model)
    models = {"policy": shape, "reference": shape, "reward": shape.to_critic()}
    if algorithm == "ppo":
        models["critic"] = shape.to_critic()
    workload = Workload(groups, 1, 1024, lengths, mini_batches=8)
    return PlacementProblem(
        build_dataflow((*ROLLOUT_COLUMNS, *columns)), models, workload, Cluster.from_text(cluster)
    )


def measure_plan(
    placement_problem: PlacementProblem, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Return the seconds to plan, and the plan."""
    start_s = time.process_time()
    planner = PlacementPlanner(placement_problem, CostModel(placement_problem))
    plan = planner.plan([0, 1], seed=arguments.seed, proposals=arguments.proposals)
    seconds = time.process_time() - start_s
    return {
        "cluster": str(placement_problem.cluster),
        "model": placement_problem.models["policy"].name,
        "seconds": round(seconds, 2),
        "placements": sum(1 for _ in planner.estimator.iter_estimated()),
        "step_s": {point.max_staleness: round(point.candidate.step_s, 2) for point in plan.points},
        "best": plan.candidates[0].label if plan.points else "nothing fits",
    }


def run_plan(words: Sequence[str]) -> tuple[float, dict[str, Any]]:
    """Run `streamrl plan` in a process of its own; return its CPU seconds and its JSON."""
    command = [sys.executable, "-m", "streamrl.cli", "plan", *words, "--json"]
    start_s = resource.getrusage(resource.RUSAGE_CHILDREN)
    printed = run_command(command, " ".join(words), timeout_s=COMMAND_TIMEOUT_S, cwd=ROOT)
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = ended.ru_utime - start_s.ru_utime + ended.ru_stime - start_s.ru_stime
    return round(seconds, 1), json.loads(printed)


def measure_command(groups: int) -> dict[str, Any]:
    """Measure a whole command in a process of its own."""
    seconds, plan = run_plan([*COMMAND, f"pipeline.groups_per_step={groups}"])
    row = {"groups_per_step": groups, "seconds": seconds, "best": plan["best"]["kind"]}
    return row | ({"limit": COMMAND_LIMIT_S} if groups == COMMAND_GROUPS else {})


def measure_setting(policy: str, critic: str, nodes: int) -> dict[str, Any]:
    """Plan a setting of HybridFlow; models are those of policy and reference, critic and reward.

    Raises BenchmarkError if nothing fits.
    """
    models = [f"policy={policy}", f"reference={policy}", f"critic={critic}", f"reward={critic}"]
    words = ["configs/ppo_arithmetic.yaml", "--cluster", f"{nodes}x8xA100@200Gb", *HYBRIDFLOW_STEP]
    words.append("rewards=[{kind: model, path: reward, batch_tokens: 4096}]")
    seconds, plan = run_plan([*words, *(word for name in models for word in ("--model", name))])
    best = plan["best"]
    calls = {
        stage: f"{call['grid']} on {call['devices']}"
        + f", ZeRO {call['zero_stage']}" * stage.startswith("train")
        + f", checkpointing {call['checkpointing']}" * bool(call["checkpointing"])
        + ", offloaded" * call["offloaded"]
        for stage, call in best["placement"]["calls"].items()
    }
    step_s = round(best["simulated"]["step_s"], 1)
    row = {"policy": policy, "critic": critic, "gpus": 8 * nodes, "seconds": seconds}
    return row | {"best": best["kind"], "step_s": step_s, "calls": calls}


def measure_seeds(asked: PlacementProblem, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return step times on policy by seed."""
    step_times = []
    for seed in range(arguments.seeds):
        planned = PlacementPlanner(asked, CostModel(asked)).plan(
            [0], seed=seed, proposals=arguments.proposals
        )
        step_times.append(planned.candidates[0].step_s if planned.points else math.inf)
    return {
        "cluster": str(asked.cluster),
        "model": asked.models["policy"].name,
        "step_s": [round(step_s, 2) for step_s in step_times],
        "gap": round(max(step_times) / min(step_times) - 1, 4),
        "limit": GAP_LIMIT,
    }


def measure_gap(
    asked: PlacementProblem, ahead: int, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Return the relative excess of Algorithm 1, and of the plan, over the best placement."""
    costs = CostModel(asked)
    planner = PlacementPlanner(asked, costs)
    mapped = planner.model_mapping.find_best()
    plan = planner.plan([ahead], seed=arguments.seed, proposals=arguments.proposals)
    row: dict[str, Any] = {
        "cluster": str(asked.cluster),
        "model": asked.models["policy"].name,
        "roles": len(planner.choices.roles),
        "lengths": type(asked.workload.lengths).__name__,
        "max_staleness": ahead,
    }
    if not plan.points:
        return row | {"fits": False}
    start_s = time.process_time()
    oracle = ExhaustiveSearch(
        ParallelismChoices(PlacementEstimator(asked, costs), rules=allow_any_split),
        sorted({0, ahead}),
    )
    planned = plan.candidates[0].placement
    _, best_s = oracle.find_best(planned)
    planned_s = planner.estimator.estimate_step_s(planned)
    mapped_s = planner.estimator.estimate_step_s(mapped) if mapped else None
    return row | {
        "best_s": round(best_s, 3),
        "algorithm_1_gap": round(mapped_s / best_s - 1, 4) if mapped_s else None,
        "plan_gap": round(planned_s / best_s - 1, 4),
        "limit": GAP_LIMIT,
        "oracle_seconds": round(time.process_time() - start_s, 1),
        "oracle_looked_at": oracle.num_scheduled,
    }


if __name__ == "__main__":
    main()

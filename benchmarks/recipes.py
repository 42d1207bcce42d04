"""Simulate the recipes for clusters: `python -m benchmarks.recipes` prints one JSON object.

A recipe's file has the command that simulates it, with its cluster, models and lengths. `--into
docs/recipes.md` writes the table of that page instead.

gpus_idle    share of all GPU time in which no stage computes
memory_gb    on the GPU with the least free memory, at its peak
kv_rollouts  rollouts of full length that fit in a generator's KV cache
"""

import argparse
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.command import ROOT, BenchmarkParser, replace_table, report_progress, run_benchmark
from streamrl.cli import simulate
from streamrl.cli.arguments.planner_args import read_planner_inputs
from streamrl.config.run_config import RunConfig, load_config
from streamrl.planner.costs.cost_model import CostModel
from streamrl.planner.simulator.results import SimulationResult
from streamrl.planner.simulator.simulation import run_simulation
from streamrl.planner.steady_state.estimator import PlacementEstimator
from streamrl.planner.to_placement import build_run_placement

TABLE = "recipes"
STEPS = 20
NEMO = {
    "grpo_qwen2.5_7b_math_split": "2,161",
    "grpo_qwen3_30b_a3b_math": "864 to 925",
    "dapo_qwen2.5_32b_math_4x8": "540",
}
"""Tokens per second and GPU that NeMo-RL prints for such models, at other lengths."""


def find_recipes() -> dict[str, Path]:
    """Return the recipes for clusters by name: configs with a command that simulates them."""
    paths = sorted((ROOT / "configs").glob("*.yaml"))
    return {path.stem: path for path in paths if list_commands(path, "streamrl simulate")}


def list_commands(path: Path, program: str) -> list[list[str]]:
    """Return the words of the commands in a config's comments that start with `program`."""
    lines = re.findall(rf"^#   ({program} .*)$", path.read_text(), flags=re.MULTILINE)
    return [shlex.split(line) for line in lines]


def read_simulation(path: Path) -> tuple[argparse.Namespace, RunConfig]:
    """Return the arguments of a recipe's `streamrl simulate`, and its config."""
    (words,) = list_commands(path, "streamrl simulate")
    parser = argparse.ArgumentParser()
    simulate.add_arguments(parser)
    arguments = parser.parse_args(words[2:])
    return arguments, load_config(ROOT / arguments.config, arguments.overrides)


def make_parser() -> BenchmarkParser:
    parser = BenchmarkParser("python -m benchmarks.recipes", __doc__)
    recipes = find_recipes()
    parser.add_argument("--only", nargs="+", default=list(recipes), choices=recipes, help="recipes")
    parser.add_argument("--into", type=Path, metavar="PAGE", help="write the table there")
    parser.set_quick(only=["grpo_qwen2.5_7b_math_split"])
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser()
    arguments = parser.parse(argv)
    if not arguments.into:
        run_benchmark(parser, measure, argv)
    else:
        page = replace_table(arguments.into.read_text(), TABLE, format_table(measure(arguments)))
        arguments.into.write_text(page)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    return {name: simulate_recipe(find_recipes()[name]) for name in arguments.only}


def simulate_recipe(path: Path) -> dict[str, Any]:
    """Simulate a recipe on its cluster."""
    arguments, config = read_simulation(path)
    problem, constants = read_planner_inputs(arguments, config).build_problem(config)
    placement = build_run_placement(config, problem.models)
    placement.check_on_cluster(problem.cluster)
    costs = CostModel(problem, constants)
    estimate = PlacementEstimator(problem, costs).estimate(placement)
    timings = costs.predict_timings(placement)
    result = run_simulation(
        problem.dataflow,
        placement,
        timings,
        problem.workload,
        steps=STEPS,
        seed=arguments.seed,
        run_options=problem.run_options,
    )
    devices = problem.cluster.num_devices
    sizes = {stage: assignment.mesh.size for stage, assignment in placement.assignments.items()}
    longest = problem.workload.prompt_tokens + config.max_completion_tokens
    report_progress(f"{path.stem}: {result.mean_step_s:.0f} s a step")
    return {
        "cluster": arguments.cluster,
        "stages": describe_stages(sizes, result),
        "memory_gb": estimate.memory_bytes / 1e9,
        "kv_rollouts": int(timings.generator.kv_tokens / longest),
        "step_s": result.mean_step_s,
        "tokens_per_s": result.tokens_per_s,
        "tokens_per_s_gpu": result.tokens_per_s / devices,
        "gpus_idle": compute_idle_share(sizes, result, devices),
    }


def describe_stages(sizes: Mapping[str, int], result: SimulationResult) -> dict[str, Any]:
    """Return the GPUs of each stage, and the share of a step in which it does not compute."""
    return {
        stage: {"gpus": size, "idle": result.idle_fractions[stage]} for stage, size in sizes.items()
    }


def compute_idle_share(sizes: Mapping[str, int], result: SimulationResult, devices: int) -> float:
    """Return the idle share of all devices; stages that share devices compute in turn."""
    busy = sum(size * (1 - result.idle_fractions[stage]) for stage, size in sizes.items())
    return 1 - busy / devices


def format_table(figures: Mapping[str, Any]) -> str:
    lines = [
        "| recipe | cluster | GPUs of each stage, and its idle share | GB on a GPU | full rollouts"
        " in a KV cache | a step, s | tokens/s | tokens/s and GPU | GPUs idle | NeMo-RL |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, recipe in figures.items():
        stages = ", ".join(
            f"{stage} {of['gpus']}: {of['idle']:.0%}" for stage, of in recipe["stages"].items()
        )
        cells = [
            f"`{name}`",
            recipe["cluster"],
            stages,
            f"{recipe['memory_gb']:.0f}",
            f"{recipe['kv_rollouts']}",
            f"{recipe['step_s']:,.0f}",
            f"{recipe['tokens_per_s']:,.0f}",
            f"{recipe['tokens_per_s_gpu']:,.0f}",
            f"{recipe['gpus_idle']:.0%}",
            NEMO.get(name, ""),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

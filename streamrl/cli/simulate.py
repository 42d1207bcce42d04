"""`streamrl simulate`: simulate a run's placement on a cluster in virtual time."""

import argparse
import json
from functools import partial
from typing import Any

from streamrl.cli.arguments.arg_types import parse_whole_number
from streamrl.cli.arguments.planner_args import (
    add_problem_arguments,
    check_simulation_time,
    read_planner_inputs,
)
from streamrl.config.run_config import load_config
from streamrl.errors import ConfigError
from streamrl.planner.costs.cost_model import CostModel
from streamrl.planner.plan_report import (
    describe_assignments,
    describe_problem,
    format_count,
    format_seconds,
    format_table,
    simulation_to_json,
)
from streamrl.planner.simulator.quick_run import choose_num_steps, estimate_simulation_s
from streamrl.planner.simulator.results import SimulationResult
from streamrl.planner.simulator.simulation import run_simulation
from streamrl.planner.to_placement import build_run_placement, check_run_splits
from streamrl.telemetry.progress import ProgressLine, show_progress

DEFAULT_STEPS = 20
MAX_STEPS = 10_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "streamrl simulate CONFIG [key=value ...] --cluster 8xH100 [options]"
    add_problem_arguments(parser)
    parser.add_argument(
        "--steps",
        type=partial(parse_whole_number, least=1, most=MAX_STEPS),
        metavar="N",
        help=f"training steps ({DEFAULT_STEPS}, or more if generation runs far ahead)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    with show_progress("reading config and data") as progress:
        text = _simulate(arguments, progress)
    print(text)
    return 0


def _simulate(arguments: argparse.Namespace, progress: ProgressLine) -> str:
    """Simulate the placement; return the output."""
    config = load_config(arguments.config, arguments.overrides)
    problem, constants = read_planner_inputs(arguments, config).build_problem(config)
    check_run_splits(config, problem)
    placement = build_run_placement(config, problem.models)
    sections = {call.stage: config.get_ranks_section(call) for call in config.dataflow.calls}
    placement.check_on_cluster(problem.cluster, sections)
    costs = CostModel(problem, constants)
    if why := costs.explain_infeasible(placement):
        raise ConfigError(f"{problem.cluster}: {why}")
    steps = arguments.steps
    if steps is None:
        lead = problem.run_options.get_max_steps_ahead(placement.max_staleness)
        steps = max(DEFAULT_STEPS, choose_num_steps(problem.workload, lead))
    timings = costs.predict_timings(placement)
    estimated_s = estimate_simulation_s(
        problem.workload, len(problem.dataflow.ordered_calls), steps=steps
    )
    check_simulation_time(estimated_s, problem.workload, prefix=f"--steps {steps}, ")
    progress.describe("simulating", steps, "steps")
    result = run_simulation(
        problem.dataflow,
        placement,
        timings,
        problem.workload,
        steps=steps,
        seed=arguments.seed,
        run_options=problem.run_options,
        on_step=progress.advance,
    )
    if arguments.json:
        return json.dumps(to_json(result))
    texts = describe_assignments(problem, placement)
    placed = "; ".join(f"{stage} {text}" for stage, text in texts.items())
    head = [describe_problem(config, problem), placed, ""]
    return "\n".join([*head, *describe_simulation(result)])


def describe_simulation(result: SimulationResult) -> list[str]:
    rows = [["stage", "idle", "groups waiting"]]
    for stage, idle in result.idle_fractions.items():
        rows.append([stage, f"{idle:.0%}", f"{result.queue_depths.get(stage, 0):.1f}"])
    ages = " ".join(
        f"{age}: {tokens / result.tokens_by_staleness.total():.0%}"
        for age, tokens in sorted(result.tokens_by_staleness.items())
    )
    notes = f"{result.warm_up_steps} of them warm-up"
    if result.cool_down_steps:
        notes += f", the last {result.cool_down_steps} without new prompts"
    lines = [
        f"step        {format_seconds(result.mean_step_s)} s"
        f" ({len(result.step_ends)} steps, {notes})",
        f"throughput  {format_count(result.tokens_per_s)} tokens/s",
        f"staleness   {result.staleness_mean:.2f} on average, at most {result.staleness_max}"
        f" ({ages})",
        f"ledger      {result.ledger}",
    ]
    return [*lines, "", *format_table(rows)]


def to_json(result: SimulationResult) -> dict[str, Any]:
    return {
        **simulation_to_json(result),
        "staleness": {
            str(age): tokens for age, tokens in sorted(result.tokens_by_staleness.items())
        },
        "queue_depth": result.queue_depths,
        "step_ends_s": list(result.step_ends),
        "ledger": vars(result.ledger) | {"drops": dict(result.ledger.drops)},
    }

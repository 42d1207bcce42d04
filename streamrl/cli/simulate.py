"""`streamrl simulate`: a run's placement on a cluster, played in virtual time."""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from streamrl.cli.arguments.arg_types import named_path
from streamrl.cli.arguments.planner_args import (
    HOUR_S,
    add_problem_arguments,
    check_time,
    problem_line,
    read_config,
    read_problem,
)
from streamrl.cli.output.output_files import check_folder
from streamrl.cli.output.text_table import count, percent, seconds, table
from streamrl.config import RunConfig
from streamrl.config.to_placement import run_placement
from streamrl.dataflow import GENERATE, Kind
from streamrl.errors import ConfigError
from streamrl.files.bounded_read import read_small_json
from streamrl.files.typed_settings import unreadable
from streamrl.placement import Placement, Problem
from streamrl.placement.costs import CostModel
from streamrl.simulator import Failures, Simulated, simulate, simulated_s, steps_of
from streamrl.telemetry.sinks import check_no_run

STEPS = 20
MOST_STEPS = 10_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `streamrl simulate`."""
    parser.usage = "streamrl simulate CONFIG [key=value ...] --cluster FILE|8xH100 [options]"
    add_problem_arguments(parser)
    parser.add_argument(
        "--placement",
        type=named_path,
        metavar="FILE",
        help="a placement that plan has written (-o plan.json); by default the config's own",
    )
    parser.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help=f"optimizer steps ({STEPS}, and more where generation is far ahead)",
    )
    parser.add_argument(
        "--mttf-h", type=float, metavar="HOURS", help="mean time to failure of a node"
    )
    parser.add_argument(
        "--restart-s", type=float, default=300.0, metavar="S", help="until a node is back (300)"
    )
    parser.add_argument(
        *("-o", "--output"),
        type=named_path,
        metavar="DIR",
        help="write trace.json and metrics.jsonl there, as a run does",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Run the command; returns its exit code."""
    if arguments.steps is not None and not 1 <= arguments.steps <= MOST_STEPS:
        raise ConfigError(f"--steps {arguments.steps}: must be from 1 to {MOST_STEPS}")
    if arguments.output is not None:
        check_folder("-o", arguments.output)
        check_no_run(arguments.output)
    failures = _failures(arguments)
    given = _read_placement(arguments.placement) if arguments.placement is not None else None
    config = read_config(arguments.config, arguments.overrides)
    problem, constants = read_problem(arguments, config)
    placement = _placement(arguments, config, problem, given)
    costs = CostModel(problem, constants)
    if why := costs.unfit(placement):
        raise ConfigError(f"{problem.cluster}: {why}")
    steps = arguments.steps
    if steps is None:
        lead = problem.manner.lead(placement.max_staleness)
        steps = max(STEPS, steps_of(problem.workload.groups_per_step, lead))
    timings = costs.timings(placement)
    takes_s = simulated_s(problem.workload, steps=steps, generator=timings.generator)
    check_time(takes_s, problem.workload, place=f"--steps {steps}, ")
    if failures is not None:
        failures = _failures_of(failures, config, problem)
        _check_progress(failures, placement, costs, steps)
    found = simulate(
        problem.dataflow,
        placement,
        timings,
        problem.workload,
        steps=steps,
        seed=arguments.seed,
        failures=failures,
        manner=problem.manner,
    )
    if arguments.output is not None:
        found.write(arguments.output)
    if arguments.json:
        print(json.dumps(as_json(found)))
    else:
        print("\n".join([problem_line(config, problem), f"{placement}", "", *described(found)]))
    return 0


def _read_placement(path: Path) -> Placement:
    """Of a file. Raises ConfigError."""
    try:
        loaded = read_small_json(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--placement {path}: {unreadable(error)}") from None
    return Placement.of_dict(loaded, place=f"--placement {path}")


def _placement(
    arguments: argparse.Namespace, config: RunConfig, problem: Problem, given: Placement | None
) -> Placement:
    """The one that is given, or the config's own; checked against the cluster."""
    placement = given or run_placement(config, problem.models)
    place = f"{arguments.config}, as it is placed" if given is None else f"{arguments.placement}"
    try:
        placement.check(problem.dataflow, problem.cluster)
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from None
    return placement


def _failures(arguments: argparse.Namespace) -> Failures | None:
    """How often nodes die, if they do; checkpoints and nodes are yet to be said."""
    mttf_h, restart_s = arguments.mttf_h, arguments.restart_s
    told = f"--restart-s {restart_s:g}"
    # Where nobody dies, a time until a node is back must still be one.
    mttf_s = 2 * restart_s
    if mttf_h is not None:
        mttf_s, told = mttf_h * HOUR_S, f"--mttf-h {mttf_h:g}, {told}"
    try:
        found = Failures(mttf_s, restart_s)
    except ConfigError as error:
        raise ConfigError(f"{told}: {error}") from None
    return None if mttf_h is None else found


def _failures_of(failures: Failures, config: RunConfig, problem: Problem) -> Failures:
    """As a run has them: its checkpoints, and the cluster's largest nodes."""
    # Without checkpoints a run starts again from its beginning.
    every = config.checkpoint.every or MOST_STEPS
    devices = max(group.devices for group in problem.cluster.groups)
    return replace(failures, checkpoint_every=every, node_devices=devices)


def _check_progress(failures: Failures, placement: Placement, costs: CostModel, steps: int) -> None:
    """Raise ConfigError if nodes die too often for a run so placed."""
    calls = costs.problem.dataflow.of_kind(Kind.TRAIN)
    trained = {call.stage: placement.calls[call.stage] for call in calls}
    step_s = max(costs.call_s(stage, each) for stage, each in trained.items())
    first_s = costs.first_s(placement.calls[GENERATE.stage])
    meshes = [each.mesh for each in trained.values()]
    try:
        failures.check_progress(meshes, first_s=first_s, step_s=step_s, steps=steps)
    except ConfigError as error:
        raise ConfigError(f"--mttf-h {failures.mttf_s / HOUR_S:g}: {error}") from None


def described(found: Simulated) -> list[str]:
    """What came of it, for a person."""
    rows = [["stage", "idle", "groups waiting"]]
    for stage, idle in found.idle.items():
        depth = _mean_depth(found, stage)
        rows.append([stage, percent(idle), f"{depth:.1f}"])
    ages = " ".join(
        f"{age}: {tokens / found.staleness.total():.0%}"
        for age, tokens in sorted(found.staleness.items())
    )
    lines = [
        f"step        {seconds(found.step_s)} s, median {seconds(found.step_s_median)} s"
        f" ({len(found.step_ends)} steps, {found.warm_up} of them to warm up{_last(found)})",
        f"throughput  {count(found.tokens_per_s)} tokens/s",
        f"staleness   {found.staleness_mean:.2f} on average, at most {found.staleness_max}"
        f" ({ages})",
        f"ledger      {found.ledger}",
    ]
    if found.crashes:
        lines.append(
            f"crashes     {len(found.crashes)}: {count(found.lost_tokens)} tokens sampled in vain,"
            f" {found.steps_again} steps made again"
        )
    return [*lines, "", *table(rows)]


def _last(found: Simulated) -> str:
    """How many at the end are left out as well."""
    return f", the last {found.cool_down} without new prompts" if found.cool_down else ""


def _mean_depth(found: Simulated, stage: str) -> float:
    """Groups that waited for a stage, on average over time."""
    changes = found.depths.get(stage, ())
    if not changes:
        return 0.0
    end = found.step_ends[-1]
    times = [*(at for at, _ in changes), end]
    waits = zip(times, times[1:], (depth for _, depth in changes), strict=False)
    return sum((b - a) * depth for a, b, depth in waits) / max(end - changes[0][0], 1e-12)


def as_json(found: Simulated) -> dict[str, Any]:
    """What came of it, for scripts."""
    return {
        "step_s": found.step_s,
        "step_s_median": found.step_s_median,
        "tokens_per_s": found.tokens_per_s,
        "idle": dict(found.idle),
        "staleness_mean": found.staleness_mean,
        "staleness_max": found.staleness_max,
        "staleness": {str(age): tokens for age, tokens in sorted(found.staleness.items())},
        "queue_depth": {stage: _mean_depth(found, stage) for stage in found.depths},
        "step_ends_s": list(found.step_ends),
        "ledger": vars(found.ledger) | {"drops": dict(found.ledger.drops)},
        "crashes": len(found.crashes),
        "lost_tokens": found.lost_tokens,
        "steps_again": found.steps_again,
    }

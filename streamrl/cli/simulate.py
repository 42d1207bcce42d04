"""`streamrl simulate`: a run's placement on a cluster, played in virtual time."""

import argparse
import json
import math
from pathlib import Path
from typing import Any

from streamrl.cli.problem import add_problem_arguments, problem_line, read_problem
from streamrl.cli.tables import count, percent, seconds, table
from streamrl.config import RunConfig
from streamrl.dataflow import GENERATE, Kind
from streamrl.errors import ConfigError
from streamrl.placement import Placement, Problem
from streamrl.placement.costs import CostModel
from streamrl.placing import run_placement
from streamrl.planning import manner_of
from streamrl.settings import unreadable
from streamrl.simulator import Failures, Simulated, simulate

HOUR_S = 3600.0
MOST_STEPS = 10_000
MOST_DEATHS = 5.0
"""Between two checkpoints, on average; with x of them one time in e^x all goes well."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `streamrl simulate`."""
    parser.usage = "streamrl simulate CONFIG [key=value ...] --cluster FILE|8xH100 [options]"
    add_problem_arguments(parser)
    parser.add_argument(
        "--placement",
        type=Path,
        metavar="FILE",
        help="a placement that plan has written (-o plan.json); by default the config's own",
    )
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="optimizer steps (20)")
    parser.add_argument(
        "--mttf-h", type=float, metavar="HOURS", help="mean time to failure of a node"
    )
    parser.add_argument(
        "--restart-s", type=float, default=300.0, metavar="S", help="until a node is back (300)"
    )
    parser.add_argument(
        *("-o", "--output"),
        type=Path,
        metavar="DIR",
        help="write trace.json and metrics.jsonl there, as a run does",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Run the command; returns its exit code."""
    if not 1 <= arguments.steps <= MOST_STEPS:
        raise ConfigError(f"--steps {arguments.steps}: must be from 1 to {MOST_STEPS}")
    _check_failures(arguments)
    given = _read_placement(arguments.placement) if arguments.placement is not None else None
    config, problem, constants = read_problem(arguments)
    placement = _placement(arguments, config, problem, given)
    costs = CostModel(problem, constants)
    if why := costs.unfit(placement):
        raise ConfigError(f"{problem.cluster}: {why}")
    failures = _failures(arguments, config, problem)
    if failures is not None:
        _check_ends(arguments, failures, placement, costs)
    found = simulate(
        problem.dataflow,
        placement,
        costs.timings(placement),
        problem.workload,
        steps=arguments.steps,
        seed=arguments.seed,
        failures=failures,
        manner=manner_of(config),
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
        loaded = json.loads(path.read_text())
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


def _check_failures(arguments: argparse.Namespace) -> None:
    """Raise ConfigError for times that are none, or nodes that die before they are back."""
    mttf_h, restart_s = arguments.mttf_h, arguments.restart_s
    for option, value in (("mttf-h", mttf_h), ("restart-s", restart_s)):
        if value is not None and not (value > 0 and math.isfinite(value * HOUR_S)):
            raise ConfigError(f"--{option} {value:g}: must be above 0 and finite")
    if mttf_h is not None and mttf_h * HOUR_S <= restart_s:
        raise ConfigError(
            f"--mttf-h {mttf_h:g}: is {mttf_h * HOUR_S:g} s: must be above --restart-s"
            f" {restart_s:g}, or a node dies again before it is back"
        )


def _check_ends(
    arguments: argparse.Namespace, failures: Failures, placement: Placement, costs: CostModel
) -> None:
    """Raise ConfigError if nodes that train die too often for the run to get anywhere.

    A death leaves what is sampled, but for rollouts under way, and of what is trained the last
    checkpoint.
    """
    calls = costs.problem.dataflow.of_kind(Kind.TRAIN)
    trained = {call.stage: placement.calls[call.stage] for call in calls}
    size = failures.node_devices
    nodes = len({device // size for each in trained.values() for device in each.mesh.devices})
    steps = min(failures.checkpoint_every, arguments.steps)
    train_s = max(costs.call_s(stage, each) for stage, each in trained.items())
    first_s = costs.first_s(placement.calls[GENERATE.stage])
    most_s = MOST_DEATHS * failures.mttf_s / nodes
    place = f"--mttf-h {arguments.mttf_h:g}: of {nodes} nodes that train one dies every"
    place += f" {seconds(failures.mttf_s / nodes)} s"
    if first_s > most_s:
        raise ConfigError(
            f"{place}: the first rollouts take {seconds(first_s)} s: must be at most"
            f" {MOST_DEATHS:g} times as long"
        )
    if steps * train_s > most_s:
        raise ConfigError(
            f"{place}: {steps} steps without a checkpoint are trained for"
            f" {seconds(steps * train_s)} s: must be at most {MOST_DEATHS:g} times as long;"
            " checkpoint.every says how many there are"
        )


def _failures(
    arguments: argparse.Namespace, config: RunConfig, problem: Problem
) -> Failures | None:
    if arguments.mttf_h is None:
        return None
    return Failures(
        arguments.mttf_h * HOUR_S,
        arguments.restart_s,
        # Without checkpoints a run starts again from its beginning.
        config.checkpoint.every or MOST_STEPS,
        max(group.devices for group in problem.cluster.groups),
    )


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

"""`streamrl plan`: which placement is best for a run on a cluster, and why the others lost.

Candidates are found by the schedule that a cost model gives; the best under each bound of staleness
are then played in virtual time by the simulator, which has the last word.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from streamrl.cli.arguments.arg_types import parse_nonempty, parse_path
from streamrl.cli.arguments.planner_args import (
    add_problem_arguments,
    check_simulation_time,
    read_config,
    read_planner_inputs,
)
from streamrl.cli.arguments.staleness_args import (
    DEFAULT_BOUNDS,
    parse_bounds,
    read_staleness_request,
)
from streamrl.cli.output.fit_suggestions import PlanningInputs, suggest_fixes
from streamrl.cli.output.output_files import check_output_file, write_output_file
from streamrl.cli.output.plan_report import PlanReport, SimulatedPoint
from streamrl.cli.output.text_table import format_count, format_seconds
from streamrl.config import RunConfig, config_to_dict, dump_config
from streamrl.config.to_placement import (
    apply_placement,
    configure_for_cluster,
    has_shared_generator_devices,
    make_run_costs,
    make_split_rules,
)
from streamrl.drawing.timeline import render_timeline
from streamrl.errors import ConfigError
from streamrl.placement import Cluster, PlacementProblem
from streamrl.placement.costs import CostModel
from streamrl.placement.problem import PlacementCosts
from streamrl.placement.search import (
    DEFAULT_PROPOSALS,
    DEFAULT_RUNNERS_UP,
    ExcludedBound,
    ParetoPoint,
    PlacementCandidate,
    PlanResult,
    SplitRules,
    allow_any_split,
    plan_placement,
)
from streamrl.simulator import (
    SimulationResult,
    estimate_quick_run_groups,
    estimate_quick_run_s,
    estimate_simulation_s,
    run_quick_simulation,
    split_workload,
)

MAX_PROPOSALS = 100_000
MAX_RUNNER_UP_GROUPS = 512
"""In a step, where not the schedule alone says which of the best of a bound is the best."""
MAX_REPLAYED_GROUPS = 8192
"""Of all that are played besides, together, at most: about a second."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `streamrl plan`."""
    parser.usage = "streamrl plan CONFIG [key=value ...] --cluster FILE|8xH100 [options]"
    add_problem_arguments(parser)
    parser.add_argument(
        "--max-staleness",
        type=parse_nonempty,
        metavar="LIST",
        help="bounds to choose of, as 0,1,4; by default the config's own, and what"
        f" {DEFAULT_BOUNDS} would give is shown beside it",
    )
    parser.add_argument(
        "--pipeline",
        action="store_true",
        help="plan also for what streamrl itself does not run: pipeline stages, and models that"
        " score split over devices",
    )
    parser.add_argument(
        "--proposals",
        type=int,
        default=DEFAULT_PROPOSALS,
        metavar="N",
        help=f"of each random search ({DEFAULT_PROPOSALS})",
    )
    parser.add_argument("--explain", action="store_true", help="why every other kind lost")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        *("-o", "--output"),
        type=parse_path,
        metavar="FILE",
        help="write the best: .yaml is the config of a run that is so placed, .json the placement",
    )
    parser.add_argument("--svg", type=parse_path, metavar="FILE", help="draw its devices over time")


def run(arguments: argparse.Namespace) -> int:
    """Run the command: 0 if there is a placement, 1 if nothing fits."""
    _check_options(arguments)
    config, own, bounds, refused = read_staleness_request(arguments)
    question = read_planner_inputs(arguments, config)
    problem, constants = question.build_problem(config)
    output = arguments.output
    if output is not None and output.suffix == ".yaml" and not problem.cluster.is_uniform:
        raise ConfigError(
            f"-o {output}: a run cannot say which of unlike devices a role gets; -o plan.json can"
        )
    # Parts are as many as there are replicas, at most, and those as many as devices.
    part = split_workload(problem.workload, problem.cluster.num_devices)
    takes_s = sum(estimate_simulation_s(part, lead=bound) for bound in bounds)
    check_simulation_time(takes_s, problem.workload, place="")
    costs = CostModel(problem, constants)

    def checked(config: RunConfig, problem: PlacementProblem, costs: CostModel) -> PlacementCosts:
        return costs if arguments.pipeline else make_run_costs(config, problem, costs)

    def rules(config: RunConfig, problem: PlacementProblem) -> SplitRules:
        return allow_any_split if arguments.pipeline else make_split_rules(config, problem)

    def costs_of(part: PlacementProblem) -> PlacementCosts:
        return checked(config, part, costs if part is problem else CostModel(part, constants))

    def planning_of(config: RunConfig, cluster: Cluster) -> PlanningInputs:
        problem, constants = question.build_problem(config, cluster)
        found = checked(config, problem, CostModel(problem, constants))
        return problem, found, rules(config, problem)

    planned = plan_placement(
        problem,
        costs_of,
        max_staleness=bounds,
        seed=arguments.seed,
        rules=rules(config, problem),
        # A run's calls always work on a step as it comes.
        streamed=(True, False) if arguments.pipeline else (True,),
        proposals=arguments.proposals,
        runners_up=DEFAULT_RUNNERS_UP
        if problem.workload.groups_per_step <= MAX_RUNNER_UP_GROUPS
        else 0,
        own=own,
    )
    played = _simulate_front(problem, list_shown_points(planned), costs, arguments.seed)
    kept, lost = select_gaining_points(played, own)
    fixes = suggest_fixes(config, question.cluster, planning_of) if not kept else []
    report = PlanReport(config, problem, planned, kept, [*refused, *lost], own, fixes)
    settings = _write_files(arguments, report, costs) if report.best_row is not None else {}
    if arguments.json:
        print(json.dumps(report.to_json(settings)))
    else:
        print(report.to_text(settings, explain=arguments.explain))
    return 0 if report.best_row is not None else 1


def _check_options(arguments: argparse.Namespace) -> None:
    """Raise ConfigError for options that are wrong by themselves."""
    if arguments.max_staleness is not None:
        parse_bounds(arguments.max_staleness)
    if not 0 <= arguments.proposals <= MAX_PROPOSALS:
        raise ConfigError(f"--proposals {arguments.proposals}: must be from 0 to {MAX_PROPOSALS}")
    if arguments.output is not None and arguments.output.suffix not in (".yaml", ".json"):
        raise ConfigError(f"-o {arguments.output}: must end in .yaml or .json")
    asked = {"-o": arguments.output, "--svg": arguments.svg}
    places = [check_output_file(option, path) for option, path in asked.items() if path is not None]
    if len(places) > len(set(places)):
        raise ConfigError(f"-o, --svg {arguments.svg}: must be two files")


def list_shown_points(planned: PlanResult) -> list[ParetoPoint]:
    """The front, with the run's own bound whether or not it gains anything."""
    if not isinstance(planned.run_bound, ParetoPoint):
        return list(planned.front)
    own = planned.run_bound
    others = [point for point in planned.front if point.max_staleness != own.max_staleness]
    return sorted([own, *others], key=lambda point: point.max_staleness)


def _simulate_front(
    problem: PlacementProblem, front: Sequence[ParetoPoint], costs: CostModel, seed: int
) -> list[SimulatedPoint]:
    """Every point of the front in virtual time, with the best of those that come next to it."""
    flow, workload, manner = problem.dataflow, problem.workload, problem.run_options

    def played(candidate: PlacementCandidate) -> SimulationResult:
        placement = candidate.placement
        timings = costs.predict_timings(placement)
        return run_quick_simulation(flow, placement, timings, workload, seed=seed, run_options=manner)

    placements = [point.candidate.placement for point in front]
    seconds = [
        estimate_quick_run_s(costs.predict_timings(p), workload, p.max_staleness)
        for p in placements
    ]
    check_simulation_time(sum(seconds), workload, place="")
    found = [(point, played(point.candidate)) for point in front]
    left = MAX_REPLAYED_GROUPS
    for turn in range(max((len(point.runners_up) for point in front), default=0)):
        # What is best of all is mostly the last.
        for i, point in reversed([*enumerate(front)]):
            for other in point.runners_up[turn : turn + 1]:
                ahead, timings = (
                    other.placement.max_staleness,
                    costs.predict_timings(other.placement),
                )
                needed = estimate_quick_run_groups(timings, workload, ahead)
                if needed > left:
                    continue
                left -= needed
                if (mine := played(other)).tokens_per_s > found[i][1].tokens_per_s:
                    found[i] = (replace(point, candidate=other), mine)
    return found


def select_gaining_points(
    played: Sequence[SimulatedPoint], own: int | None = None
) -> tuple[list[SimulatedPoint], list[ExcludedBound]]:
    """The points that, as they were played, have more throughput than all with a lower bound, and
    the run's own.

    And why the others are left out.
    """
    kept: list[SimulatedPoint] = []
    lost: list[ExcludedBound] = []
    for point, found in played:
        best, most = max(kept, key=lambda row: row[1].tokens_per_s, default=(point, None))
        is_own = point.max_staleness == own
        if most is None or is_own or found.tokens_per_s > most.tokens_per_s:
            kept.append((point, found))
            continue
        why = (
            f"simulated, it has {format_count(found.tokens_per_s)} tokens/s, and"
            f" {best.max_staleness}"
        )
        lost.append(
            ExcludedBound(point.max_staleness, f"{why} has {format_count(most.tokens_per_s)}")
        )
    return kept, lost


def _write_files(
    arguments: argparse.Namespace, report: PlanReport, costs: CostModel
) -> dict[str, Any]:
    """Write the files that are asked for; what a config among them has other than the run's."""
    candidate = report.best_point.candidate
    placement, changed = candidate.placement, {}
    if arguments.output is not None:
        if arguments.output.suffix == ".json":
            content = json.dumps(placement.to_dict(), indent=1) + "\n"
        else:
            config = _make_planned_run(report, costs)
            changed = _diff_settings(
                config_to_dict(_read_requested_run(arguments, report)), config_to_dict(config)
            )
            content = dump_config(config)
        write_output_file("-o", arguments.output, content)
    if arguments.svg is not None:
        title = f"{candidate.label}: {format_seconds(candidate.step_s)} s a step"
        timeline = candidate.estimate.timeline
        picture = render_timeline(title, report.problem.dataflow, placement, timeline)
        write_output_file("--svg", arguments.svg, picture)
    return changed


def _read_requested_run(arguments: argparse.Namespace, report: PlanReport) -> RunConfig:
    """The run that was to be planned; under another bound, where its own is one it cannot have."""
    try:
        return read_config(arguments.config, arguments.overrides)
    except ConfigError:
        return report.config


def _make_planned_run(report: PlanReport, costs: CostModel) -> RunConfig:
    """The run as it is planned, with all that it needs there."""
    placement, problem = report.best_point.candidate.placement, report.problem
    is_bounded = problem.cluster.is_cpu or has_shared_generator_devices(placement)
    room = costs.kv_cache_bytes(placement) if is_bounded else None
    placed = apply_placement(report.config, placement, kv_cache_bytes=room)
    return configure_for_cluster(
        placed, problem.cluster, longest_tokens=problem.workload.max_rollout_tokens
    )


def _diff_settings(
    before: Mapping[str, Any], after: Mapping[str, Any], place: str = ""
) -> dict[str, Any]:
    """Settings that differ, by their full keys."""
    found: dict[str, Any] = {}
    for key, value in after.items():
        was = before.get(key)
        if isinstance(value, dict) and isinstance(was, dict):
            found |= _diff_settings(was, value, f"{place}{key}.")
        elif value != was:
            found[f"{place}{key}"] = value
    return found

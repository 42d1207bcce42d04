"""`streamrl plan`: which placement is best for a run on a cluster, and why the others lost.

Candidates are found by the schedule that a cost model gives; the best under each bound of staleness
are then played in virtual time by the simulator, which has the last word.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from streamrl.cli.arguments.arg_types import named, named_path
from streamrl.cli.arguments.planner_args import (
    add_problem_arguments,
    check_time,
    read_config,
    read_question,
)
from streamrl.cli.arguments.staleness_args import BOUNDS, read_asked, read_bounds
from streamrl.cli.output.fit_suggestions import Planning, remedies
from streamrl.cli.output.output_files import check_file, write_file
from streamrl.cli.output.plan_report import Report, Row
from streamrl.cli.output.text_table import count, seconds
from streamrl.config import RunConfig, dump_config, to_dict
from streamrl.config.to_placement import placed_run, rules_of, run_costs, shares_devices, sited_run
from streamrl.drawing.timeline import timeline_svg
from streamrl.errors import ConfigError
from streamrl.placement import Cluster, Problem
from streamrl.placement.costs import CostModel
from streamrl.placement.problem import Costs
from streamrl.placement.search import (
    PROPOSALS,
    RUNNERS_UP,
    Absent,
    Candidate,
    FrontPoint,
    Planned,
    Rules,
    anything,
    plan,
)
from streamrl.simulator import Simulated, part_workload, play, played_groups, played_s, simulated_s

MOST_PROPOSALS = 100_000
FEW_GROUPS = 512
"""In a step, where not the schedule alone says which of the best of a bound is the best."""
REPLAYED_GROUPS = 8192
"""Of all that are played besides, together, at most: about a second."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `streamrl plan`."""
    parser.usage = "streamrl plan CONFIG [key=value ...] --cluster FILE|8xH100 [options]"
    add_problem_arguments(parser)
    parser.add_argument(
        "--max-staleness",
        type=named,
        metavar="LIST",
        help="bounds to choose of, as 0,1,4; by default the config's own, and what"
        f" {BOUNDS} would give is shown beside it",
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
        default=PROPOSALS,
        metavar="N",
        help=f"of each random search ({PROPOSALS})",
    )
    parser.add_argument("--explain", action="store_true", help="why every other kind lost")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        *("-o", "--output"),
        type=named_path,
        metavar="FILE",
        help="write the best: .yaml is the config of a run that is so placed, .json the placement",
    )
    parser.add_argument("--svg", type=named_path, metavar="FILE", help="draw its devices over time")


def run(arguments: argparse.Namespace) -> int:
    """Run the command: 0 if there is a placement, 1 if nothing fits."""
    _check(arguments)
    config, own, bounds, refused = read_asked(arguments)
    question = read_question(arguments, config)
    problem, constants = question.of(config)
    output = arguments.output
    if output is not None and output.suffix == ".yaml" and not problem.cluster.is_uniform:
        raise ConfigError(
            f"-o {output}: a run cannot say which of unlike devices a role gets; -o plan.json can"
        )
    # Parts are as many as there are replicas, at most, and those as many as devices.
    part = part_workload(problem.workload, problem.cluster.size)
    takes_s = sum(simulated_s(part, lead=bound) for bound in bounds)
    check_time(takes_s, problem.workload, place="")
    costs = CostModel(problem, constants)

    def checked(config: RunConfig, problem: Problem, costs: CostModel) -> Costs:
        return costs if arguments.pipeline else run_costs(config, problem, costs)

    def rules(config: RunConfig, problem: Problem) -> Rules:
        return anything if arguments.pipeline else rules_of(config, problem)

    def costs_of(part: Problem) -> Costs:
        return checked(config, part, costs if part is problem else CostModel(part, constants))

    def planning_of(config: RunConfig, cluster: Cluster) -> Planning:
        problem, constants = question.of(config, cluster)
        found = checked(config, problem, CostModel(problem, constants))
        return problem, found, rules(config, problem)

    planned = plan(
        problem,
        costs_of,
        max_staleness=bounds,
        seed=arguments.seed,
        rules=rules(config, problem),
        # A run's calls always work on a step as it comes.
        streamed=(True, False) if arguments.pipeline else (True,),
        proposals=arguments.proposals,
        runners_up=RUNNERS_UP if problem.workload.groups_per_step <= FEW_GROUPS else 0,
        own=own,
    )
    played = _played(problem, shown(planned), costs, arguments.seed)
    kept, lost = gaining(played, own)
    fixes = remedies(config, question.cluster, planning_of) if not kept else []
    report = Report(config, problem, planned, kept, [*refused, *lost], own, fixes)
    settings = _write(arguments, report, costs) if report.row is not None else {}
    if arguments.json:
        print(json.dumps(report.as_json(settings)))
    else:
        print(report.text(settings, explain=arguments.explain))
    return 0 if report.row is not None else 1


def _check(arguments: argparse.Namespace) -> None:
    """Raise ConfigError for options that are wrong by themselves."""
    if arguments.max_staleness is not None:
        read_bounds(arguments.max_staleness)
    if not 0 <= arguments.proposals <= MOST_PROPOSALS:
        raise ConfigError(f"--proposals {arguments.proposals}: must be from 0 to {MOST_PROPOSALS}")
    if arguments.output is not None and arguments.output.suffix not in (".yaml", ".json"):
        raise ConfigError(f"-o {arguments.output}: must end in .yaml or .json")
    asked = {"-o": arguments.output, "--svg": arguments.svg}
    places = [check_file(option, path) for option, path in asked.items() if path is not None]
    if len(places) > len(set(places)):
        raise ConfigError(f"-o, --svg {arguments.svg}: must be two files")


def shown(planned: Planned) -> list[FrontPoint]:
    """The front, with the run's own bound whether or not it gains anything."""
    if not isinstance(planned.own, FrontPoint):
        return list(planned.front)
    own = planned.own
    others = [point for point in planned.front if point.max_staleness != own.max_staleness]
    return sorted([own, *others], key=lambda point: point.max_staleness)


def _played(
    problem: Problem, front: Sequence[FrontPoint], costs: CostModel, seed: int
) -> list[Row]:
    """Every point of the front in virtual time, with the best of those that come next to it."""
    flow, workload, manner = problem.dataflow, problem.workload, problem.manner

    def played(candidate: Candidate) -> Simulated:
        placement = candidate.placement
        timings = costs.timings(placement)
        return play(flow, placement, timings, workload, seed=seed, manner=manner)

    placements = [point.candidate.placement for point in front]
    seconds = [played_s(costs.timings(p), workload, p.max_staleness) for p in placements]
    check_time(sum(seconds), workload, place="")
    found = [(point, played(point.candidate)) for point in front]
    left = REPLAYED_GROUPS
    for turn in range(max((len(point.next) for point in front), default=0)):
        # What is best of all is mostly the last.
        for i, point in reversed([*enumerate(front)]):
            for other in point.next[turn : turn + 1]:
                ahead, timings = other.placement.max_staleness, costs.timings(other.placement)
                needed = played_groups(timings, workload, ahead)
                if needed > left:
                    continue
                left -= needed
                if (mine := played(other)).tokens_per_s > found[i][1].tokens_per_s:
                    found[i] = (replace(point, candidate=other), mine)
    return found


def gaining(played: Sequence[Row], own: int | None = None) -> tuple[list[Row], list[Absent]]:
    """The points that, as they were played, have more throughput than all with a lower bound, and
    the run's own.

    And why the others are left out.
    """
    kept: list[Row] = []
    lost: list[Absent] = []
    for point, found in played:
        best, most = max(kept, key=lambda row: row[1].tokens_per_s, default=(point, None))
        is_own = point.max_staleness == own
        if most is None or is_own or found.tokens_per_s > most.tokens_per_s:
            kept.append((point, found))
            continue
        why = f"simulated, it has {count(found.tokens_per_s)} tokens/s, and {best.max_staleness}"
        lost.append(Absent(point.max_staleness, f"{why} has {count(most.tokens_per_s)}"))
    return kept, lost


def _write(arguments: argparse.Namespace, report: Report, costs: CostModel) -> dict[str, Any]:
    """Write the files that are asked for; what a config among them has other than the run's."""
    candidate = report.point.candidate
    placement, changed = candidate.placement, {}
    if arguments.output is not None:
        if arguments.output.suffix == ".json":
            content = json.dumps(placement.to_dict(), indent=1) + "\n"
        else:
            config = _planned_run(report, costs)
            changed = _changed(to_dict(_asked_run(arguments, report)), to_dict(config))
            content = dump_config(config)
        write_file("-o", arguments.output, content)
    if arguments.svg is not None:
        title = f"{candidate.label}: {seconds(candidate.step_s)} s a step"
        timeline = candidate.estimate.timeline
        picture = timeline_svg(title, report.problem.dataflow, placement, timeline)
        write_file("--svg", arguments.svg, picture)
    return changed


def _asked_run(arguments: argparse.Namespace, report: Report) -> RunConfig:
    """The run that was to be planned; under another bound, where its own is one it cannot have."""
    try:
        return read_config(arguments.config, arguments.overrides)
    except ConfigError:
        return report.config


def _planned_run(report: Report, costs: CostModel) -> RunConfig:
    """The run as it is planned, with all that it needs there."""
    placement, problem = report.point.candidate.placement, report.problem
    is_bounded = problem.cluster.is_cpu or shares_devices(placement)
    room = costs.kv_cache(placement) if is_bounded else None
    placed = placed_run(report.config, placement, kv_cache_bytes=room)
    return sited_run(placed, problem.cluster, longest_tokens=problem.workload.most_tokens)


def _changed(
    before: Mapping[str, Any], after: Mapping[str, Any], place: str = ""
) -> dict[str, Any]:
    """Settings that differ, by their full keys."""
    found: dict[str, Any] = {}
    for key, value in after.items():
        was = before.get(key)
        if isinstance(value, dict) and isinstance(was, dict):
            found |= _changed(was, value, f"{place}{key}.")
        elif value != was:
            found[f"{place}{key}"] = value
    return found

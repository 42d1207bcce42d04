"""`streamrl plan`: which placement is best for a run on a cluster, and why the others lost.

Candidates are found by the schedule that a cost model gives; the best under each bound of staleness
are then played in virtual time by the simulator, which has the last word.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from streamrl.agreement import apart_at_any_size
from streamrl.cli.bounds import BOUNDS, judged, read_bounds, read_run
from streamrl.cli.given import named, named_path
from streamrl.cli.problem import add_problem_arguments, check_time, problem_line, read_problem
from streamrl.cli.tables import count, percent, seconds, table
from streamrl.cli.writing import check_file, write_file
from streamrl.config import RunConfig, dump_config
from streamrl.errors import ConfigError
from streamrl.pictures.timeline import timeline_svg
from streamrl.placement import Estimate, Problem
from streamrl.placement.costs import CostModel
from streamrl.placement.estimates import Costs
from streamrl.placement.search import (
    BY_WHOLE_STEPS,
    PROPOSALS,
    RUNNERS_UP,
    Absent,
    Candidate,
    FrontPoint,
    Planned,
    anything,
    compared,
    plan,
)
from streamrl.placing import RunCosts, placed_run, rules_of
from streamrl.simulator import Simulated, part_workload, play, played_groups, played_s, simulated_s

MOST_PROPOSALS = 100_000
FEW_GROUPS = 512
"""In a step, where not the schedule alone says which of the best of a bound is the best."""
REPLAYED_GROUPS = 8192
"""Of all that are played besides, together, at most: about a second."""
GB = 1e9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `streamrl plan`."""
    parser.usage = "streamrl plan CONFIG [key=value ...] --cluster FILE|8xH100 [options]"
    add_problem_arguments(parser)
    parser.add_argument(
        "--max-staleness",
        type=named,
        default=BOUNDS,
        metavar="LIST",
        help=f"bounds to plan for, as 0,1,4 ({BOUNDS})",
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
    bounds = read_bounds(arguments.max_staleness)
    if not 0 <= arguments.proposals <= MOST_PROPOSALS:
        raise ConfigError(f"--proposals {arguments.proposals}: must be from 0 to {MOST_PROPOSALS}")
    if arguments.output is not None and arguments.output.suffix not in (".yaml", ".json"):
        raise ConfigError(f"-o {arguments.output}: must end in .yaml or .json")
    asked = {"-o": arguments.output, "--svg": arguments.svg}
    places = [check_file(option, path) for option, path in asked.items() if path is not None]
    if len(places) > len(set(places)):
        raise ConfigError(f"-o, --svg {arguments.svg}: must be two files")
    config = read_run(arguments.config, arguments.overrides, bounds)
    bounds, refused = judged(config, bounds)
    problem, constants = read_problem(arguments, config)
    output = arguments.output
    if output is not None and output.suffix == ".yaml" and not problem.cluster.is_uniform:
        raise ConfigError(
            f"-o {output}: a run cannot say which of unlike devices a role gets; -o plan.json can"
        )
    # Parts are as many as there are replicas, at most, and those as many as devices.
    part = part_workload(problem.workload, problem.cluster.size)
    played = sum(simulated_s(part, lead=bound) for bound in bounds)
    check_time(played, problem.workload, place="")
    costs = CostModel(problem, constants)

    def costs_of(part: Problem) -> Costs:
        own = costs if part is problem else CostModel(part, constants)
        apart = partial(apart_at_any_size, config)
        return own if arguments.pipeline else RunCosts(own, problem.dataflow, apart=apart)

    planned = plan(
        problem,
        costs_of,
        max_staleness=bounds,
        seed=arguments.seed,
        rules=anything if arguments.pipeline else rules_of(config),
        # A run's calls always work on a step as it comes.
        streamed=(True, False) if arguments.pipeline else (True,),
        proposals=arguments.proposals,
        runners_up=RUNNERS_UP if problem.workload.groups_per_step <= FEW_GROUPS else 0,
    )
    kept, lost = gaining(_played(problem, planned.front, costs, arguments.seed))
    report = Report(config, problem, planned, kept, [*refused, *lost])
    if planned.best is not None:
        _write(arguments, report)
    print(json.dumps(report.as_json()) if arguments.json else report.text(arguments.explain))
    return 0 if planned.best is not None else 1


def _played(
    problem: Problem, front: Sequence[FrontPoint], costs: CostModel, seed: int
) -> list[tuple[FrontPoint, Simulated]]:
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


def gaining(
    played: Sequence[tuple[FrontPoint, Simulated]],
) -> tuple[list[tuple[FrontPoint, Simulated]], list[Absent]]:
    """The points that, as they were played, have more throughput than all with a lower bound.

    And why the others are left out.
    """
    kept: list[tuple[FrontPoint, Simulated]] = []
    lost: list[Absent] = []
    for point, found in played:
        if not kept or found.tokens_per_s > kept[-1][1].tokens_per_s:
            kept.append((point, found))
            continue
        best, most = kept[-1]
        why = f"simulated, it has {count(found.tokens_per_s)} tokens/s, and {best.max_staleness}"
        lost.append(Absent(point.max_staleness, f"{why} has {count(most.tokens_per_s)}"))
    return kept, lost


@dataclass(frozen=True)
class Report:
    """What was found, to be told: `front` by bound, each point with how it was played.

    lost: the bounds that the run's own settings refuse, and those that the planner had on its front
    and the simulator has not.
    """

    config: RunConfig
    problem: Problem
    planned: Planned
    front: Sequence[tuple[FrontPoint, Simulated]]
    lost: Sequence[Absent]

    @property
    def absent(self) -> list[Absent]:
        """The bounds that were asked for and have no row, and why."""
        every = [*self.planned.absent, *self.lost]
        return sorted(every, key=lambda each: each.max_staleness)

    @property
    def point(self) -> FrontPoint:
        """The one with the most throughput, as it was played."""
        return self.front[-1][0]

    def text(self, explain: bool) -> str:
        """For a person."""
        lines = [problem_line(self.config, self.problem), ""]
        if self.planned.best is None:
            return "\n".join([*lines, "nothing fits", *self._others()[1:], "", *self._absences()])
        lines += table([HEADING, *(self._row(*each) for each in self.front)])
        lines += ["", f"best: {self.point.candidate.label}"]
        lines += [
            f"  {stage:<18}{assignment}"
            + (f", ZeRO {assignment.zero_stage}" if stage.startswith("train") else "")
            for stage, assignment in self.point.candidate.placement.calls.items()
        ]
        lines += ["", *self._others()] if explain else []
        absences = self._absences()
        return "\n".join([*lines, "", *absences] if absences else lines)

    @staticmethod
    def _row(point: FrontPoint, played: Simulated) -> list[str]:
        estimate = point.candidate.estimate
        return [
            f"{point.max_staleness}: {point.candidate.label}",
            seconds(estimate.step_s),
            percent(estimate.device_idle),
            f"{estimate.memory_bytes / GB:.3g}",
            seconds(played.step_s),
            count(played.tokens_per_s),
            f"{played.staleness_mean:.2f}",
        ]

    def _others(self) -> list[str]:
        """The best of every other kind, and what it lost by."""
        lines = ["the best of every kind, by step time:"]
        for each in self._kinds():
            if each.estimate.unfit:
                lines.append(f"  {each.label}: cannot be: {each.estimate.unfit}")
            else:
                lost = f"; {each.why}" if each.why else ""
                lines.append(f"  {each.label}: {seconds(each.step_s)} s a step{lost}")
                lines.append(f"    {each.placement}")
        return lines

    def _absences(self) -> list[str]:
        """Bounds that were asked for and have no row, a line for each reason."""
        bounds: dict[str, list[str]] = {}
        for each in self.absent:
            bounds.setdefault(each.why, []).append(str(each.max_staleness))
        return [f"no row for {', '.join(those)}: {why}" for why, those in bounds.items()]

    def _kinds(self) -> list[Candidate]:
        """Without those that wait for whole steps and gain nothing by it."""
        streamed = {each.label for each in self.planned.candidates if each.placement.streamed}
        kept = []
        winner = self.point.candidate if self.front else None
        for each in self.planned.candidates:
            twin = each.label.removesuffix(BY_WHOLE_STEPS)
            if each.placement.streamed or twin not in streamed:
                lost = winner and each.placement != winner.placement
                kept.append(compared(winner, each) if winner and lost else each)
        return kept

    def as_json(self) -> dict[str, Any]:
        """For scripts."""
        front = [
            {
                "max_staleness": point.max_staleness,
                **_candidate(point.candidate),
                "simulated": _simulated(played),
            }
            for point, played in self.front
        ]
        return {
            "cluster": str(self.problem.cluster),
            "devices": self.problem.cluster.size,
            "best": front[-1] if front else None,
            "front": front,
            "absent": [vars(each) for each in self.absent],
            "candidates": [_candidate(each) for each in self.planned.candidates],
        }


HEADING = [
    "max_staleness: placement",
    "step, s",
    "idle",
    "GB on a device",
    "simulated, s",
    "tokens/s",
    "staleness",
]


def _candidate(candidate: Candidate) -> dict[str, Any]:
    found: dict[str, Any] = {"kind": candidate.label, "placement": candidate.placement.to_dict()}
    found |= _estimate(candidate.estimate)
    return found | ({"why": candidate.why} if candidate.why else {})


def _estimate(estimate: Estimate) -> dict[str, Any]:
    if estimate.unfit:
        return {"unfit": estimate.unfit}
    return {
        "step_s": estimate.step_s,
        "tokens_per_s": estimate.tokens_per_s,
        "idle": dict(estimate.idle),
        "device_idle": estimate.device_idle,
        "memory_bytes": estimate.memory_bytes,
        "free_bytes": estimate.free_bytes,
    }


def _simulated(played: Simulated) -> dict[str, Any]:
    return {
        "step_s": played.step_s,
        "tokens_per_s": played.tokens_per_s,
        "idle": dict(played.idle),
        "staleness_mean": played.staleness_mean,
        "staleness_max": played.staleness_max,
    }


def _write(arguments: argparse.Namespace, report: Report) -> None:
    """The files that are asked for."""
    candidate = report.point.candidate
    placement = candidate.placement
    if arguments.output is not None:
        if arguments.output.suffix == ".json":
            content = json.dumps(placement.to_dict(), indent=1) + "\n"
        else:
            content = dump_config(placed_run(report.config, placement))
        write_file("-o", arguments.output, content)
    if arguments.svg is not None:
        title = f"{candidate.label}: {seconds(candidate.step_s)} s a step"
        timeline = candidate.estimate.timeline
        picture = timeline_svg(title, report.problem.dataflow, placement, timeline)
        write_file("--svg", arguments.svg, picture)

"""What `streamrl plan` has found, for a person and for scripts."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from streamrl.cli.arguments.planner_args import HOUR_S, describe_problem
from streamrl.cli.output.text_table import (
    format_count,
    format_percent,
    format_seconds,
    format_table,
)
from streamrl.config import RunConfig
from streamrl.placement import Mesh, PlacementEstimate, PlacementProblem
from streamrl.placement.search import (
    WHOLE_STEPS_SUFFIX,
    ExcludedBound,
    ParetoPoint,
    PlacementCandidate,
    PlanResult,
    compare_to_winner,
)
from streamrl.simulator import SimulationResult

GB = 1e9

NO_FIX_TEXT = (
    "and would not with smaller micro-batches, trainer.gradient_checkpointing, trainer.lora_rank or"
    " more devices, as far as was tried"
)

SimulatedPoint = tuple[ParetoPoint, SimulationResult]
"""The best of a bound, and how it was played."""


@dataclass(frozen=True)
class PlanReport:
    """What was found, to be told: `front` by bound, each point with how it was played.

    lost: the bounds that the run's own settings refuse, and those that the planner had on its front
    and the simulator has not. own: the run's own bound, if no other was asked for. remedies: what
    would make it fit, where nothing does.
    """

    config: RunConfig
    problem: PlacementProblem
    plan: PlanResult
    front: Sequence[SimulatedPoint]
    lost_bounds: Sequence[ExcludedBound]
    own_bound: int | None = None
    fixes: Sequence[str] = ()

    @property
    def absent_bounds(self) -> list[ExcludedBound]:
        """The bounds that were asked for and have no row, and why."""
        rows = {point.max_staleness for point, _ in self.front}
        every = [
            each
            for each in (*self.plan.excluded_bounds, *self.lost_bounds)
            if each.max_staleness not in rows
        ]
        return sorted(every, key=lambda each: each.max_staleness)

    @property
    def best_row(self) -> SimulatedPoint | None:
        """Of the run's own bound, or that with the most throughput; None where nothing fits."""
        if self.own_bound is None:
            return self.front[-1] if self.front else None
        own = (row for row in self.front if row[0].max_staleness == self.own_bound)
        return next(own, None)

    @property
    def best_point(self) -> ParetoPoint:
        """What is planned."""
        assert self.best_row is not None
        return self.best_row[0]

    @property
    def unused_devices(self) -> list[Mesh]:
        """Devices that get nothing."""
        held = {
            d
            for each in self.best_point.candidate.placement.assignments.values()
            for d in each.mesh.devices
        }
        free = [device for device in range(self.problem.cluster.num_devices) if device not in held]
        runs = groupby(enumerate(free), key=lambda each: each[1] - each[0])
        found = [[device for _, device in run] for _, run in runs]
        return [Mesh(devices[0], len(devices)) for devices in found]

    def to_text(self, settings: Mapping[str, Any], *, explain: bool) -> str:
        """For a person. settings: what the config that was written has other than the run's."""
        lines = [describe_problem(self.config, self.problem), ""]
        if self.front:
            lines += [
                *format_table([HEADING, *(self._format_row(*each) for each in self.front)]),
                "",
            ]
        lines += (
            self._describe_no_fit()
            if self.best_row is None
            else self._describe_best(*self.best_row)
        )
        lines += [f"  written with {_format_settings(settings)}"] if settings else []
        lines += ["", *self._describe_others()] if explain and self.best_row is not None else []
        ends = [*self._describe_trade_offs(), *self._describe_absences()]
        return "\n".join([*lines, "", *ends] if ends else lines)

    def _describe_no_fit(self) -> list[str]:
        """Why nothing fits, and what would."""
        bound = f" with pipeline.max_staleness={self.own_bound}" if self.front else ""
        lines = [f"nothing fits{bound}", *self._describe_others()[1:]]
        if self.front:
            return lines
        if not self.fixes:
            return [*lines, NO_FIX_TEXT]
        return [*lines, "it would fit with any one of:", *(f"  {each}" for each in self.fixes)]

    def _describe_best(self, point: ParetoPoint, played: SimulationResult) -> list[str]:
        """What is planned, in full."""
        of_run = f" (pipeline.max_staleness={self.own_bound}, the config's own)"
        lines = [f"best: {point.candidate.label}{'' if self.own_bound is None else of_run}"]
        lines += [
            f"  {stage:<18}{assignment}"
            + (f", ZeRO {assignment.zero_stage}" if stage.startswith("train") else "")
            for stage, assignment in point.candidate.placement.assignments.items()
        ]
        size = self.problem.cluster.num_devices
        if self.unused_devices:
            spare, names = (
                sum(mesh.size for mesh in self.unused_devices),
                map(str, self.unused_devices),
            )
            lines.append(f"  devices {', '.join(names)} get nothing: {spare} of {size}")
        hours = self._compute_hours(played)
        unit = "core-hours" if self.problem.cluster.is_cpu else "GPU-hours"
        return [
            *lines,
            f"  run.steps={self.config.run.steps}: {hours:.3g} h, {hours * size:.3g} {unit}",
        ]

    def _compute_hours(self, played: SimulationResult) -> float:
        """All steps of the run."""
        return self.config.run.steps * played.mean_step_s / HOUR_S

    def _describe_trade_offs(self) -> list[str]:
        """What another bound than the run's own would give, and cost."""
        if self.own_bound is None or self.best_row is None:
            return []
        _, mine = self.best_row
        lines = []
        for point, other in self.front:
            if point.max_staleness == self.own_bound:
                continue
            gain = other.tokens_per_s / mine.tokens_per_s - 1
            lines.append(
                f"--max-staleness {point.max_staleness}: {gain:+.0%} tokens/s, of tokens that are"
                f" {other.staleness_mean:.2f} versions old (at most {other.staleness_max}), not"
                f" {mine.staleness_mean:.2f}"
            )
        return lines

    @staticmethod
    def _format_row(point: ParetoPoint, played: SimulationResult) -> list[str]:
        estimate = point.candidate.estimate
        return [
            f"{point.max_staleness}: {point.candidate.label}",
            format_seconds(estimate.step_s),
            format_percent(estimate.device_idle),
            f"{estimate.memory_bytes / GB:.3g}",
            format_seconds(played.mean_step_s),
            format_count(played.tokens_per_s),
            f"{played.staleness_mean:.2f}",
        ]

    def _describe_others(self) -> list[str]:
        """The best of every other kind, and what it lost by."""
        lines = ["the best of every kind, by step time:"]
        for each in self._list_best_kinds():
            if each.estimate.infeasible_reason:
                lines.append(f"  {each.label}: cannot be: {each.estimate.infeasible_reason}")
            else:
                lost = f"; {each.reason}" if each.reason else ""
                lines.append(f"  {each.label}: {format_seconds(each.step_s)} s a step{lost}")
                lines.append(f"    {each.placement}")
        return lines

    def _describe_absences(self) -> list[str]:
        """Bounds that were asked for and have no row, a line for each reason."""
        bounds: dict[str, list[str]] = {}
        for each in self.absent_bounds:
            bounds.setdefault(each.why, []).append(str(each.max_staleness))
        return [f"no row for {', '.join(those)}: {why}" for why, those in bounds.items()]

    def _list_best_kinds(self) -> list[PlacementCandidate]:
        """Without those that wait for whole steps and gain nothing by it."""
        streamed = {each.label for each in self.plan.candidates if each.placement.is_streamed}
        kept = []
        winner = self.best_point.candidate if self.best_row is not None else None
        for each in self.plan.candidates:
            twin = each.label.removesuffix(WHOLE_STEPS_SUFFIX)
            if each.placement.is_streamed or twin not in streamed:
                lost = winner and each.placement != winner.placement
                kept.append(compare_to_winner(winner, each) if winner and lost else each)
        return kept

    def to_json(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """For scripts."""
        front = [self._point_to_json(*row) for row in self.front]
        return {
            "cluster": str(self.problem.cluster),
            "devices": self.problem.cluster.num_devices,
            "best": None if self.best_row is None else self._point_to_json(*self.best_row),
            "unused": [] if self.best_row is None else [str(mesh) for mesh in self.unused_devices],
            "settings": dict(settings),
            "front": front,
            "absent": [vars(each) for each in self.absent_bounds],
            "candidates": [_candidate_to_json(each) for each in self.plan.candidates],
            "remedies": list(self.fixes),
        }

    def _point_to_json(self, point: ParetoPoint, played: SimulationResult) -> dict[str, Any]:
        hours = self._compute_hours(played)
        return {
            "max_staleness": point.max_staleness,
            **_candidate_to_json(point.candidate),
            "simulated": _simulated_to_json(played),
            "run_hours": hours,
            "run_device_hours": hours * self.problem.cluster.num_devices,
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


def _candidate_to_json(candidate: PlacementCandidate) -> dict[str, Any]:
    found: dict[str, Any] = {"kind": candidate.label, "placement": candidate.placement.to_dict()}
    found |= _estimate_to_json(candidate.estimate)
    return found | ({"why": candidate.reason} if candidate.reason else {})


def _estimate_to_json(estimate: PlacementEstimate) -> dict[str, Any]:
    if estimate.infeasible_reason:
        return {"unfit": estimate.infeasible_reason}
    return {
        "step_s": estimate.step_s,
        "tokens_per_s": estimate.tokens_per_s,
        "idle": dict(estimate.idle),
        "device_idle": estimate.device_idle,
        "memory_bytes": estimate.memory_bytes,
        "free_bytes": estimate.free_bytes,
    }


def _simulated_to_json(played: SimulationResult) -> dict[str, Any]:
    return {
        "step_s": played.mean_step_s,
        "tokens_per_s": played.tokens_per_s,
        "idle": dict(played.idle_fractions),
        "staleness_mean": played.staleness_mean,
        "staleness_max": played.staleness_max,
    }


def _format_settings(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={json.dumps(value)}" for key, value in settings.items())

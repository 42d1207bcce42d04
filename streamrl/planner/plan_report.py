"""Report of `streamrl plan`, as text and JSON."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from streamrl.config.run_config import RunConfig
from streamrl.dataflow import CallKind
from streamrl.files.printable_text import format_quantity
from streamrl.placement.placements import Placement
from streamrl.planner.problem.problem import PlacementProblem
from streamrl.planner.search.planner import (
    BoundOptimum,
    ExcludedBound,
    PlacementCandidate,
    PlanResult,
)
from streamrl.planner.simulator.results import SimulationResult


def format_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Format rows of cells as lines of text: the first column to the left, others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def format_count(number: float) -> str:
    """Format a large number with a unit: 950, 12.3k, 4.56M."""
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if abs(number) >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def format_seconds(number: float) -> str:
    """Format seconds without unit: three significant digits, or an integer from 1000 on."""
    return f"{number:.3g}" if number < 1000 else f"{number:.0f}"  # noqa: PLR2004


GB = 1e9

NO_FIX_TEXT = (
    "smaller micro-batches, trainer.gradient_checkpointing, trainer.offload_optimizer,"
    " trainer.lora_rank and more devices do not help either, as far as tried"
)

SimulatedPoint = tuple[BoundOptimum, SimulationResult]
"""Best placement of a staleness bound, with its simulation."""


def describe_problem(config: RunConfig, problem: PlacementProblem) -> str:
    """Describe a planner problem: a line of algorithm, cluster and models; the work of a step."""
    workload = problem.workload
    episodes = filtered = ""
    if config.environment.is_enabled:
        episodes = "; an episode counts as one completion, without the time of its environment"
    if workload.filtered_fraction:
        filtered = f"; {100 * workload.filtered_fraction:.3g}% of all groups are filtered"
    models = ", ".join(f"{role} {shape.name}" for role, shape in problem.models.items())
    return (
        f"{config.algorithm.name} on {problem.cluster}"
        f" ({format_quantity(problem.cluster.num_devices, 'device')}): {models}\n"
        f"a step: {workload.groups_per_step} groups of {workload.group_size}, prompts of"
        f" {workload.prompt_tokens:.0f} tokens, completions of {workload.lengths.mean:.0f} (at most"
        f" {workload.lengths.max_tokens}){episodes}, "
        f"{format_quantity(workload.num_updates, 'update')}{filtered}"
    )


def describe_assignments(problem: PlacementProblem, placement: Placement) -> dict[str, str]:
    """Describe, by stage, devices and parallelism, and the trained model whose ranks compute it."""
    calls, texts = {call.stage: call for call in problem.dataflow.calls}, {}
    meshes = {calls[stage].role: item.mesh for stage, item in placement.assignments.items()}
    for stage, assignment in placement.assignments.items():
        host = problem.hosts.get(calls[stage].role, "")
        is_hosted = host in meshes and meshes[host] == assignment.mesh
        texts[stage] = f"{assignment}" + f", by the ranks of {host}" * is_hosted
        texts[stage] += f", ZeRO {assignment.zero_stage}" * (calls[stage].kind is CallKind.TRAIN)
    return texts


@dataclass(frozen=True)
class PlanReport:
    """Result of `streamrl plan`: the best placement of each staleness bound, with its simulation.

    front: points of the Pareto front of throughput over staleness bound. lost_bounds: bounds that
    the run's settings forbid, or whose simulation is no faster than a lower bound's. own_bound:
    max_staleness of the run's config, None with --max-staleness. fixes: changes that would let the
    run fit; only filled if no placement fits.
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
        """Requested staleness bounds without a row in the report, with the reason of each."""
        rows = {point.max_staleness for point, _ in self.front}
        bounds = (*self.plan.excluded_bounds, *self.lost_bounds)
        absent = [bound for bound in bounds if bound.max_staleness not in rows]
        return sorted(absent, key=lambda bound: bound.max_staleness)

    @property
    def best_row(self) -> SimulatedPoint | None:
        """Placement and simulation of the config's own staleness bound, else of the fastest bound.

        None if no placement fits.
        """
        if self.own_bound is None:
            return self.front[-1] if self.front else None
        rows = (row for row in self.front if row[0].max_staleness == self.own_bound)
        return next(rows, None)

    @property
    def best_point(self) -> BoundOptimum:
        assert self.best_row is not None
        return self.best_row[0]

    @property
    def num_unused(self) -> int:
        """Number of devices that the best placement does not use."""
        assignments = self.best_point.candidate.placement.assignments.values()
        used = {device for assignment in assignments for device in assignment.mesh.devices}
        return self.problem.cluster.num_devices - len(used)

    def to_text(self, settings: Mapping[str, Any]) -> str:
        """Format the report as text.

        settings: settings in which the written config differs from the run's.
        """
        lines = [describe_problem(self.config, self.problem), ""]
        if self.front:
            lines += [*format_table([HEADING, *(self._format_row(*row) for row in self.front)]), ""]
        lines += (
            self._describe_no_fit()
            if self.best_row is None
            else self._describe_best(*self.best_row)
        )
        lines += [f"  written with {_format_settings(settings)}"] if settings else []
        notes = self._describe_absences()
        return "\n".join([*lines, "", *notes] if notes else lines)

    def _describe_no_fit(self) -> list[str]:
        bound = f" with pipeline.max_staleness={self.own_bound}" if self.front else ""
        kinds = [(kind.label, kind.estimate.infeasible_reason) for kind in self.plan.candidates]
        misfits = [f"  {label}: infeasible: {why}" for label, why in kinds if why]
        lines = [f"nothing fits{bound}", *misfits]
        if self.front:
            return lines
        if not self.fixes:
            return [*lines, NO_FIX_TEXT]
        return [*lines, "any one of these would let it fit:", *(f"  {fix}" for fix in self.fixes)]

    def _describe_best(self, point: BoundOptimum, result: SimulationResult) -> list[str]:
        own_note = f" (pipeline.max_staleness={self.own_bound}, the config's own)"
        lines = [f"best: {point.candidate.label}{'' if self.own_bound is None else own_note}"]
        texts = describe_assignments(self.problem, point.candidate.placement)
        lines += [f"  {stage:<18}{text}" for stage, text in texts.items()]
        size = self.problem.cluster.num_devices
        if self.num_unused:
            lines.append(f"  {self.num_unused} of {size} devices are unused")
        hours = self._compute_hours(result)
        unit = "core-hours" if self.problem.cluster.is_cpu else "GPU-hours"
        return [
            *lines,
            f"  run.steps={self.config.run.steps}: {hours:.3g} h, {hours * size:.3g} {unit}",
        ]

    def _compute_hours(self, result: SimulationResult) -> float:
        return self.config.run.steps * result.mean_step_s / 3600

    @staticmethod
    def _format_row(point: BoundOptimum, result: SimulationResult) -> list[str]:
        estimate = point.candidate.estimate
        return [
            f"{point.max_staleness}: {point.candidate.label}",
            format_seconds(estimate.step_s),
            f"{estimate.device_idle:.0%}",
            f"{estimate.memory_bytes / GB:.3g}",
            format_seconds(result.mean_step_s),
            format_count(result.tokens_per_s),
            f"{result.staleness_mean:.2f}",
        ]

    def _describe_absences(self) -> list[str]:
        bounds: dict[str, list[str]] = {}
        for absent in self.absent_bounds:
            bounds.setdefault(absent.why, []).append(str(absent.max_staleness))
        return [f"no row for {', '.join(names)}: {why}" for why, names in bounds.items()]

    def to_json(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the report as JSON-serializable values.

        settings: settings in which the written config differs from the run's.
        """
        front = [self._point_to_json(*row) for row in self.front]
        return {
            "cluster": str(self.problem.cluster),
            "devices": self.problem.cluster.num_devices,
            "best": None if self.best_row is None else self._point_to_json(*self.best_row),
            "unused": None if self.best_row is None else self.num_unused,
            "settings": dict(settings),
            "front": front,
            "absent": [vars(bound) for bound in self.absent_bounds],
            "candidates": [_candidate_to_json(c) for c in self.plan.candidates],
            "remedies": list(self.fixes),
        }

    def _point_to_json(self, point: BoundOptimum, result: SimulationResult) -> dict[str, Any]:
        hours = self._compute_hours(result)
        return {
            "max_staleness": point.max_staleness,
            **_candidate_to_json(point.candidate),
            "simulated": simulation_to_json(result),
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
    fields: dict[str, Any] = {"kind": candidate.label, "placement": candidate.placement.to_dict()}
    estimate = vars(candidate.estimate).copy()
    reason = estimate.pop("infeasible_reason")
    return fields | ({"unfit": reason} if reason else estimate)


def simulation_to_json(result: SimulationResult) -> dict[str, Any]:
    return {
        "step_s": result.mean_step_s,
        "tokens_per_s": result.tokens_per_s,
        "idle": dict(result.idle_fractions),
        "staleness_mean": result.staleness_mean,
        "staleness_max": result.staleness_max,
    }


def _format_settings(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={json.dumps(value)}" for key, value in settings.items())

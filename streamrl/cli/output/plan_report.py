"""What `streamrl plan` has found, for a person and for scripts."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from streamrl.cli.arguments.planner_args import HOUR_S, problem_line
from streamrl.cli.output.text_table import count, percent, seconds, table
from streamrl.config import RunConfig
from streamrl.placement import Estimate, Mesh, Problem
from streamrl.placement.search import (
    BY_WHOLE_STEPS,
    Absent,
    Candidate,
    FrontPoint,
    Planned,
    compared,
)
from streamrl.simulator import Simulated

GB = 1e9

NO_REMEDY = (
    "and would not with smaller micro-batches, trainer.gradient_checkpointing, trainer.lora_rank or"
    " more devices, as far as was tried"
)

Row = tuple[FrontPoint, Simulated]
"""The best of a bound, and how it was played."""


@dataclass(frozen=True)
class Report:
    """What was found, to be told: `front` by bound, each point with how it was played.

    lost: the bounds that the run's own settings refuse, and those that the planner had on its front
    and the simulator has not. own: the run's own bound, if no other was asked for. remedies: what
    would make it fit, where nothing does.
    """

    config: RunConfig
    problem: Problem
    planned: Planned
    front: Sequence[Row]
    lost: Sequence[Absent]
    own: int | None = None
    remedies: Sequence[str] = ()

    @property
    def absent(self) -> list[Absent]:
        """The bounds that were asked for and have no row, and why."""
        rows = {point.max_staleness for point, _ in self.front}
        every = [
            each for each in (*self.planned.absent, *self.lost) if each.max_staleness not in rows
        ]
        return sorted(every, key=lambda each: each.max_staleness)

    @property
    def row(self) -> Row | None:
        """Of the run's own bound, or that with the most throughput; None where nothing fits."""
        if self.own is None:
            return self.front[-1] if self.front else None
        own = (row for row in self.front if row[0].max_staleness == self.own)
        return next(own, None)

    @property
    def point(self) -> FrontPoint:
        """What is planned."""
        assert self.row is not None
        return self.row[0]

    @property
    def unused(self) -> list[Mesh]:
        """Devices that get nothing."""
        held = {
            d for each in self.point.candidate.placement.calls.values() for d in each.mesh.devices
        }
        free = [device for device in range(self.problem.cluster.size) if device not in held]
        runs = groupby(enumerate(free), key=lambda each: each[1] - each[0])
        found = [[device for _, device in run] for _, run in runs]
        return [Mesh(devices[0], len(devices)) for devices in found]

    def text(self, settings: Mapping[str, Any], *, explain: bool) -> str:
        """For a person. settings: what the config that was written has other than the run's."""
        lines = [problem_line(self.config, self.problem), ""]
        if self.front:
            lines += [*table([HEADING, *(self._row(*each) for each in self.front)]), ""]
        lines += self._nothing() if self.row is None else self._best(*self.row)
        lines += [f"  written with {_listed(settings)}"] if settings else []
        lines += ["", *self._others()] if explain and self.row is not None else []
        ends = [*self._trades(), *self._absences()]
        return "\n".join([*lines, "", *ends] if ends else lines)

    def _nothing(self) -> list[str]:
        """Why nothing fits, and what would."""
        bound = f" with pipeline.max_staleness={self.own}" if self.front else ""
        lines = [f"nothing fits{bound}", *self._others()[1:]]
        if self.front:
            return lines
        if not self.remedies:
            return [*lines, NO_REMEDY]
        return [*lines, "it would fit with any one of:", *(f"  {each}" for each in self.remedies)]

    def _best(self, point: FrontPoint, played: Simulated) -> list[str]:
        """What is planned, in full."""
        of_run = f" (pipeline.max_staleness={self.own}, the config's own)"
        lines = [f"best: {point.candidate.label}{'' if self.own is None else of_run}"]
        lines += [
            f"  {stage:<18}{assignment}"
            + (f", ZeRO {assignment.zero_stage}" if stage.startswith("train") else "")
            for stage, assignment in point.candidate.placement.calls.items()
        ]
        size = self.problem.cluster.size
        if self.unused:
            spare, names = sum(mesh.size for mesh in self.unused), map(str, self.unused)
            lines.append(f"  devices {', '.join(names)} get nothing: {spare} of {size}")
        hours = self._hours(played)
        unit = "core-hours" if self.problem.cluster.is_cpu else "GPU-hours"
        return [
            *lines,
            f"  run.steps={self.config.run.steps}: {hours:.3g} h, {hours * size:.3g} {unit}",
        ]

    def _hours(self, played: Simulated) -> float:
        """All steps of the run."""
        return self.config.run.steps * played.step_s / HOUR_S

    def _trades(self) -> list[str]:
        """What another bound than the run's own would give, and cost."""
        if self.own is None or self.row is None:
            return []
        _, mine = self.row
        lines = []
        for point, other in self.front:
            if point.max_staleness == self.own:
                continue
            gain = other.tokens_per_s / mine.tokens_per_s - 1
            lines.append(
                f"--max-staleness {point.max_staleness}: {gain:+.0%} tokens/s, of tokens that are"
                f" {other.staleness_mean:.2f} versions old (at most {other.staleness_max}), not"
                f" {mine.staleness_mean:.2f}"
            )
        return lines

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
        winner = self.point.candidate if self.row is not None else None
        for each in self.planned.candidates:
            twin = each.label.removesuffix(BY_WHOLE_STEPS)
            if each.placement.streamed or twin not in streamed:
                lost = winner and each.placement != winner.placement
                kept.append(compared(winner, each) if winner and lost else each)
        return kept

    def as_json(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """For scripts."""
        front = [self._as_json(*row) for row in self.front]
        return {
            "cluster": str(self.problem.cluster),
            "devices": self.problem.cluster.size,
            "best": None if self.row is None else self._as_json(*self.row),
            "unused": [] if self.row is None else [str(mesh) for mesh in self.unused],
            "settings": dict(settings),
            "front": front,
            "absent": [vars(each) for each in self.absent],
            "candidates": [_candidate(each) for each in self.planned.candidates],
            "remedies": list(self.remedies),
        }

    def _as_json(self, point: FrontPoint, played: Simulated) -> dict[str, Any]:
        hours = self._hours(played)
        return {
            "max_staleness": point.max_staleness,
            **_candidate(point.candidate),
            "simulated": _simulated(played),
            "run_hours": hours,
            "run_device_hours": hours * self.problem.cluster.size,
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


def _listed(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={json.dumps(value)}" for key, value in settings.items())

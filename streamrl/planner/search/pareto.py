"""Result of a search: the best placement, throughput against staleness, and why others lost."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from streamrl.placement.placements import Placement
from streamrl.planner.problem.problem import PlacementEstimate

SIGNIFICANT_FRACTION = 0.02
"""Smallest difference between placements worth mentioning, as a fraction of the best step time."""


@dataclass(frozen=True)
class PlacementCandidate:
    """Best placement of a kind, such as colocated, next to the winner of the search.

    reason: cause of the loss, or why the placement is infeasible; empty for the winner.
    """

    label: str
    placement: Placement
    estimate: PlacementEstimate
    reason: str = ""

    @property
    def step_s(self) -> float:
        return self.estimate.step_s


@dataclass(frozen=True)
class ParetoPoint:
    """Best placement within a staleness bound, and runners-up that are almost as fast."""

    max_staleness: int
    candidate: PlacementCandidate
    runners_up: Sequence[PlacementCandidate] = ()


@dataclass(frozen=True)
class ExcludedBound:
    """Staleness bound that is not on the Pareto front, and why."""

    max_staleness: int
    why: str


@dataclass(frozen=True)
class PlanResult:
    """Result of the planner's search.

    best: placement with the shortest step; None if no placement fits.
    candidates: best placement of every kind, shortest step first; if none fits, they say why.
    front: best placement of each staleness bound that allows a shorter step than all lower bounds.
    excluded_bounds: all other bounds.
    run_bound: for the bound of `plan_placement(run_bound=...)`, the best placement that generates
      exactly so many steps ahead, or why none exists.
    """

    best: PlacementCandidate | None
    candidates: Sequence[PlacementCandidate]
    front: Sequence[ParetoPoint]
    excluded_bounds: Sequence[ExcludedBound] = ()
    run_bound: ParetoPoint | ExcludedBound | None = None


def find_dominated(
    points: Iterable[ParetoPoint], front: Sequence[ParetoPoint]
) -> Iterator[ExcludedBound]:
    front_bounds = {point.max_staleness for point in front}
    for point in points:
        if point.max_staleness not in front_bounds:
            better = max(bound for bound in front_bounds if bound < point.max_staleness)
            why = f"a step of {point.candidate.step_s:.3g} s is no shorter than with {better}"
            yield ExcludedBound(point.max_staleness, why)


def find_pareto_front(points: Iterable[ParetoPoint]) -> list[ParetoPoint]:
    """Return the points faster than every point of a lower staleness bound, ordered by bound."""
    front_points: list[ParetoPoint] = []
    for point in sorted(points, key=lambda point: point.max_staleness):
        if not point.candidate.estimate.infeasible_reason and (
            not front_points or point.candidate.step_s < front_points[-1].candidate.step_s
        ):
            front_points.append(point)
    return front_points


def compare_to_winner(winner: PlacementCandidate, other: PlacementCandidate) -> PlacementCandidate:
    reason = other.estimate.infeasible_reason or _explain_slowness(winner, other)
    return PlacementCandidate(other.label, other.placement, other.estimate, reason)


def _explain_slowness(best: PlacementCandidate, candidate: PlacementCandidate) -> str:
    """Explain why a candidate is slower than the best.

    Names the stage with the largest extra time, else the extra time on shared devices; adds idle
    devices.
    """
    winner, other = best.estimate, candidate.estimate
    extra_s = {
        stage: compute_stage_busy_s(other, stage) - compute_stage_busy_s(winner, stage)
        for stage in other.idle
        if stage in winner.idle
    }
    reasons = []
    stage = max(extra_s, key=lambda stage_name: (extra_s[stage_name], stage_name), default="")
    if stage and extra_s[stage] > SIGNIFICANT_FRACTION * winner.step_s:
        winner_s, other_s = compute_stage_busy_s(winner, stage), compute_stage_busy_s(other, stage)
        reasons.append(f"{stage} is busy for {other_s:.3g} s per step, not {winner_s:.3g} s")
    winner_s, other_s = find_max_shared_s(best), find_max_shared_s(candidate)
    if not reasons and other_s - winner_s > SIGNIFICANT_FRACTION * winner.step_s:
        reasons.append(
            f"calls that share devices take {other_s:.3g} s per step, not {winner_s:.3g} s"
        )
    if other.device_idle - winner.device_idle > SIGNIFICANT_FRACTION:
        reasons.append(
            f"{other.device_idle:.0%} of device time is idle, not {winner.device_idle:.0%}"
        )
    if reasons:
        return "; ".join(reasons)
    is_slower = other.step_s - winner.step_s > SIGNIFICANT_FRACTION * winner.step_s
    if is_slower:
        return "its calls wait for each other"
    return f"within {SIGNIFICANT_FRACTION:.0%} of the winner"


def find_max_shared_s(candidate: PlacementCandidate) -> float:
    estimate, placement = candidate.estimate, candidate.placement
    stages = [stage for stage in placement.assignments if stage in estimate.idle]
    return max(
        sum(
            compute_stage_busy_s(estimate, other)
            for other in stages
            if placement.overlaps(stage, other)
        )
        for stage in stages
    )


def compute_stage_busy_s(estimate: PlacementEstimate, stage: str) -> float:
    return (1 - estimate.idle[stage]) * estimate.step_s

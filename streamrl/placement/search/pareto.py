"""What a search found, as data: the best, throughput against staleness, and why others lost."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from streamrl.placement.placements import Placement
from streamrl.placement.problem import PlacementEstimate

SIGNIFICANT_FRACTION = 0.02
"""Of the winner's step, a difference worth a word."""


@dataclass(frozen=True)
class PlacementCandidate:
    """The best of its kind that was found.

    slower_s: what its step takes beyond the winner's. why: what is behind that, or why it cannot
    be; empty for the winner.
    """

    label: str
    placement: Placement
    estimate: PlacementEstimate
    slower_s: float = 0.0
    reason: str = ""

    @property
    def step_s(self) -> float:
        """Its step time; infinite if it cannot be."""
        return self.estimate.step_s


@dataclass(frozen=True)
class ParetoPoint:
    """The best under one bound of staleness, and those that come next, if they are near."""

    max_staleness: int
    candidate: PlacementCandidate
    runners_up: Sequence[PlacementCandidate] = ()


@dataclass(frozen=True)
class ExcludedBound:
    """A bound of staleness that was asked for and is not on the front, and why."""

    max_staleness: int
    why: str


@dataclass(frozen=True)
class PlanResult:
    """best: the shortest step. candidates: the best of every kind, the shortest step first.

    front: of bounds of staleness, those whose best none with less of it beats; absent: all others.
    best is None, and front empty, where nothing fits; the candidates then say why. own: of the
    bound that was asked for besides, the best that generates as far ahead as it allows, or why
    there is none.
    """

    best: PlacementCandidate | None
    candidates: Sequence[PlacementCandidate]
    front: Sequence[ParetoPoint]
    excluded_bounds: Sequence[ExcludedBound] = ()
    run_bound: ParetoPoint | ExcludedBound | None = None


def find_dominated(
    points: Iterable[ParetoPoint], front: Sequence[ParetoPoint]
) -> Iterator[ExcludedBound]:
    """Those of the points that are not on the front made of them, by what they do not beat."""
    kept = {point.max_staleness for point in front}
    for point in points:
        if point.max_staleness not in kept:
            least = max(bound for bound in kept if bound < point.max_staleness)
            why = f"a step of {point.candidate.step_s:.3g} s is no shorter than with {least}"
            yield ExcludedBound(point.max_staleness, why)


def find_pareto_front(points: Iterable[ParetoPoint]) -> list[ParetoPoint]:
    """Those that have more throughput than all with a lower bound, by bound."""
    found: list[ParetoPoint] = []
    for point in sorted(points, key=lambda each: each.max_staleness):
        if not point.candidate.estimate.infeasible_reason and (
            not found or point.candidate.step_s < found[-1].candidate.step_s
        ):
            found.append(point)
    return found


def compare_to_winner(winner: PlacementCandidate, other: PlacementCandidate) -> PlacementCandidate:
    """The other, with what it lost by."""
    if other.estimate.infeasible_reason:
        slower, why = other.step_s, other.estimate.infeasible_reason
    else:
        slower = other.step_s - winner.step_s
        why = _explain_loss(winner, other)
    return PlacementCandidate(other.label, other.placement, other.estimate, slower, why)


def _explain_loss(best: PlacementCandidate, candidate: PlacementCandidate) -> str:
    """The call that has its devices for longest beyond the winner's, or those that share some, and
    what nobody uses."""
    winner, other = best.estimate, candidate.estimate
    more = {
        stage: stage_busy_s(other, stage) - stage_busy_s(winner, stage)
        for stage in other.idle
        if stage in winner.idle
    }
    said = []
    stage = max(more, key=lambda each: (more[each], each), default="")
    if stage and more[stage] > SIGNIFICANT_FRACTION * winner.step_s:
        ours, theirs = stage_busy_s(winner, stage), stage_busy_s(other, stage)
        said.append(f"{stage} has its devices for {theirs:.3g} s a step, not {ours:.3g} s")
    ours, theirs = max_shared_s(best), max_shared_s(candidate)
    if not said and theirs - ours > SIGNIFICANT_FRACTION * winner.step_s:
        said.append(f"calls on the same devices take {theirs:.3g} s a step, not {ours:.3g} s")
    if other.device_idle - winner.device_idle > SIGNIFICANT_FRACTION:
        said.append(
            f"{other.device_idle:.0%} of all devices' time is idle, not {winner.device_idle:.0%}"
        )
    if said:
        return "; ".join(said)
    is_slower = other.step_s - winner.step_s > SIGNIFICANT_FRACTION * winner.step_s
    return "its calls wait for one another" if is_slower else "as good as the winner, or nearly so"


def max_shared_s(candidate: PlacementCandidate) -> float:
    """How long the calls that share most of a step have their devices, one after another."""
    estimate, placement = candidate.estimate, candidate.placement
    stages = [stage for stage in placement.assignments if stage in estimate.idle]
    return max(
        sum(stage_busy_s(estimate, other) for other in stages if placement.overlaps(stage, other))
        for stage in stages
    )


def stage_busy_s(estimate: PlacementEstimate, stage: str) -> float:
    """How long a call has its devices, of a step."""
    return (1 - estimate.idle[stage]) * estimate.step_s

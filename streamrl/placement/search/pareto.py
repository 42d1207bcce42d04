"""What a search found, as data: the best, throughput against staleness, and why others lost."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from streamrl.placement.placements import Placement
from streamrl.placement.problem import Estimate

CLEAR = 0.02
"""Of the winner's step, a difference worth a word."""


@dataclass(frozen=True)
class Candidate:
    """The best of its kind that was found.

    slower_s: what its step takes beyond the winner's. why: what is behind that, or why it cannot
    be; empty for the winner.
    """

    label: str
    placement: Placement
    estimate: Estimate
    slower_s: float = 0.0
    why: str = ""

    @property
    def step_s(self) -> float:
        """Its step time; infinite if it cannot be."""
        return self.estimate.step_s


@dataclass(frozen=True)
class FrontPoint:
    """The best under one bound of staleness, and those that come next, if they are near."""

    max_staleness: int
    candidate: Candidate
    next: Sequence[Candidate] = ()


@dataclass(frozen=True)
class Absent:
    """A bound of staleness that was asked for and is not on the front, and why."""

    max_staleness: int
    why: str


@dataclass(frozen=True)
class Planned:
    """best: the shortest step. candidates: the best of every kind, the shortest step first.

    front: of bounds of staleness, those whose best none with less of it beats; absent: all others.
    best is None, and front empty, where nothing fits; the candidates then say why. own: of the
    bound that was asked for besides, the best that generates as far ahead as it allows, or why
    there is none.
    """

    best: Candidate | None
    candidates: Sequence[Candidate]
    front: Sequence[FrontPoint]
    absent: Sequence[Absent] = ()
    own: FrontPoint | Absent | None = None


def outdone(points: Iterable[FrontPoint], front: Sequence[FrontPoint]) -> Iterator[Absent]:
    """Those of the points that are not on the front made of them, by what they do not beat."""
    kept = {point.max_staleness for point in front}
    for point in points:
        if point.max_staleness not in kept:
            least = max(bound for bound in kept if bound < point.max_staleness)
            why = f"a step of {point.candidate.step_s:.3g} s is no shorter than with {least}"
            yield Absent(point.max_staleness, why)


def pareto(points: Iterable[FrontPoint]) -> list[FrontPoint]:
    """Those that have more throughput than all with a lower bound, by bound."""
    found: list[FrontPoint] = []
    for point in sorted(points, key=lambda each: each.max_staleness):
        if not point.candidate.estimate.unfit and (
            not found or point.candidate.step_s < found[-1].candidate.step_s
        ):
            found.append(point)
    return found


def compared(winner: Candidate, other: Candidate) -> Candidate:
    """The other, with what it lost by."""
    if other.estimate.unfit:
        slower, why = other.step_s, other.estimate.unfit
    else:
        slower = other.step_s - winner.step_s
        why = _why(winner, other)
    return Candidate(other.label, other.placement, other.estimate, slower, why)


def _why(best: Candidate, candidate: Candidate) -> str:
    """The call that has its devices for longest beyond the winner's, or those that share some, and
    what nobody uses."""
    winner, other = best.estimate, candidate.estimate
    more = {
        stage: busy_s(other, stage) - busy_s(winner, stage)
        for stage in other.idle
        if stage in winner.idle
    }
    said = []
    stage = max(more, key=lambda each: (more[each], each), default="")
    if stage and more[stage] > CLEAR * winner.step_s:
        ours, theirs = busy_s(winner, stage), busy_s(other, stage)
        said.append(f"{stage} has its devices for {theirs:.3g} s a step, not {ours:.3g} s")
    ours, theirs = shared_s(best), shared_s(candidate)
    if not said and theirs - ours > CLEAR * winner.step_s:
        said.append(f"calls on the same devices take {theirs:.3g} s a step, not {ours:.3g} s")
    if other.device_idle - winner.device_idle > CLEAR:
        said.append(
            f"{other.device_idle:.0%} of all devices' time is idle, not {winner.device_idle:.0%}"
        )
    if said:
        return "; ".join(said)
    is_slower = other.step_s - winner.step_s > CLEAR * winner.step_s
    return "its calls wait for one another" if is_slower else "as good as the winner, or nearly so"


def shared_s(candidate: Candidate) -> float:
    """How long the calls that share most of a step have their devices, one after another."""
    estimate, placement = candidate.estimate, candidate.placement
    stages = [stage for stage in placement.calls if stage in estimate.idle]
    return max(
        sum(busy_s(estimate, other) for other in stages if placement.overlaps(stage, other))
        for stage in stages
    )


def busy_s(estimate: Estimate, stage: str) -> float:
    """How long a call has its devices, of a step."""
    return (1 - estimate.idle[stage]) * estimate.step_s

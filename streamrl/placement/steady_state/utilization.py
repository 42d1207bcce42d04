"""What an unrolled schedule says of its steady state: who is busy, and how stale tokens are."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from streamrl.placement.clusters import Cluster
from streamrl.placement.meshes import Mesh
from streamrl.placement.problem import Interval
from streamrl.placement.steady_state.list_scheduler import Job, Unrolled

Span = tuple[float, float]


@dataclass(frozen=True)
class Steady:
    """The last steps of a schedule, as many as take turns; `generate` is the job that samples.

    Where one step's work goes on beside another's, single steps have more or less of it in them.
    meshes: by number, as jobs have them. overlaps: of meshes, likewise.
    """

    jobs: Sequence[Job]
    generate: int
    meshes: Sequence[Mesh]
    overlaps: Sequence[Sequence[int]]
    run: Unrolled
    depth: int

    @property
    def end_s(self) -> float:
        """When a step ends whose successors generate already, if they do."""
        return self.run.ends_s[-1 - min(self.depth, len(self.run.ends_s) - 1)]

    @property
    def start_s(self) -> float:
        """So many steps before."""
        last = len(self.run.ends_s) - 1 - min(self.depth, len(self.run.ends_s) - 1)
        first = last - self.run.steps
        return self.run.ends_s[first] if first >= 0 else self.end_s - self.run.period_s

    def timeline(self) -> list[Interval]:
        """Who has their devices when in the last period, in order; 0 is where it begins."""
        return self._since(self.end_s - self.run.period_s)

    def _since(self, start_s: float) -> list[Interval]:
        found = [
            (self.jobs[taken.job].stage, taken.step, taken.start_s, taken.end_s)
            for taken in self.run.taken
            if not (taken.job == self.generate and self._stands)
        ]
        if self._stands:
            found += self._standing(start_s)
        clipped = [
            Interval(stage, step, max(start, start_s), min(end, self.end_s))
            for stage, step, start, end in found
            if min(end, self.end_s) > max(start, start_s)
        ]
        return _joined(
            Interval(each.stage, each.step, each.start_s - start_s, each.end_s - start_s)
            for each in sorted(clipped, key=lambda each: (each.stage, each.start_s))
        )

    @property
    def _stands(self) -> bool:
        return self.jobs[self.generate].stream is not None

    def _standing(self, start_s: float) -> list[tuple[str, int, float, float]]:
        """Generation that never ends has its devices whenever nobody else has them."""
        job = self.jobs[self.generate]
        beside = set(self.overlaps[job.mesh])
        taken = sorted(
            (each.start_s, each.end_s)
            for each in self.run.taken
            if each.job != self.generate and self.jobs[each.job].mesh in beside
        )
        found, at = [], start_s
        for step in range(len(self.run.ends_s) + self.depth):
            begin = self.run.started_s.get((self.generate, step))
            end = self.run.done_s.get((self.generate, step))
            if begin is None or end is None or end <= max(begin, at):
                continue
            at = max(begin, at)
            for start, stop in _gaps(taken, (at, end)):
                found.append((job.stage, step, start, stop))
            at = end
        return found

    def idle(self) -> dict[str, float]:
        """By stage, the part of the time it does not compute."""
        whole = self.end_s - self.start_s
        return {
            stage: max(0.0, 1 - seconds / whole) if whole else 0.0
            for stage, seconds in self._busy_s.items()
        }

    def device_idle(self, cluster: Cluster) -> float:
        """The part of all devices' time that nobody uses."""
        sizes = {job.stage: self.meshes[job.mesh].size if job.mesh >= 0 else 0 for job in self.jobs}
        used = sum(seconds * sizes[stage] for stage, seconds in self._busy_s.items())
        whole = (self.end_s - self.start_s) * cluster.size
        return max(0.0, 1 - used / whole) if whole else 0.0

    @cached_property
    def _busy_s(self) -> dict[str, float]:
        busy = {job.stage: 0.0 for job in self.jobs}
        for each in self._since(self.start_s):
            busy[each.stage] += each.end_s - each.start_s
        return busy

    def staleness(self) -> float:
        """Mean of a trained token, in versions: what is sampled between two pulls has the older."""
        if not self._stands:
            return 0.0
        since = self.jobs[self.generate].needs[0].job
        last = len(self.run.ends_s) - 1
        every = self.jobs[since].every
        arrived: dict[int, float] = {}
        for (job, pulled), at in self.run.done_s.items():
            if job == since and pulled >= self.depth:
                version = -((self.depth - pulled) // every) * every
                arrived[version] = min(at, arrived.get(version, at))
        found = [
            _mean_behind((self.run.started_s[self.generate, step], at), step, arrived, self.depth)
            for step in range(max(0, last - self.depth), last + 1)
            for at in self.run.results_s[step]
        ]
        return sum(found) / len(found)


def _mean_behind(span: Span, step: int, arrived: dict[int, float], most: int) -> float:
    """Mean of `step` less the version held, over a span of time; from 0 to `most`."""
    start, end = span
    total, at, behind = 0.0, start, float(most)
    for version in range(step - most + 1, step + 1):
        moment = arrived.get(version, end)
        # It comes later, or never: others may.
        if moment >= end:
            continue
        total += max(0.0, moment - at) * behind
        at, behind = max(at, moment), float(step - version)
    total += (end - at) * behind
    return total / (end - start) if end > start else behind


def _gaps(taken: Iterable[Span], within: Span) -> list[Span]:
    """The parts of a span that none of these, in order, has."""
    at, end = within
    found = []
    for start, stop in taken:
        if start >= end:
            break
        if start > at:
            found.append((at, start))
        at = max(at, stop)
    if at < end:
        found.append((at, end))
    return found


def _joined(intervals: Iterable[Interval]) -> list[Interval]:
    """Those of one stage and step that follow one another at once, as one."""
    found: list[Interval] = []
    for each in intervals:
        last = found[-1] if found else None
        joins = last and (last.stage, last.step) == (each.stage, each.step)
        if last and joins and each.start_s - last.end_s <= 1e-9 * max(1.0, each.start_s):
            found[-1] = Interval(last.stage, last.step, last.start_s, each.end_s)
        else:
            found.append(each)
    return sorted(found, key=lambda each: (each.start_s, each.stage))

"""What an unrolled schedule says of its steady state: who is busy, and how stale tokens are."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from streamrl.placement.clusters import Cluster
from streamrl.placement.meshes import Mesh
from streamrl.placement.problem import DeviceInterval
from streamrl.placement.steady_state.list_scheduler import StepJob, UnrolledSchedule

TimeSpan = tuple[float, float]


@dataclass(frozen=True)
class SteadyState:
    """The last steps of a schedule, as many as take turns; `generate` is the job that samples.

    Where one step's work goes on beside another's, single steps have more or less of it in them.
    meshes: by number, as jobs have them. overlaps: of meshes, likewise.
    """

    jobs: Sequence[StepJob]
    generate_job: int
    meshes: Sequence[Mesh]
    overlaps: Sequence[Sequence[int]]
    schedule: UnrolledSchedule
    max_steps_ahead: int

    @property
    def end_s(self) -> float:
        """When a step ends whose successors generate already, if they do."""
        return self.schedule.ends_s[-1 - min(self.max_steps_ahead, len(self.schedule.ends_s) - 1)]

    @property
    def start_s(self) -> float:
        """So many steps before."""
        last = (
            len(self.schedule.ends_s) - 1 - min(self.max_steps_ahead, len(self.schedule.ends_s) - 1)
        )
        first = last - self.schedule.period_steps
        return self.schedule.ends_s[first] if first >= 0 else self.end_s - self.schedule.period_s

    def list_intervals(self) -> list[DeviceInterval]:
        """Who has their devices when in the last period, in order; 0 is where it begins."""
        return self._list_intervals_since(self.end_s - self.schedule.period_s)

    def _list_intervals_since(self, start_s: float) -> list[DeviceInterval]:
        found = [
            (self.jobs[taken.job].stage, taken.step, taken.start_s, taken.end_s)
            for taken in self.schedule.busy_intervals
            if not (taken.job == self.generate_job and self._is_overlapped)
        ]
        if self._is_overlapped:
            found += self._list_generation_intervals(start_s)
        clipped = [
            DeviceInterval(stage, step, max(start, start_s), min(end, self.end_s))
            for stage, step, start, end in found
            if min(end, self.end_s) > max(start, start_s)
        ]
        return _join_adjacent(
            DeviceInterval(each.stage, each.step, each.start_s - start_s, each.end_s - start_s)
            for each in sorted(clipped, key=lambda each: (each.stage, each.start_s))
        )

    @property
    def _is_overlapped(self) -> bool:
        return self.jobs[self.generate_job].profile is not None

    def _list_generation_intervals(self, start_s: float) -> list[tuple[str, int, float, float]]:
        """Generation that never ends has its devices whenever nobody else has them."""
        job = self.jobs[self.generate_job]
        beside = set(self.overlaps[job.mesh])
        taken = sorted(
            (each.start_s, each.end_s)
            for each in self.schedule.busy_intervals
            if each.job != self.generate_job and self.jobs[each.job].mesh in beside
        )
        found, at = [], start_s
        for step in range(len(self.schedule.ends_s) + self.max_steps_ahead):
            begin = self.schedule.started_s.get((self.generate_job, step))
            end = self.schedule.done_s.get((self.generate_job, step))
            if begin is None or end is None or end <= max(begin, at):
                continue
            at = max(begin, at)
            for start, stop in _find_gaps(taken, (at, end)):
                found.append((job.stage, step, start, stop))
            at = end
        return found

    def idle_fractions(self) -> dict[str, float]:
        """By stage, the part of the time it does not compute."""
        whole = self.end_s - self.start_s
        return {
            stage: max(0.0, 1 - seconds / whole) if whole else 0.0
            for stage, seconds in self._busy_s.items()
        }

    def device_idle_fraction(self, cluster: Cluster) -> float:
        """The part of all devices' time that nobody uses."""
        sizes = {job.stage: self.meshes[job.mesh].size if job.mesh >= 0 else 0 for job in self.jobs}
        used = sum(seconds * sizes[stage] for stage, seconds in self._busy_s.items())
        whole = (self.end_s - self.start_s) * cluster.num_devices
        return max(0.0, 1 - used / whole) if whole else 0.0

    @cached_property
    def _busy_s(self) -> dict[str, float]:
        busy = {job.stage: 0.0 for job in self.jobs}
        for each in self._list_intervals_since(self.start_s):
            busy[each.stage] += each.end_s - each.start_s
        return busy

    def mean_staleness(self) -> float:
        """Mean of a trained token, in versions: what is sampled between two pulls has the older."""
        if not self._is_overlapped:
            return 0.0
        since = self.jobs[self.generate_job].dependencies[0].job
        last = len(self.schedule.ends_s) - 1
        every = self.jobs[since].step_interval
        arrived: dict[int, float] = {}
        for (job, pulled), at in self.schedule.done_s.items():
            if job == since and pulled >= self.max_steps_ahead:
                version = -((self.max_steps_ahead - pulled) // every) * every
                arrived[version] = min(at, arrived.get(version, at))
        found = [
            _mean_versions_behind(
                (self.schedule.started_s[self.generate_job, step], at),
                step,
                arrived,
                self.max_steps_ahead,
            )
            for step in range(max(0, last - self.max_steps_ahead), last + 1)
            for at in self.schedule.results_s[step]
        ]
        return sum(found) / len(found)


def _mean_versions_behind(span: TimeSpan, step: int, arrived: dict[int, float], most: int) -> float:
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


def _find_gaps(taken: Iterable[TimeSpan], within: TimeSpan) -> list[TimeSpan]:
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


def _join_adjacent(intervals: Iterable[DeviceInterval]) -> list[DeviceInterval]:
    """Those of one stage and step that follow one another at once, as one."""
    found: list[DeviceInterval] = []
    for each in intervals:
        last = found[-1] if found else None
        joins = last and (last.stage, last.step) == (each.stage, each.step)
        if last and joins and each.start_s - last.end_s <= 1e-9 * max(1.0, each.start_s):
            found[-1] = DeviceInterval(last.stage, last.step, last.start_s, each.end_s)
        else:
            found.append(each)
    return sorted(found, key=lambda each: (each.start_s, each.stage))

"""Utilization of devices and staleness of tokens in the steady state of a schedule."""

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
    """Steady state of a schedule: its last steps, which repeat at a constant step time.

    With overlapping generation single steps differ, so means are over `period_steps` steps.
    generate_job: number of the generation job.
    meshes, overlaps: by mesh number, as in `ListScheduler`.
    max_steps_ahead: steps that generation may be ahead of training.
    """

    jobs: Sequence[StepJob]
    generate_job: int
    meshes: Sequence[Mesh]
    overlaps: Sequence[Sequence[int]]
    schedule: UnrolledSchedule
    max_steps_ahead: int

    @property
    def _last_step(self) -> int:
        """Last measured step, which is before the final, incomplete window of steps."""
        return max(0, len(self.schedule.ends_s) - 1 - self.max_steps_ahead)

    @property
    def end_s(self) -> float:
        """End of the measured steps."""
        return self.schedule.ends_s[self._last_step]

    @property
    def start_s(self) -> float:
        """Start of the measured steps, `period_steps` steps before `end_s`."""
        first = self._last_step - self.schedule.period_steps
        return self.schedule.ends_s[first] if first >= 0 else self.end_s - self.schedule.period_s

    def list_intervals(self) -> list[DeviceInterval]:
        """Return the busy intervals of all stages in the last period, in order.

        Times are seconds from the start of the period.
        """
        return self._list_intervals_since(self.end_s - self.schedule.period_s)

    def _list_intervals_since(self, start_s: float) -> list[DeviceInterval]:
        """Return busy intervals from `start_s` to `end_s`; times are relative to `start_s`."""
        spans = [
            (self.jobs[busy.job].stage, busy.step, busy.start_s, busy.end_s)
            for busy in self.schedule.busy_intervals
            if not (busy.job == self.generate_job and self._is_overlapped)
        ]
        if self._is_overlapped:
            spans += self._list_generation_intervals(start_s)
        clipped = [
            DeviceInterval(stage, step, max(start, start_s), min(end, self.end_s))
            for stage, step, start, end in spans
            if min(end, self.end_s) > max(start, start_s)
        ]
        return _join_adjacent(
            DeviceInterval(
                interval.stage, interval.step, interval.start_s - start_s, interval.end_s - start_s
            )
            for interval in sorted(clipped, key=lambda interval: (interval.stage, interval.start_s))
        )

    @property
    def _is_overlapped(self) -> bool:
        return self.jobs[self.generate_job].profile is not None

    def _list_generation_intervals(self, start_s: float) -> list[tuple[str, int, float, float]]:
        """Return (stage, step, start, end) while no other job blocks generation's devices."""
        job = self.jobs[self.generate_job]
        overlapping = set(self.overlaps[job.mesh])
        blocked = sorted(
            (busy.start_s, busy.end_s)
            for busy in self.schedule.busy_intervals
            if busy.job != self.generate_job and self.jobs[busy.job].mesh in overlapping
        )
        intervals, at = [], start_s
        for step in range(len(self.schedule.ends_s) + self.max_steps_ahead):
            begin = self.schedule.started_s.get((self.generate_job, step))
            end = self.schedule.done_s.get((self.generate_job, step))
            if begin is None or end is None or end <= max(begin, at):
                continue
            at = max(begin, at)
            for start, stop in _find_free_intervals(blocked, (at, end)):
                intervals.append((job.stage, step, start, stop))
            at = end
        return intervals

    def compute_idle_fractions(self) -> dict[str, float]:
        total_s = self.end_s - self.start_s
        return {
            stage: max(0.0, 1 - seconds / total_s) if total_s else 0.0
            for stage, seconds in self._busy_s.items()
        }

    def compute_device_idle_fraction(self, cluster: Cluster) -> float:
        sizes = {job.stage: self.meshes[job.mesh].size if job.mesh >= 0 else 0 for job in self.jobs}
        used = sum(seconds * sizes[stage] for stage, seconds in self._busy_s.items())
        total_device_s = (self.end_s - self.start_s) * cluster.num_devices
        return max(0.0, 1 - used / total_device_s) if total_device_s else 0.0

    @cached_property
    def _busy_s(self) -> dict[str, float]:
        busy = {job.stage: 0.0 for job in self.jobs}
        for interval in self._list_intervals_since(self.start_s):
            busy[interval.stage] += interval.end_s - interval.start_s
        return busy

    def compute_mean_staleness(self) -> float:
        """Return the mean staleness of trained tokens, in versions.

        Tokens sampled between two pulls have the older version.
        """
        if not self._is_overlapped:
            return 0.0
        pull_job = self.jobs[self.generate_job].dependencies[0].job
        last = len(self.schedule.ends_s) - 1
        interval = self.jobs[pull_job].step_interval
        arrived: dict[int, float] = {}
        for (job, pulled), at in self.schedule.done_s.items():
            if job == pull_job and pulled >= self.max_steps_ahead:
                # The pull for a step delivers version step - max_steps_ahead, rounded up to the
                # publish interval.
                version = -((self.max_steps_ahead - pulled) // interval) * interval
                arrived[version] = min(at, arrived.get(version, at))
        staleness = [
            _compute_mean_versions_behind(
                (self.schedule.started_s[self.generate_job, step], at),
                step,
                arrived,
                self.max_steps_ahead,
            )
            for step in range(max(0, last - self.max_steps_ahead), last + 1)
            for at in self.schedule.results_s[step]
        ]
        return sum(staleness) / len(staleness)


def _compute_mean_versions_behind(
    span: TimeSpan, step: int, arrived: dict[int, float], most: int
) -> float:
    """Return how many versions the generators' weights are behind `step`, as a mean over `span`.

    arrived: time at which each version arrived in the generators. most: the most versions behind.
    """
    start, end = span
    total, at, staleness = 0.0, start, float(most)
    for version in range(step - most + 1, step + 1):
        moment = arrived.get(version, end)
        # The version arrives after the span or never; later versions may still arrive in time.
        if moment >= end:
            continue
        total += max(0.0, moment - at) * staleness
        at, staleness = max(at, moment), float(step - version)
    total += (end - at) * staleness
    return total / (end - start) if end > start else staleness


def _find_free_intervals(busy: Iterable[TimeSpan], within: TimeSpan) -> list[TimeSpan]:
    """Return the parts of `within` that busy intervals, ordered by start, leave free."""
    at, end = within
    gaps = []
    for start, stop in busy:
        if start >= end:
            break
        if start > at:
            gaps.append((at, start))
        at = max(at, stop)
    if at < end:
        gaps.append((at, end))
    return gaps


def _join_adjacent(intervals: Iterable[DeviceInterval]) -> list[DeviceInterval]:
    joined: list[DeviceInterval] = []
    for interval in intervals:
        last = joined[-1] if joined else None
        joins = last and (last.stage, last.step) == (interval.stage, interval.step)
        if last and joins and interval.start_s - last.end_s <= 1e-9 * max(1.0, interval.start_s):
            joined[-1] = DeviceInterval(last.stage, last.step, last.start_s, interval.end_s)
        else:
            joined.append(interval)
    return sorted(joined, key=lambda interval: (interval.start_s, interval.stage))

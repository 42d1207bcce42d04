"""Steady-state estimate of a placement: step time, idle time and staleness.

The estimate takes milliseconds to compute. The dataflow is unrolled over steps
(`list_scheduler.py`). A call waits for its columns, for versions within `max_staleness`, and for
devices; a busy mesh blocks all meshes that overlap it. With streaming, calls on separate devices
process the groups of a step as they arrive. Generation ahead overlaps all other calls, with
rollouts of several steps (`overlapping_steps.py`).
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from streamrl.placement.clusters import Cluster
from streamrl.placement.meshes import Mesh
from streamrl.placement.placements import CallAssignment, Placement
from streamrl.planner.problem.problem import (
    CallMemory,
    PlacementCosts,
    PlacementEstimate,
    PlacementProblem,
)
from streamrl.planner.steady_state.call_durations import (
    STEP_CUTS,
    GenerationModel,
    split_seconds,
)
from streamrl.planner.steady_state.jobs import (
    CallGraph,
    JobGraph,
    build_busy_jobs,
    find_max_busy_s,
    make_ahead_job,
    make_on_policy_job,
)
from streamrl.planner.steady_state.list_scheduler import ListScheduler, StepJob, UnrolledSchedule

TimeSpan = tuple[float, float]


class DeviceInterval(NamedTuple):
    """Interval in which a stage had its devices, in seconds."""

    stage: str
    start_s: float
    end_s: float


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
        """Return the busy intervals of all stages in the measured steps, in order of their start.

        Times are seconds from the start of these steps.
        """
        start_s = self.start_s
        spans = [
            (self.jobs[busy.job].stage, busy.start_s, busy.end_s)
            for busy in self.schedule.busy_intervals
            if not (busy.job == self.generate_job and self._is_overlapped)
        ]
        if self._is_overlapped:
            spans += self._list_generation_intervals(start_s)
        return [
            DeviceInterval(stage, max(start, start_s) - start_s, min(end, self.end_s) - start_s)
            for stage, start, end in sorted(spans, key=lambda span: span[1])
            if min(end, self.end_s) > max(start, start_s)
        ]

    @property
    def _is_overlapped(self) -> bool:
        return self.jobs[self.generate_job].profile is not None

    def _list_generation_intervals(self, start_s: float) -> list[tuple[str, float, float]]:
        """Return (stage, start, end) while no other job blocks generation's devices."""
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
                intervals.append((job.stage, start, stop))
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
        for interval in self.list_intervals():
            busy[interval.stage] += interval.end_s - interval.start_s
        return busy


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


FINE_CUTS = STEP_CUTS[max(STEP_CUTS)]
"""Finest cuts of a step's groups: fractions of the groups, up to 1.0."""

PlacementKey = tuple[tuple[tuple[str, CallAssignment], ...], int, bool]


class PlacementEstimator:
    """Estimator of the placements of a problem; caches their step times.

    on_estimated: called for each step time that is not cached.
    """

    def __init__(
        self,
        problem: PlacementProblem,
        costs: PlacementCosts,
        on_estimated: Callable[[], None] = lambda: None,
    ) -> None:
        self.problem = problem
        self.costs = costs
        self._on_estimated = on_estimated
        self.call_graph = CallGraph.from_dataflow(problem.dataflow)
        # All groups that a step samples start together, those that a filter replaces included.
        self.generation = GenerationModel(
            problem.workload.sampled_workload, self.call_graph.num_greedy
        )
        self._step_durations_s: dict[PlacementKey, float] = {}

    def iter_estimated(self) -> Iterator[tuple[Placement, float]]:
        """Yield the placements that `step_s` has evaluated, with their step times in seconds."""
        for (calls, ahead, streamed), seconds in self._step_durations_s.items():
            yield Placement(dict(calls), ahead, streamed), seconds

    def estimate_step_s(self, placement: Placement, limit_s: float = math.inf) -> float:
        """Return the seconds of a training step with this placement; inf if infeasible.

        If a lower bound reaches `limit_s`, return inf without scheduling.
        """
        key = make_placement_key(placement)
        if key not in self._step_durations_s:
            self._on_estimated()
            seconds = math.inf
            if not self.costs.explain_infeasible(placement):
                if limit_s < math.inf and self._find_max_busy_s(placement) >= limit_s:
                    return math.inf
                _, schedule = self.schedule_jobs(placement)
                seconds = schedule.period_s
            self._step_durations_s[key] = seconds
        return self._step_durations_s[key]

    def _find_max_busy_s(self, placement: Placement) -> float:
        """Return the busiest device's busy seconds per step, a lower bound of the step time."""
        jobs = self._make_job_graph(placement)
        return find_max_busy_s(jobs, build_busy_jobs(jobs, self.generation)[0])

    def _make_job_graph(self, placement: Placement) -> JobGraph:
        problem, timings = self.problem, self.costs.predict_timings(placement)
        return JobGraph(self.call_graph, problem.workload, placement, timings, problem.run_options)

    def estimate(self, placement: Placement) -> PlacementEstimate:
        reason = self.costs.explain_infeasible(placement)
        if reason:
            return PlacementEstimate.make_infeasible(reason)
        steady = self.find_steady_state(placement)
        step_s = steady.schedule.period_s
        cluster, workload = self.problem.cluster, self.problem.workload
        _, used_bytes, free_bytes = find_fullest_device(
            self.costs.predict_memory(placement), placement, cluster
        )
        return PlacementEstimate(
            step_s,
            workload.num_rollouts * workload.lengths.mean / step_s,
            steady.compute_idle_fractions(),
            steady.compute_device_idle_fraction(cluster),
            used_bytes,
            free_bytes,
        )

    def find_steady_state(self, placement: Placement) -> SteadyState:
        jobs, schedule = self.schedule_jobs(placement)
        generate = jobs.job_by_stage[self.call_graph.generate_call.stage]
        return SteadyState(
            jobs.jobs, generate, jobs.meshes, jobs.overlaps, schedule, placement.max_staleness
        )

    def schedule_jobs(self, placement: Placement) -> tuple[JobGraph, UnrolledSchedule]:
        """Return the jobs of a feasible placement, and their schedule over several steps."""
        jobs, generation = self._make_job_graph(placement), self.generation
        # Round up to whole publish intervals, if not every step is published.
        publish_every, window = jobs.publish_every, placement.max_staleness + 1
        window = -(-window // publish_every) * publish_every
        if placement.max_staleness:
            # Groups of all steps of the window arrive at the same time.
            ends = generation.find_completions_s(jobs.timings.generator, FINE_CUTS)
            spans = zip(
                split_seconds(1.0, FINE_CUTS), itertools.pairwise((0.0, *ends)), strict=True
            )
            jobs.completion_spans = [
                (fraction, (late - early) / window) for fraction, (early, late) in spans
            ]
        make_job = make_ahead_job if placement.max_staleness else make_on_policy_job
        scheduler = ListScheduler(
            jobs.build_jobs(make_job(jobs, generation)), jobs.overlaps, jobs.stopping_meshes
        )
        schedule = scheduler.run(window=window, max_steps=6 * window + 5)
        if placement.max_staleness:
            # Steps without a common period get the mean period, which may be too short.
            schedule.period_s = max(schedule.period_s, self._find_max_busy_s(placement))
        return jobs, schedule


def make_placement_key(placement: Placement) -> PlacementKey:
    calls = tuple(sorted(placement.assignments.items(), key=lambda item: item[0]))
    return calls, placement.max_staleness, placement.is_streamed


def find_fullest_device(
    memory: Mapping[str, CallMemory], placement: Placement, cluster: Cluster
) -> tuple[int, float, float]:
    """Return the device with the fewest free bytes, its used bytes and its free bytes.

    memory: memory of a call per device, by stage.
    Used bytes are the resident bytes of all calls on the device and the largest active bytes.
    """
    worst = (0, 0.0, math.inf)
    # From the first device of a mesh to that of the next, devices hold the same calls or fewer.
    for device in sorted({call.mesh.first for call in placement.assignments.values()}):
        residents = [
            memory[stage]
            for stage, call in placement.assignments.items()
            if device in call.mesh.devices and stage in memory
        ]
        used = sum(call.resident_bytes for call in residents) + max(
            (call.active_bytes for call in residents), default=0.0
        )
        capacity = cluster.find_node_group(device).device.memory_bytes
        if capacity - used < worst[2]:
            worst = (device, used, capacity - used)
    return worst

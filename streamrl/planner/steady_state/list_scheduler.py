"""List scheduling of the jobs of consecutive steps, until the step time is constant.

Of all ready parts of jobs, the part that has been ready for the longest runs next, as soon as no
overlapping mesh is busy. A job consists of consecutive parts, so other jobs can run in between, and
dependents can start with the first part's results.

Generation ahead has rollouts of several steps in the same engines. Every running rollout gets one
token per decode step, whichever training step it belongs to. Earlier steps get slots first. The
rollouts of a step follow the schedule they would have alone (`generation_model.ReplicaSchedule`): a
decode step advances them by 1, or by less if fewer slots are left than they would use. The time of
a decode step depends on all running rollouts.
"""

import bisect
import heapq
import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from streamrl.planner.costs.generation_model import RolloutProfile

PERIOD_TOLERANCE = 1e-6
"""Relative difference of step times that count as equal, on policy."""
OVERLAP_TOLERANCE = 0.01
"""Relative difference of step times that count as equal, with generation ahead."""
MIN_EQUAL_STEPS = 3
"""Consecutive steps of equal time that end the simulation."""
RUN_NEXT = -1.0
"""Priority of a part that runs before all ready parts."""
NO_MESH = -1
"""Mesh number of a job without devices."""
ROUNDING_TOLERANCE = 1e-9


class CompletionEvent(NamedTuple):
    """Event: a cut (fraction) of a step's groups is complete.

    result_index: number of the cut within the step.
    is_last: whether the cut is the last of the step.
    """

    at_s: float
    step: int
    result_index: int
    is_last: bool


@dataclass(slots=True)
class _StepProgress:
    """Position of a training step's rollouts in their profile.

    goal: decode steps of the profile after which the segment or the next cut ends.
    decode_steps: decode steps that are done.
    segment, num_results: current segment, and number of completed cuts.
    speed: progress in the profile per real decode step, at most 1.
    """

    step: int
    goal: float
    decode_steps: float = 0.0
    segment: int = 0
    num_results: int = 0
    speed: float = 0.0


class OverlappedGeneration:
    """Estimated progress of the rollouts of several training steps on the same engines.

    Estimated time only moves forward.
    """

    def __init__(self, profile: RolloutProfile) -> None:
        self._profile = profile
        self._now = 0.0
        self._steps: list[_StepProgress] = []
        self._blocked_spans: list[tuple[float, float]] = []
        self._decode_step_s: float | None = None
        """Seconds of a decode step; None if other rollouts run than when it was computed."""
        self._reached_goal = False

    def admit_step(self, step: int) -> None:
        self._steps.append(_StepProgress(step, self._find_goal(0, 0)))
        self._decode_step_s, self._reached_goal = None, True

    def block_devices(self, start_s: float, end_s: float) -> None:
        """Record that other jobs have the devices from `start_s` to `end_s`; generation stops."""
        bisect.insort(self._blocked_spans, (start_s, end_s))

    def advance(self, limit_s: float) -> CompletionEvent | None:
        """Generate until the next cut (fraction) of a step's groups is complete.

        Return None if time reaches `limit_s` before.
        """
        while True:
            if self._reached_goal and (result := self._pop_result()) is not None:
                return result
            until = self._skip_blocked_spans(limit_s)
            if self._now >= limit_s or (not self._steps and until == math.inf):
                return None
            if self._steps:
                self._advance_until(until)
            else:
                self._now = until

    def _skip_blocked_spans(self, limit_s: float) -> float:
        """Advance the time, at most to `limit_s`, past spans in which other jobs have the devices.

        Returns the start of the next such span, or `limit_s` if that is earlier; without meaning if
        the time has reached `limit_s`.
        """
        spans = self._blocked_spans
        while spans and spans[0][0] <= self._now:
            self._now = max(self._now, min(spans[0][1], limit_s))
            if self._now < spans[0][1]:
                break
            del spans[0]
        return min(limit_s, spans[0][0]) if spans else limit_s

    def _pop_result(self) -> CompletionEvent | None:
        results = self._profile.result_steps
        for i, progress in enumerate(self._steps):
            if progress.decode_steps >= results[progress.num_results] * (1 - ROUNDING_TOLERANCE):
                progress.num_results += 1
                is_last = progress.num_results == len(results)
                if is_last:
                    del self._steps[i]
                    self._decode_step_s = None
                else:
                    progress.goal = self._find_goal(progress.segment, progress.num_results)
                at_s = self._now + self._profile.timing.begin_s
                return CompletionEvent(at_s, progress.step, progress.num_results - 1, is_last)
        self._reached_goal = False
        return None

    def _find_goal(self, segment: int, num_results: int) -> float:
        profile = self._profile
        return min(profile.bounds[segment + 1], profile.result_steps[num_results])

    def _advance_until(self, until_s: float) -> None:
        profile = self._profile
        step_s = self._decode_step_s = self._decode_step_s or self._compute_decode_step_s()
        steps = (until_s - self._now) / step_s
        for progress in self._steps:
            if progress.speed:
                left = max(0.0, progress.goal - progress.decode_steps)
                steps = min(steps, left / progress.speed)
        if math.isfinite(until_s) and steps * step_s >= (until_s - self._now) * (
            1 - ROUNDING_TOLERANCE
        ):
            self._now = until_s
        else:
            self._now += steps * step_s
        last = len(profile.running_rollouts) - 1
        for progress in self._steps:
            progress.decode_steps += steps * progress.speed
            if progress.decode_steps < progress.goal * (1 - ROUNDING_TOLERANCE):
                continue
            self._reached_goal = True
            segment_end = profile.bounds[progress.segment + 1] * (1 - ROUNDING_TOLERANCE)
            if progress.decode_steps >= segment_end and progress.segment < last:
                progress.segment += 1
                progress.goal = self._find_goal(progress.segment, progress.num_results)
                self._decode_step_s = None

    def _compute_decode_step_s(self) -> float:
        profile, free = self._profile, self._profile.slots
        running = resident = overhead_s = 0.0
        for progress in self._steps:
            wanted_slots = profile.running_rollouts[progress.segment]
            # The earliest step advances as if it were alone.
            is_first = progress is self._steps[0]
            progress.speed = speed = (
                1.0 if is_first or wanted_slots <= free else free / wanted_slots
            )
            free = max(0.0, free - wanted_slots * speed)
            running += wanted_slots * speed
            resident += profile.resident_tokens[progress.segment] * speed
            overhead_s += profile.overhead_s[progress.segment] * speed
        return profile.timing.decode_step_s(running, resident) + overhead_s


@dataclass(frozen=True)
class JobDependency:
    """Dependency of a job on the results of another job, `lag` steps earlier.

    job: number of the other job.
    is_whole: wait for all results; otherwise each part waits for as large a fraction of the results
      as it completes of its own job.
    is_for_last_part: only the last part of the dependent job waits.
    delay_s: extra delay after the result.
    step_interval: the other job has results only once in so many steps; the dependency is on the
      first such step from `lag` steps earlier on.
    """

    job: int
    lag: int = 0
    is_whole: bool = False
    is_for_last_part: bool = False
    delay_s: float = 0.0
    step_interval: int = 1

    def find_lag(self, step: int) -> int:
        return self.lag - (self.lag - step - 1) % self.step_interval


@dataclass(frozen=True)
class StepJob:
    """Job that runs once per step.

    mesh: number of the job's mesh, or NO_MESH.
    parts: seconds of each part.
    result_times_s: when results arrive after the start, for a job that delivers while it computes.
    profile: for generation ahead, which uses its devices whenever no other job does, for several
      steps at once; results of the profile replace `result_times_s`.
    is_glued: no other job runs between the last two parts.
    is_queued: later parts keep the priority of their inputs, so the job drains its queue before
      others get the devices.
    step_interval, first_step: the job takes time only in step `first_step` and every
      `step_interval` steps from there.
    """

    stage: str
    mesh: int
    parts: Sequence[float]
    dependencies: Sequence[JobDependency] = ()
    result_times_s: Sequence[float] = ()
    profile: RolloutProfile | None = None
    is_glued: bool = False
    is_queued: bool = False
    step_interval: int = 1
    first_step: int = 0

    def takes_time(self, step: int) -> bool:
        return not (step - self.first_step) % self.step_interval


_Dependents = list[tuple[int, int, float, bool]]
"""Parts that wait for a result, as (part number, steps later, delay in s, whether the part's
priority stays as it is)."""


class _PartGraph:
    """Numbered parts of all jobs of a step, and their dependencies.

    Lists by step are indexed by the step modulo `cycle_steps`, after which dependencies repeat.
    """

    def __init__(self, jobs: Sequence[StepJob]) -> None:
        self.jobs = jobs
        self.first_part = [0, *itertools.accumulate(len(job.parts) for job in jobs)]
        self.job_by_part = [j for j, job in enumerate(jobs) for _ in job.parts]
        intervals = {
            dependency.step_interval for job in jobs for dependency in job.dependencies
        } | {job.step_interval for job in jobs}
        self.cycle_steps = math.lcm(*intervals)
        steps = range(self.cycle_steps)
        self.part_seconds = [
            [seconds * job.takes_time(step) for job in jobs for seconds in job.parts]
            for step in steps
        ]
        numbered_jobs = enumerate(jobs, 1)
        self.glued_parts = {
            self.first_part[job_number] - 1
            for job_number, job in numbered_jobs
            if job.is_glued and len(job.parts) > 1
        }
        self.lags: list[list[list[int]]] = [[[] for _ in self.job_by_part] for _ in steps]
        self.after_part: list[list[_Dependents]] = [[[] for _ in self.job_by_part] for _ in steps]
        results = [job.profile.result_steps if job.profile else job.result_times_s for job in jobs]
        self.after_result: list[list[list[_Dependents]]] = [
            [[[] for _ in result_list] for result_list in results] for _ in steps
        ]
        for step in steps:
            self._link_all(step)
        self.wait_counts = [[len(lags) for lags in result_list] for result_list in self.lags]
        self.max_lag = max(
            (max(lags, default=0) for result_list in self.lags for lags in result_list), default=0
        )

    def _link_all(self, step: int) -> None:
        for j, job in enumerate(self.jobs):
            for dependency in job.dependencies:
                self._link_dependency(j, dependency, step)
            for part in range(self.first_part[j] + 1, self.first_part[j + 1]):
                self.after_part[step][part - 1].append((part, 0, 0.0, job.is_queued))
                self.lags[step][part].append(0)

    def _link_dependency(self, j: int, dependency: JobDependency, step: int) -> None:
        source, lag = self.jobs[dependency.job], dependency.find_lag(step)
        first_source_part = self.first_part[dependency.job]
        source_cycle_step = (step - lag) % self.cycle_steps
        if source.result_times_s or source.profile:
            results = self.after_result[source_cycle_step][dependency.job]
        else:
            results = self.after_part[source_cycle_step][
                first_source_part : self.first_part[dependency.job + 1]
            ]
        count = len(self.jobs[j].parts)
        # The glued last part does not process inputs.
        # Part i of n waits for the result that completes the same fraction of the work, number
        # ceil((i + 1) * m / n) of m. Example: of 5 results, the first of 2 parts waits for the 3rd.
        streamed = count - (self.jobs[j].is_glued and count > 1)
        for part in range(
            count - 1 if dependency.is_for_last_part else 0,
            count if dependency.is_for_last_part else streamed,
        ):
            output = (
                len(results) if dependency.is_whole else -(-(part + 1) * len(results) // streamed)
            )
            number = self.first_part[j] + part
            results[output - 1].append((number, lag, dependency.delay_s, False))
            self.lags[step][number].append(lag)
            # Parts run in order, so a whole dependency only needs to delay the first.
            if dependency.is_whole:
                break


class ListScheduler:
    """List scheduler: simulates the jobs of consecutive steps.

    overlaps[m]: meshes that share devices with mesh m.
    stops: meshes on which work stops generation ahead, besides the meshes that overlap its own.
    """

    def __init__(
        self,
        jobs: Sequence[StepJob],
        overlaps: Sequence[Sequence[int]],
        stops: Collection[int] = (),
    ) -> None:
        self._jobs = jobs
        self._part_graph = _PartGraph(jobs)
        self._exclusive_meshes = [
            () if job.mesh == NO_MESH else tuple(overlaps[job.mesh]) for job in jobs
        ]
        self._free_at_s = [0.0] * len(overlaps)
        self._wait_counts: list[list[int]] = []
        self._ready_at_s: list[list[float]] = []
        self._priorities: list[list[float]] = []
        self._ready_heap: list[tuple[float, int, int]] = []
        self._parts_left: list[int] = []
        self._step_ends_s = [0.0]
        self._period_s = 0.0
        self._ends_s: list[float] = []
        self._generation: OverlappedGeneration | None = None
        self._blocking_meshes: set[int] = set()
        for j, job in enumerate(jobs):
            if job.profile is not None:
                self._generation, self._generation_job = OverlappedGeneration(job.profile), j
                self._blocking_meshes = {*self._exclusive_meshes[j], *stops}

    def run(self, *, window: int, max_steps: int) -> float:
        """Simulate until step times repeat, or `max_steps` steps have ended; return the step time.

        window: steps that may be in flight.
        """
        num_checked = 0
        self._open_steps(self._part_graph.max_lag)
        while len(self._ends_s) < max_steps and self._run_next():
            if len(self._ends_s) > num_checked:
                num_checked = len(self._ends_s)
                if self._is_periodic(window) if self._generation else self._is_settled(window):
                    break
        return self._period_s

    def _run_next(self) -> bool:
        heap = self._ready_heap
        if self._generation is not None and not (heap and heap[0][0] == RUN_NEXT):
            result = self._generation.advance(heap[0][0] if heap else math.inf)
            if result is not None:
                self._finish_result(result)
                return True
        if not heap:
            return False
        _, step, part = heapq.heappop(heap)
        ready = self._ready_at_s[step][part]
        if self._jobs[self._part_graph.job_by_part[part]].profile is not None:
            assert self._generation is not None
            self._generation.admit_step(step)
        else:
            self._finish_part(step, self._run_part(ready, step, part))
        return True

    def _finish_result(self, result: CompletionEvent) -> None:
        at, step = result.at_s, result.step
        part_graph, j = self._part_graph, self._generation_job
        dependents = part_graph.after_result[step % part_graph.cycle_steps][j]
        self._release_dependents(dependents[result.result_index], step, at)
        if result.is_last:
            self._finish_part(step, at)

    def _finish_part(self, step: int, at: float) -> None:
        ended = self._step_ends_s
        if step >= len(ended):
            ended += [0.0] * (step + 1 - len(ended))
        ended[step] = max(ended[step], at)
        self._parts_left[step] -= 1
        while (count := len(self._ends_s)) < len(self._parts_left) and not self._parts_left[count]:
            self._ends_s.append(ended[count])

    def _is_periodic(self, window: int) -> bool:
        """Return whether consecutive windows of steps took equally long; update the period.

        Steps that start together may keep different lengths, so only windows are comparable.
        """
        ends = self._ends_s
        num_steps = 2 * window if len(ends) > 2 * window + 1 else max(1, len(ends) // 2)
        self._period_s = (
            (ends[-1] - ends[-1 - num_steps]) / num_steps if len(ends) > num_steps else ends[-1]
        )
        if len(ends) <= 4 * window:
            return False
        marks = [ends[-1 - k * window] for k in range(4)]
        window_times = [late - early for late, early in itertools.pairwise(marks)]
        return max(window_times) - min(window_times) <= OVERLAP_TOLERANCE * window_times[0]

    def _is_settled(self, window: int) -> bool:
        """Return whether step times repeat after at most `window` + 1 steps; update the period."""
        step_times = [late - early for early, late in itertools.pairwise(self._ends_s)]
        half = step_times[len(step_times) // 2 :]
        self._period_s = sum(half) / len(half) if half else self._ends_s[-1]
        for cycle in range(1, window + 2):
            count = max(cycle, min(MIN_EQUAL_STEPS, window))
            # The first steps start without waiting for a version, so they do not count.
            if len(step_times) < count + max(cycle, window if window > 1 else 0):
                break
            if all(
                abs(step_times[-k] - step_times[-k - cycle]) <= PERIOD_TOLERANCE * step_times[-k]
                for k in range(1, count + 1)
            ):
                self._period_s = sum(step_times[-cycle:]) / cycle
                return True
        return False

    def _open_steps(self, step: int) -> None:
        """Add all steps up to `step`; parts that wait for no result are ready at time 0."""
        part_graph = self._part_graph
        for number in range(len(self._wait_counts), step + 1):
            cycle_step = number % part_graph.cycle_steps
            if number >= part_graph.max_lag:
                waits = part_graph.wait_counts[cycle_step].copy()
            else:
                waits = [sum(lag <= number for lag in lags) for lags in part_graph.lags[cycle_step]]
            self._wait_counts.append(waits)
            self._ready_at_s.append([0.0] * len(waits))
            self._priorities.append([0.0] * len(waits))
            self._parts_left.append(len(waits))
            for part, count in enumerate(waits):
                if not count:
                    heapq.heappush(self._ready_heap, (0.0, number, part))

    def _run_part(self, ready: float, step: int, part: int) -> float:
        part_graph = self._part_graph
        cycle_step = step % part_graph.cycle_steps
        j, seconds = part_graph.job_by_part[part], part_graph.part_seconds[cycle_step][part]
        job, start, free = self._jobs[j], ready, self._free_at_s
        for mesh in self._exclusive_meshes[j]:
            start = max(start, free[mesh])
        end = start + seconds
        if seconds and job.mesh != NO_MESH:
            free[job.mesh] = end
            if self._generation is not None and job.mesh in self._blocking_meshes:
                # Generation yields to a waiting job even while that job waits for other devices.
                self._generation.block_devices(ready, end)
        self._release_dependents(part_graph.after_part[cycle_step][part], step, end)
        if job.result_times_s:
            results = part_graph.after_result[cycle_step][j]
            for offset, dependents in zip(job.result_times_s, results, strict=True):
                self._release_dependents(dependents, step, start + offset)
            end = start + job.result_times_s[-1]
        return end

    def _release_dependents(self, dependents: _Dependents, step: int, at: float) -> None:
        """Mark a result as available at time `at` for the waiting parts; queue ready ones."""
        for part, lag, delay_s, keeps_priority in dependents:
            number, arrival_s = step + lag, at + delay_s
            if number >= len(self._wait_counts):
                self._open_steps(number)
            ready, waits = self._ready_at_s[number], self._wait_counts[number]
            priorities = self._priorities[number]
            ready[part] = max(ready[part], arrival_s)
            if arrival_s > priorities[part] and not keeps_priority:
                priorities[part] = arrival_s
            waits[part] -= 1
            if not waits[part]:
                is_glued = part in self._part_graph.glued_parts
                priority = RUN_NEXT if is_glued else priorities[part]
                heapq.heappush(self._ready_heap, (priority, number, part))

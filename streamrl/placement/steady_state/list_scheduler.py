"""The calls of step after step on their devices, until every step takes as long as the one before.

List scheduling: who has been ready for the longest is next, and waits until nobody has a device of
its mesh. A call's work is in parts, one after the other, so that others get in between, and so that
who takes its results can begin with the first of them.
"""

import heapq
import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from streamrl.placement.steady_state.overlapping_steps import (
    CompletionEvent,
    OverlappedGeneration,
    RolloutProfile,
)

PERIOD_TOLERANCE = 1e-6
"""Periods that differ by less, relatively, are the same."""
OVERLAP_TOLERANCE = 0.01
"""Likewise, where steps go on beside one another."""
MIN_EQUAL_STEPS = 3
"""Steps in a row that take the same time, where the next will, too."""
RUN_NEXT = -1.0
"""Before anyone who is ready."""
NO_MESH = -1
"""The mesh of a job that takes no devices."""


@dataclass(frozen=True)
class JobDependency:
    """What a job waits for: the results of another, `lag` steps earlier.

    whole: of all its parts; otherwise part by part, as they come. delay_s: on top. every: only so
    many steps together have results that count, those of the last of them; it is the first such
    step from `lag` steps earlier on.
    """

    job: int
    lag: int = 0
    is_whole: bool = False
    is_for_last_part: bool = False
    delay_s: float = 0.0
    step_interval: int = 1

    def find_lag(self, step: int) -> int:
        """How many steps earlier it is, for this step."""
        return self.lag - (self.lag - step - 1) % self.step_interval


@dataclass(frozen=True)
class StepJob:
    """What happens once in every step.

    mesh: number of its mesh, or NOWHERE. parts: seconds of each. curve: when results are there, s
    after the beginning, for what gives them while it computes. stream: of what computes whenever
    nobody else has its devices, for several steps at once; its results come instead of the curve's.
    glued: whether nobody gets in between its last two parts. queued: whether it takes all there is,
    what came first before what came later, and keeps its devices meanwhile. every, first: of so
    many steps it takes time in one alone, which is `first` or so many steps from it.
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
        """Whether it takes time in this step."""
        return not (step - self.first_step) % self.step_interval


class BusyInterval(NamedTuple):
    """Devices of a job's mesh, from when to when."""

    job: int
    step: int
    start_s: float
    end_s: float


@dataclass
class UnrolledSchedule:
    """What came of it: when each step ended, and how far apart they are in the end.

    steps: how many of the last ones that is the mean of. started_s, done_s: by job and step, when
    it began, and when all its results were there.
    results_s: by step, when each result of the job with a stream was there.
    """

    period_s: float = 0.0
    period_steps: int = 1
    ends_s: list[float] = field(default_factory=list)
    busy_intervals: list[BusyInterval] = field(default_factory=list)
    started_s: dict[tuple[int, int], float] = field(default_factory=dict)
    done_s: dict[tuple[int, int], float] = field(default_factory=dict)
    results_s: dict[int, list[float]] = field(default_factory=dict)


_Dependents = list[tuple[int, int, float]]
"""Parts that wait for something, how many steps later, and for how much longer, s."""


class _PartGraph:
    """The parts of all jobs in one step, numbered, and who waits for what.

    Lists by step are by its number in a cycle, after which all is as before.
    """

    def __init__(self, jobs: Sequence[StepJob]) -> None:
        self.jobs = jobs
        self.first_part = [0, *itertools.accumulate(len(job.parts) for job in jobs)]
        self.job_by_part = [j for j, job in enumerate(jobs) for _ in job.parts]
        paces = {need.step_interval for job in jobs for need in job.dependencies} | {
            job.step_interval for job in jobs
        }
        self.cycle_steps = math.lcm(*paces)
        steps = range(self.cycle_steps)
        self.part_seconds = [
            [seconds * job.takes_time(step) for job in jobs for seconds in job.parts]
            for step in steps
        ]
        ends = enumerate(jobs, 1)
        self.glued_parts = {
            self.first_part[end] - 1 for end, job in ends if job.is_glued and len(job.parts) > 1
        }
        self.lags: list[list[list[int]]] = [[[] for _ in self.job_by_part] for _ in steps]
        self.after_part: list[list[_Dependents]] = [[[] for _ in self.job_by_part] for _ in steps]
        results = [job.profile.result_steps if job.profile else job.result_times_s for job in jobs]
        self.after_result: list[list[list[_Dependents]]] = [
            [[[] for _ in each] for each in results] for _ in steps
        ]
        for step in steps:
            self._link_all(step)
        self.wait_counts = [[len(lags) for lags in each] for each in self.lags]
        self.max_lag = max((max(lags, default=0) for each in self.lags for lags in each), default=0)

    def _link_all(self, step: int) -> None:
        for j, job in enumerate(self.jobs):
            for need in job.dependencies:
                self._link_dependency(j, need, step)
            for part in range(self.first_part[j] + 1, self.first_part[j + 1]):
                self._add_dependent(self.after_part[step][part - 1], part, step, 0, 0.0)

    def _link_dependency(self, j: int, need: JobDependency, step: int) -> None:
        source, lag = self.jobs[need.job], need.find_lag(step)
        at, theirs = self.first_part[need.job], (step - lag) % self.cycle_steps
        if source.result_times_s or source.profile:
            results = self.after_result[theirs][need.job]
        else:
            results = self.after_part[theirs][at : self.first_part[need.job + 1]]
        count = len(self.jobs[j].parts)
        # What is glued to the last part is no work on what comes.
        streamed = count - (self.jobs[j].is_glued and count > 1)
        for part in range(
            count - 1 if need.is_for_last_part else 0, count if need.is_for_last_part else streamed
        ):
            output = len(results) if need.is_whole else -(-(part + 1) * len(results) // streamed)
            self._add_dependent(
                results[output - 1], self.first_part[j] + part, step, lag, need.delay_s
            )
            # What comes whole is there for the first part, and so for all.
            if need.is_whole:
                break

    def _add_dependent(
        self, followers: _Dependents, part: int, step: int, lag: int, delay_s: float
    ) -> None:
        followers.append((part, lag, delay_s))
        self.lags[step][part].append(lag)


class ListScheduler:
    """Runs jobs, step by step; `overlaps[m]` are the meshes that share devices with mesh m.

    stops: the meshes whose work stops a job with a stream, besides those that overlap its own.
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
        self._schedule = UnrolledSchedule()
        self._generation: OverlappedGeneration | None = None
        self._blocking_meshes: set[int] = set()
        for j, job in enumerate(jobs):
            if job.profile is not None:
                self._generation, self._generation_job = OverlappedGeneration(job.profile), j
                self._blocking_meshes = {*self._exclusive_meshes[j], *stops}

    def run(self, *, window: int, most: int) -> UnrolledSchedule:
        """Until steps take the same time again and again, or `most` have ended.

        window: how many may be under way at once.
        """
        found, looked = self._schedule, 0
        self._open_steps(self._part_graph.max_lag)
        while len(found.ends_s) < most and self._run_next():
            if len(found.ends_s) > looked:
                looked = len(found.ends_s)
                if self._is_periodic(window) if self._generation else self._is_settled(window):
                    break
        return found

    def _run_next(self) -> bool:
        """What is next happens, if anything is."""
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
            self._schedule.started_s[self._generation_job, step] = ready
        else:
            self._finish_part(step, self._run_part(ready, step, part))
        return True

    def _finish_result(self, result: CompletionEvent) -> None:
        """A part of a step's groups is complete."""
        found, at, step = self._schedule, result.at_s, result.step
        found.results_s.setdefault(step, []).append(at)
        program, j = self._part_graph, self._generation_job
        self._release_dependents(
            program.after_result[step % program.cycle_steps][j][result.result_index], step, at, j
        )
        if result.is_last:
            found.done_s[j, step] = at
            self._finish_part(step, at)

    def _finish_part(self, step: int, at: float) -> None:
        """One of a step's parts has its end."""
        ended, found = self._step_ends_s, self._schedule
        if step >= len(ended):
            ended += [0.0] * (step + 1 - len(ended))
        ended[step] = max(ended[step], at)
        self._parts_left[step] -= 1
        while len(found.ends_s) < len(self._parts_left) and not self._parts_left[len(found.ends_s)]:
            found.ends_s.append(ended[len(found.ends_s)])

    def _is_periodic(self, window: int) -> bool:
        """Whether as many steps as are under way at once have taken as long as those before.

        Steps that begin together may stay so: each is of its own length, all of them alike.
        """
        ends = self._schedule.ends_s
        back = 2 * window if len(ends) > 2 * window + 1 else max(1, len(ends) // 2)
        self._schedule.period_s = (
            (ends[-1] - ends[-1 - back]) / back if len(ends) > back else ends[-1]
        )
        self._schedule.period_steps = back
        if len(ends) <= 4 * window:
            return False
        marks = [ends[-1 - k * window] for k in range(4)]
        took = [late - early for late, early in itertools.pairwise(marks)]
        return max(took) - min(took) <= OVERLAP_TOLERANCE * took[0]

    def _is_settled(self, window: int) -> bool:
        """Whether the last steps, one or several, have taken as long as those before them, each."""
        found = self._schedule
        took = [late - early for early, late in itertools.pairwise(found.ends_s)]
        half = took[len(took) // 2 :]
        found.period_s = sum(half) / len(half) if half else found.ends_s[-1]
        found.period_steps = max(1, len(half))
        for cycle in range(1, window + 2):
            count = max(cycle, min(MIN_EQUAL_STEPS, window))
            # Those that begin without waiting for a version are no sign of what is to come.
            if len(took) < count + max(cycle, window if window > 1 else 0):
                break
            if all(
                abs(took[-k] - took[-k - cycle]) <= PERIOD_TOLERANCE * took[-k]
                for k in range(1, count + 1)
            ):
                found.period_s, found.period_steps = sum(took[-cycle:]) / cycle, cycle
                return True
        return False

    def _open_steps(self, step: int) -> None:
        """Count what the parts of a step wait for, and of those before it."""
        program = self._part_graph
        for number in range(len(self._wait_counts), step + 1):
            turn = number % program.cycle_steps
            if number >= program.max_lag:
                waits = program.wait_counts[turn].copy()
            else:
                waits = [sum(lag <= number for lag in each) for each in program.lags[turn]]
            self._wait_counts.append(waits)
            self._ready_at_s.append([0.0] * len(waits))
            self._priorities.append([0.0] * len(waits))
            self._parts_left.append(len(waits))
            for part, count in enumerate(waits):
                if not count:
                    heapq.heappush(self._ready_heap, (0.0, number, part))

    def _run_part(self, ready: float, step: int, part: int) -> float:
        """Compute a part; when what comes of it is there."""
        program, found = self._part_graph, self._schedule
        turn = step % program.cycle_steps
        j, seconds = program.job_by_part[part], program.part_seconds[turn][part]
        job, start, free = self._jobs[j], ready, self._free_at_s
        for mesh in self._exclusive_meshes[j]:
            start = max(start, free[mesh])
        end = start + seconds
        if seconds and job.mesh != NO_MESH:
            free[job.mesh] = end
            found.busy_intervals.append(BusyInterval(j, step, start, end))
            if self._generation is not None and job.mesh in self._blocking_meshes:
                # Who can give way does so for whoever waits, though that one waits for others.
                self._generation.block_devices(ready, end)
        if part == program.first_part[j]:
            found.started_s[j, step] = start
        if program.after_part[turn][part]:
            self._release_dependents(program.after_part[turn][part], step, end, j)
        if job.result_times_s:
            for output, offset in enumerate(job.result_times_s):
                self._release_dependents(
                    program.after_result[turn][j][output], step, start + offset, j
                )
            end = start + job.result_times_s[-1]
        if part + 1 == program.first_part[j + 1]:
            found.done_s[j, step] = end
        return end

    def _release_dependents(self, followers: _Dependents, step: int, at: float, of: int) -> None:
        program, jobs = self._part_graph, self._jobs
        for part, lag, delay_s in followers:
            theirs = step + lag
            if theirs >= len(self._wait_counts):
                self._open_steps(theirs)
            ready, waits = self._ready_at_s[theirs], self._wait_counts[theirs]
            ready[part] = max(ready[part], at + delay_s)
            job = program.job_by_part[part]
            if job != of or not jobs[job].is_queued:
                turns = self._priorities[theirs]
                turns[part] = max(turns[part], at + delay_s)
            waits[part] -= 1
            if not waits[part]:
                turn = RUN_NEXT if part in program.glued_parts else self._priorities[theirs][part]
                heapq.heappush(self._ready_heap, (turn, theirs, part))

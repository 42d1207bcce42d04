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

from streamrl.placement.steady_state.overlapping_steps import Flowing, Result, Stream

SETTLED = 1e-6
"""Periods that differ by less, relatively, are the same."""
CLOSE = 0.01
"""Likewise, where steps go on beside one another."""
ALIKE = 3
"""Steps in a row that take the same time, where the next will, too."""
NEXT = -1.0
"""Before anyone who is ready."""
NOWHERE = -1
"""The mesh of a job that takes no devices."""


@dataclass(frozen=True)
class Need:
    """What a job waits for: the results of another, `lag` steps earlier.

    whole: of all its parts; otherwise part by part, as they come. delay_s: on top. every: only so
    many steps together have results that count, those of the last of them; it is the first such
    step from `lag` steps earlier on.
    """

    job: int
    lag: int = 0
    whole: bool = False
    last: bool = False
    delay_s: float = 0.0
    every: int = 1

    def lag_at(self, step: int) -> int:
        """How many steps earlier it is, for this step."""
        return self.lag - (self.lag - step - 1) % self.every


@dataclass(frozen=True)
class Job:
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
    needs: Sequence[Need] = ()
    curve: Sequence[float] = ()
    stream: Stream | None = None
    glued: bool = False
    queued: bool = False
    every: int = 1
    first: int = 0

    def takes(self, step: int) -> bool:
        """Whether it takes time in this step."""
        return not (step - self.first) % self.every


class Taken(NamedTuple):
    """Devices of a job's mesh, from when to when."""

    job: int
    step: int
    start_s: float
    end_s: float


@dataclass
class Unrolled:
    """What came of it: when each step ended, and how far apart they are in the end.

    steps: how many of the last ones that is the mean of. started_s, done_s: by job and step, when
    it began, and when all its results were there.
    results_s: by step, when each result of the job with a stream was there.
    """

    period_s: float = 0.0
    steps: int = 1
    ends_s: list[float] = field(default_factory=list)
    taken: list[Taken] = field(default_factory=list)
    started_s: dict[tuple[int, int], float] = field(default_factory=dict)
    done_s: dict[tuple[int, int], float] = field(default_factory=dict)
    results_s: dict[int, list[float]] = field(default_factory=dict)


_Followers = list[tuple[int, int, float]]
"""Parts that wait for something, how many steps later, and for how much longer, s."""


class _Program:
    """The parts of all jobs in one step, numbered, and who waits for what.

    Lists by step are by its number in a cycle, after which all is as before.
    """

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.jobs = jobs
        self.first = [0, *itertools.accumulate(len(job.parts) for job in jobs)]
        self.job = [j for j, job in enumerate(jobs) for _ in job.parts]
        paces = {need.every for job in jobs for need in job.needs} | {job.every for job in jobs}
        self.cycle = math.lcm(*paces)
        steps = range(self.cycle)
        self.seconds = [
            [seconds * job.takes(step) for job in jobs for seconds in job.parts] for step in steps
        ]
        ends = enumerate(jobs, 1)
        self.glued = {self.first[end] - 1 for end, job in ends if job.glued and len(job.parts) > 1}
        self.lags: list[list[list[int]]] = [[[] for _ in self.job] for _ in steps]
        self.after_part: list[list[_Followers]] = [[[] for _ in self.job] for _ in steps]
        results = [job.stream.results if job.stream else job.curve for job in jobs]
        self.after_result: list[list[list[_Followers]]] = [
            [[[] for _ in each] for each in results] for _ in steps
        ]
        for step in steps:
            self._link_all(step)
        self.counts = [[len(lags) for lags in each] for each in self.lags]
        self.most_lag = max(
            (max(lags, default=0) for each in self.lags for lags in each), default=0
        )

    def _link_all(self, step: int) -> None:
        for j, job in enumerate(self.jobs):
            for need in job.needs:
                self._link(j, need, step)
            for part in range(self.first[j] + 1, self.first[j + 1]):
                self._add(self.after_part[step][part - 1], part, step, 0, 0.0)

    def _link(self, j: int, need: Need, step: int) -> None:
        source, lag = self.jobs[need.job], need.lag_at(step)
        at, theirs = self.first[need.job], (step - lag) % self.cycle
        if source.curve or source.stream:
            results = self.after_result[theirs][need.job]
        else:
            results = self.after_part[theirs][at : self.first[need.job + 1]]
        count = len(self.jobs[j].parts)
        # What is glued to the last part is no work on what comes.
        streamed = count - (self.jobs[j].glued and count > 1)
        for part in range(count - 1 if need.last else 0, count if need.last else streamed):
            output = len(results) if need.whole else -(-(part + 1) * len(results) // streamed)
            self._add(results[output - 1], self.first[j] + part, step, lag, need.delay_s)
            # What comes whole is there for the first part, and so for all.
            if need.whole:
                break

    def _add(self, followers: _Followers, part: int, step: int, lag: int, delay_s: float) -> None:
        followers.append((part, lag, delay_s))
        self.lags[step][part].append(lag)


class Unroller:
    """Runs jobs, step by step; `overlaps[m]` are the meshes that share devices with mesh m.

    stops: the meshes whose work stops a job with a stream, besides those that overlap its own.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        overlaps: Sequence[Sequence[int]],
        stops: Collection[int] = (),
    ) -> None:
        self._jobs = jobs
        self._program = _Program(jobs)
        self._others = [() if job.mesh == NOWHERE else tuple(overlaps[job.mesh]) for job in jobs]
        self._free = [0.0] * len(overlaps)
        self._waits: list[list[int]] = []
        self._ready: list[list[float]] = []
        self._turns: list[list[float]] = []
        self._heap: list[tuple[float, int, int]] = []
        self._left: list[int] = []
        self._ended = [0.0]
        self._found = Unrolled()
        self._flow: Flowing | None = None
        self._stopped_by: set[int] = set()
        for j, job in enumerate(jobs):
            if job.stream is not None:
                self._flow, self._streaming = Flowing(job.stream), j
                self._stopped_by = {*self._others[j], *stops}

    def run(self, *, window: int, most: int) -> Unrolled:
        """Until steps take the same time again and again, or `most` have ended.

        window: how many may be under way at once.
        """
        found, looked = self._found, 0
        self._open(self._program.most_lag)
        while len(found.ends_s) < most and self._go_on():
            if len(found.ends_s) > looked:
                looked = len(found.ends_s)
                if self._repeats(window) if self._flow else self._settled(window):
                    break
        return found

    def _go_on(self) -> bool:
        """What is next happens, if anything is."""
        heap = self._heap
        if self._flow is not None and not (heap and heap[0][0] == NEXT):
            result = self._flow.advance(heap[0][0] if heap else math.inf)
            if result is not None:
                self._streamed(result)
                return True
        if not heap:
            return False
        _, step, part = heapq.heappop(heap)
        ready = self._ready[step][part]
        if self._jobs[self._program.job[part]].stream is not None:
            assert self._flow is not None
            self._flow.admit(step)
            self._found.started_s[self._streaming, step] = ready
        else:
            self._end(step, self._take(ready, step, part))
        return True

    def _streamed(self, result: Result) -> None:
        """A part of a step's groups is complete."""
        found, at, step = self._found, result.at_s, result.step
        found.results_s.setdefault(step, []).append(at)
        program, j = self._program, self._streaming
        self._tell(program.after_result[step % program.cycle][j][result.number], step, at, j)
        if result.is_last:
            found.done_s[j, step] = at
            self._end(step, at)

    def _end(self, step: int, at: float) -> None:
        """One of a step's parts has its end."""
        ended, found = self._ended, self._found
        if step >= len(ended):
            ended += [0.0] * (step + 1 - len(ended))
        ended[step] = max(ended[step], at)
        self._left[step] -= 1
        while len(found.ends_s) < len(self._left) and not self._left[len(found.ends_s)]:
            found.ends_s.append(ended[len(found.ends_s)])

    def _repeats(self, window: int) -> bool:
        """Whether as many steps as are under way at once have taken as long as those before.

        Steps that begin together may stay so: each is of its own length, all of them alike.
        """
        ends = self._found.ends_s
        back = 2 * window if len(ends) > 2 * window + 1 else max(1, len(ends) // 2)
        self._found.period_s = (ends[-1] - ends[-1 - back]) / back if len(ends) > back else ends[-1]
        self._found.steps = back
        if len(ends) <= 4 * window:
            return False
        marks = [ends[-1 - k * window] for k in range(4)]
        took = [late - early for late, early in itertools.pairwise(marks)]
        return max(took) - min(took) <= CLOSE * took[0]

    def _settled(self, window: int) -> bool:
        """Whether the last steps, one or several, have taken as long as those before them, each."""
        found = self._found
        took = [late - early for early, late in itertools.pairwise(found.ends_s)]
        half = took[len(took) // 2 :]
        found.period_s = sum(half) / len(half) if half else found.ends_s[-1]
        found.steps = max(1, len(half))
        for cycle in range(1, window + 2):
            count = max(cycle, min(ALIKE, window))
            # Those that begin without waiting for a version are no sign of what is to come.
            if len(took) < count + max(cycle, window if window > 1 else 0):
                break
            if all(
                abs(took[-k] - took[-k - cycle]) <= SETTLED * took[-k] for k in range(1, count + 1)
            ):
                found.period_s, found.steps = sum(took[-cycle:]) / cycle, cycle
                return True
        return False

    def _open(self, step: int) -> None:
        """Count what the parts of a step wait for, and of those before it."""
        program = self._program
        for number in range(len(self._waits), step + 1):
            turn = number % program.cycle
            if number >= program.most_lag:
                waits = program.counts[turn].copy()
            else:
                waits = [sum(lag <= number for lag in each) for each in program.lags[turn]]
            self._waits.append(waits)
            self._ready.append([0.0] * len(waits))
            self._turns.append([0.0] * len(waits))
            self._left.append(len(waits))
            for part, count in enumerate(waits):
                if not count:
                    heapq.heappush(self._heap, (0.0, number, part))

    def _take(self, ready: float, step: int, part: int) -> float:
        """Compute a part; when what comes of it is there."""
        program, found = self._program, self._found
        turn = step % program.cycle
        j, seconds = program.job[part], program.seconds[turn][part]
        job, start, free = self._jobs[j], ready, self._free
        for mesh in self._others[j]:
            start = max(start, free[mesh])
        end = start + seconds
        if seconds and job.mesh != NOWHERE:
            free[job.mesh] = end
            found.taken.append(Taken(j, step, start, end))
            if self._flow is not None and job.mesh in self._stopped_by:
                # Who can give way does so for whoever waits, though that one waits for others.
                self._flow.block(ready, end)
        if part == program.first[j]:
            found.started_s[j, step] = start
        if program.after_part[turn][part]:
            self._tell(program.after_part[turn][part], step, end, j)
        if job.curve:
            for output, offset in enumerate(job.curve):
                self._tell(program.after_result[turn][j][output], step, start + offset, j)
            end = start + job.curve[-1]
        if part + 1 == program.first[j + 1]:
            found.done_s[j, step] = end
        return end

    def _tell(self, followers: _Followers, step: int, at: float, of: int) -> None:
        program, jobs = self._program, self._jobs
        for part, lag, delay_s in followers:
            theirs = step + lag
            if theirs >= len(self._waits):
                self._open(theirs)
            ready, waits = self._ready[theirs], self._waits[theirs]
            ready[part] = max(ready[part], at + delay_s)
            job = program.job[part]
            if job != of or not jobs[job].queued:
                turns = self._turns[theirs]
                turns[part] = max(turns[part], at + delay_s)
            waits[part] -= 1
            if not waits[part]:
                turn = NEXT if part in program.glued else self._turns[theirs][part]
                heapq.heappush(self._heap, (turn, theirs, part))

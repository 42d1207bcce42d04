"""Clocks of CPU work: slower than the wall clock while processes share few cores."""

from collections.abc import Iterable, Sequence

import numpy as np

from streamrl.messages import Array
from streamrl.planner.problem.stage_timings import compute_process_speed

Interval = tuple[float, float]
MIN_CORES_FRACTION = 0.1
"""Minimum fraction of the cores assumed to be left by untraced processes."""


def merge_intervals(intervals: Iterable[Interval]) -> list[Interval]:
    merged: list[list[float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return [(start, end) for start, end in merged]


class WorkClock:
    """Clock of the work that a continuously busy process does.

    While n processes are busy, the clock advances at `compute_process_speed(cores, n)`; cores=0
    means a core per process, speed 1.

    Example: one core, process A busy in [0, 2] and B in [1, 3]. The clock reads 0, 1, 1.5 and 2.5
    at times 0, 1, 2 and 3: alone 1 s of work per second, together half.

    busy: busy intervals of each process.
    other_cores: mean number of cores that untraced processes keep busy.
    """

    def __init__(
        self,
        busy: Iterable[Sequence[Interval]],
        *,
        cores: float,
        other_cores: float = 0.0,
        crowding: float = 0.0,
    ) -> None:
        intervals = [
            interval
            for process_intervals in busy
            for interval in merge_intervals(process_intervals)
        ]
        starts = np.array([start for start, _ in intervals], np.float64)
        ends = np.array([end for _, end in intervals], np.float64)
        edges = np.concatenate([starts, ends])
        busy_changes = np.concatenate([np.ones(len(starts)), -np.ones(len(ends))])
        order = np.argsort(edges, kind="stable")
        self._times = edges[order]
        running = np.cumsum(busy_changes[order])[:-1]
        available_cores = max(cores - other_cores, MIN_CORES_FRACTION * cores)
        max_busy = int(running.max(initial=0.0))
        speeds = [
            compute_process_speed(available_cores, busy, crowding=crowding) if cores else 1.0
            for busy in range(max_busy + 1)
        ]
        speed = np.array(speeds)[running.astype(int)]
        self._work_s = np.concatenate([[0.0], np.cumsum(speed * np.diff(self._times))])

    def read_at(self, times: Array) -> Array:
        """Return the clock's readings, in work seconds, at these times in seconds.

        Only differences of readings are meaningful.
        """
        if not len(self._times):
            return np.asarray(times, np.float64)
        inside: Array = np.interp(times, self._times, self._work_s)
        before = np.minimum(0.0, times - self._times[0])
        after = np.maximum(0.0, times - self._times[-1])
        return inside + before + after

    def measure_work(self, start: float, end: float) -> float:
        first, last = self.read_at(np.array([start, end]))
        return float(last - first)


class PausableClock:
    """A WorkClock that stops during pauses."""

    def __init__(self, pauses: Iterable[Interval], clock: WorkClock) -> None:
        self._clock = clock
        edges = clock.read_at(
            np.array([edge for pause in merge_intervals(pauses) for edge in pause], np.float64)
        )
        lengths = np.diff(edges)
        lengths[1::2] = 0.0
        self._edges = edges
        self._paused_s = np.concatenate([[0.0], np.cumsum(lengths)])

    def read_at(self, times: Array) -> Array:
        work_s = self._clock.read_at(times)
        if not len(self._edges):
            return work_s
        paused_s: Array = np.interp(work_s, self._edges, self._paused_s)
        return work_s - paused_s

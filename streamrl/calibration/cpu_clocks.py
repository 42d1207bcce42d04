"""Time in which work was done: slower than the clock's where processes shared a few cores."""

from collections.abc import Iterable, Sequence

import numpy as np

from streamrl.messages import Array
from streamrl.placement.stage_timings import process_speed

Interval = tuple[float, float]
MIN_CORES_FRACTION = 0.1
"""Part of the cores that others leave at least."""


def merge_intervals(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time in intervals that do not overlap, in order."""
    found: list[list[float]] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1][1] = max(found[-1][1], end)
        else:
            found.append([start, end])
    return [(start, end) for start, end in found]


class WorkClock:
    """Seconds a process works that is busy throughout, where `busy` are the intervals of each.

    They slow one another down as in `process_speed`; `cores` 0 is one for each, and they do not.
    `beside` is how many cores, on average, others keep busy for them.
    """

    def __init__(
        self,
        busy: Iterable[Sequence[Interval]],
        *,
        cores: float,
        beside: float = 0.0,
        crowding: float = 0.0,
    ) -> None:
        intervals = [one for each in busy for one in merge_intervals(each)]
        starts = np.array([start for start, _ in intervals], np.float64)
        ends = np.array([end for _, end in intervals], np.float64)
        at = np.concatenate([starts, ends])
        change = np.concatenate([np.ones(len(starts)), -np.ones(len(ends))])
        order = np.argsort(at, kind="stable")
        self._times = at[order]
        running = np.cumsum(change[order])[:-1]
        left = max(cores - beside, MIN_CORES_FRACTION * cores)
        most = int(running.max(initial=0.0))
        speeds = [
            process_speed(left, busy, crowding=crowding) if cores else 1.0
            for busy in range(most + 1)
        ]
        speed = np.array(speeds)[running.astype(int)]
        self._work_s = np.concatenate([[0.0], np.cumsum(speed * np.diff(self._times))])

    def read_at(self, times: Array) -> Array:
        """What the clock shows at these times, s; differences have a meaning."""
        if not len(self._times):
            return np.asarray(times, np.float64)
        inside: Array = np.interp(times, self._times, self._work_s)
        before = np.minimum(0.0, times - self._times[0])
        behind = np.maximum(0.0, times - self._times[-1])
        return inside + before + behind

    def measure_work(self, start: float, end: float) -> float:
        """Work done from the one time to the other."""
        first, last = self.read_at(np.array([start, end]))
        return float(last - first)


class PausableClock:
    """The same, but it stands still in these intervals."""

    def __init__(self, rests: Iterable[Interval], clock: WorkClock) -> None:
        self._clock = clock
        edges = clock.read_at(
            np.array([edge for rest in merge_intervals(rests) for edge in rest], np.float64)
        )
        lasts = np.diff(edges)
        lasts[1::2] = 0.0
        self._edges = edges
        self._paused_s = np.concatenate([[0.0], np.cumsum(lasts)])

    def read_at(self, times: Array) -> Array:
        """What it shows at these times."""
        shown = self._clock.read_at(times)
        if not len(self._edges):
            return shown
        rested: Array = np.interp(shown, self._edges, self._paused_s)
        return shown - rested

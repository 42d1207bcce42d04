"""CPU time of simulated processes, which is longer where processes share few cores."""

import asyncio
import heapq
import itertools
from collections.abc import Callable
from functools import partial

from streamrl.planner.problem.stage_timings import compute_process_speed

_TIME_TOLERANCE_S, _TIME_TOLERANCE = 1e-9, 1e-15
"""Timers within this absolute (s) or relative distance of the present are due."""


class CpuTimer:
    """A callback that the CPU model calls at a given time of its work clock."""

    __slots__ = ("callback",)

    def __init__(self, callback: Callable[[], object]) -> None:
        self.callback: Callable[[], object] | None = callback

    def cancel(self) -> None:
        self.callback = None


class CpuModel:
    """Cores that all simulated processes share; with 0 cores, each process has a core of its own.

    All busy processes progress at the same speed, that of `compute_process_speed`. The model's
    clock, `now`, counts seconds of work: it advances at this speed, and a change of the number of
    busy processes rescales the remaining waits.

    Example: with 1 core and 2 busy processes, `run_work(3)` takes 6 virtual seconds.
    """

    def __init__(self, cores: float = 0, *, crowding: float = 0.0) -> None:
        self._clock = asyncio.get_running_loop()
        self._cores, self._crowding = cores, crowding
        self._num_busy = 0
        self._speed = 1.0
        self._speed_since = self._work_s = self._clock.time()
        self._timers: list[tuple[float, int, CpuTimer]] = []
        self._timer_ids = itertools.count()
        self._next_handle: asyncio.TimerHandle | None = None

    @property
    def now(self) -> float:
        """Time of the work clock: seconds of work done by now by a process that was always busy."""
        return self._work_s + (self._clock.time() - self._speed_since) * self._speed

    def has_passed(self, when: float) -> bool:
        return when <= self.now * (1 + _TIME_TOLERANCE) + _TIME_TOLERANCE_S

    def call_at(self, when: float, callback: Callable[[], object]) -> CpuTimer:
        timer = CpuTimer(callback)
        heapq.heappush(self._timers, (when, next(self._timer_ids), timer))
        if self._timers[0][2] is timer:
            self._schedule_next()
        return timer

    def call_later(self, seconds: float, callback: Callable[[], object]) -> None:
        if self._cores:
            self.call_at(self.now + seconds, callback)
        else:
            self._clock.call_later(seconds, callback)

    def adjust_busy(self, processes: int) -> None:
        self._num_busy += processes
        cores = self._cores
        speed = (
            compute_process_speed(cores, self._num_busy, crowding=self._crowding) if cores else 1.0
        )
        if speed != self._speed:
            self._work_s, self._speed_since = self.now, self._clock.time()
            self._speed = speed
            self._schedule_next()

    async def wait_until(self, when: float) -> None:
        if when > self.now:
            future = self._clock.create_future()
            timer = self.call_at(when, partial(_resolve_future, future))
            try:
                await future
            finally:
                timer.cancel()

    async def run_work(self, seconds: float, *, processes: int = 1) -> None:
        """Keep `processes` processes busy until each has done `seconds` of work."""
        self.adjust_busy(processes)
        try:
            await self.wait_until(self.now + seconds)
        finally:
            self.adjust_busy(-processes)

    def _schedule_next(self) -> None:
        if self._next_handle is not None:
            self._next_handle.cancel()
            self._next_handle = None
        timers = self._timers
        while timers and timers[0][2].callback is None:
            heapq.heappop(timers)
        if timers:
            wait_s = (timers[0][0] - self._work_s) / self._speed
            self._next_handle = self._clock.call_at(self._speed_since + wait_s, self._fire_timers)

    def _fire_timers(self) -> None:
        self._next_handle, timers = None, self._timers
        while timers and self.has_passed(timers[0][0]):
            callback = heapq.heappop(timers)[2].callback
            if callback is not None:
                callback()
        if self._next_handle is None:
            self._schedule_next()


class SerialProcess:
    """A simulated process that does queued work in order, while its callers do not wait."""

    def __init__(self, cpu: CpuModel) -> None:
        self._cpu = cpu
        self._busy_until = 0.0
        self._is_busy = False

    def add_work(self, seconds: float) -> None:
        if not seconds:
            return
        self._busy_until = max(self._busy_until, self._cpu.now) + seconds
        if not self._is_busy:
            self._is_busy = True
            self._cpu.adjust_busy(1)
            self._cpu.call_at(self._busy_until, self._stop_if_done)

    def _stop_if_done(self) -> None:
        if self._cpu.has_passed(self._busy_until):
            self._is_busy = False
            self._cpu.adjust_busy(-1)
        else:
            self._cpu.call_at(self._busy_until, self._stop_if_done)


def _resolve_future(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)

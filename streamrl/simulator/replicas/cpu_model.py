"""Time in which work is done: that of the clock, or slower where processes share a few cores."""

import asyncio
import heapq
import itertools
from collections.abc import Callable
from functools import partial

from streamrl.placement.stage_timings import process_speed

_TIME_TOLERANCE_S, _TIME_TOLERANCE = 1e-9, 1e-15
"""What is this close is now, s and relatively."""


class CpuTimer:
    """Something that is to happen at a time of a machine."""

    __slots__ = ("callback",)

    def __init__(self, happen: Callable[[], object]) -> None:
        self.callback: Callable[[], object] | None = happen

    def cancel(self) -> None:
        """It will not."""
        self.callback = None


class CpuModel:
    """So many cores that all processes share; 0: one for each, and nobody is in another's way.

    Where processes slow one another down, as in `process_speed`, all time goes slower.
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
        """Seconds that a process which was busy throughout has worked."""
        return self._work_s + (self._clock.time() - self._speed_since) * self._speed

    def has_passed(self, when: float) -> bool:
        """Whether it is this time, but for rounding."""
        return when <= self.now * (1 + _TIME_TOLERANCE) + _TIME_TOLERANCE_S

    def call_at(self, when: float, happen: Callable[[], object]) -> CpuTimer:
        """Let something happen once `now` is `when`."""
        timer = CpuTimer(happen)
        heapq.heappush(self._timers, (when, next(self._timer_ids), timer))
        if self._timers[0][2] is timer:
            self._schedule_next()
        return timer

    def call_later(self, seconds: float, happen: Callable[[], object]) -> None:
        """Let something happen after so many seconds of work."""
        if self._cores:
            self.call_at(self.now + seconds, happen)
        else:
            self._clock.call_later(seconds, happen)

    def adjust_busy(self, processes: int) -> None:
        """So many processes more are busy, or less if negative."""
        self._num_busy += processes
        cores = self._cores
        speed = process_speed(cores, self._num_busy, crowding=self._crowding) if cores else 1.0
        if speed != self._speed:
            self._work_s, self._speed_since = self.now, self._clock.time()
            self._speed = speed
            self._schedule_next()

    async def wait_until(self, when: float) -> None:
        """Wait until `now` is `when`."""
        if when > self.now:
            waiting = self._clock.create_future()
            timer = self.call_at(when, partial(_resolve_future, waiting))
            try:
                await waiting
            finally:
                timer.cancel()

    async def run_work(self, seconds: float, *, processes: int = 1) -> None:
        """So many processes are busy with something that takes each of them so long."""
        self.adjust_busy(processes)
        try:
            await self.wait_until(self.now + seconds)
        finally:
            self.adjust_busy(-processes)

    def _schedule_next(self) -> None:
        """Ring at the first timer, at the speed of now."""
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
            happen = heapq.heappop(timers)[2].callback
            if happen is not None:
                happen()
        if self._next_handle is None:
            self._schedule_next()


class SerialProcess:
    """A process that does what it is given one by one, and nobody waits for it."""

    def __init__(self, machine: CpuModel) -> None:
        self._cpu = machine
        self._busy_until = 0.0
        self._is_busy = False

    def add_work(self, seconds: float) -> None:
        """There is so much more to do."""
        if not seconds:
            return
        self._busy_until = max(self._busy_until, self._cpu.now) + seconds
        if not self._is_busy:
            self._is_busy = True
            self._cpu.adjust_busy(1)
            self._cpu.call_at(self._busy_until, self._stop_if_done)

    def _stop_if_done(self) -> None:
        """Unless more has come."""
        if self._cpu.has_passed(self._busy_until):
            self._is_busy = False
            self._cpu.adjust_busy(-1)
        else:
            self._cpu.call_at(self._busy_until, self._stop_if_done)


def _resolve_future(waiting: "asyncio.Future[None]") -> None:
    if not waiting.done():
        waiting.set_result(None)

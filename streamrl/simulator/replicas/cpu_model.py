"""Time in which work is done: that of the clock, or slower where processes share a few cores."""

import asyncio
import heapq
import itertools
from collections.abc import Callable
from functools import partial

from streamrl.placement.stage_timings import speed_on

_ROUNDING_S, _ROUNDING = 1e-9, 1e-15
"""What is this close is now, s and relatively."""


class Timer:
    """Something that is to happen at a time of a machine."""

    __slots__ = ("happen",)

    def __init__(self, happen: Callable[[], object]) -> None:
        self.happen: Callable[[], object] | None = happen

    def cancel(self) -> None:
        """It will not."""
        self.happen = None


class Machine:
    """So many cores that all processes share; 0: one for each, and nobody is in another's way.

    Where processes slow one another down, as in `speed_on`, all time goes slower.
    """

    def __init__(self, cores: float = 0, *, crowding: float = 0.0) -> None:
        self._clock = asyncio.get_running_loop()
        self._cores, self._crowding = cores, crowding
        self._busy = 0
        self._speed = 1.0
        self._since = self._worked = self._clock.time()
        self._timers: list[tuple[float, int, Timer]] = []
        self._ids = itertools.count()
        self._next: asyncio.TimerHandle | None = None

    @property
    def now(self) -> float:
        """Seconds that a process which was busy throughout has worked."""
        return self._worked + (self._clock.time() - self._since) * self._speed

    def has_come(self, when: float) -> bool:
        """Whether it is this time, but for rounding."""
        return when <= self.now * (1 + _ROUNDING) + _ROUNDING_S

    def call_at(self, when: float, happen: Callable[[], object]) -> Timer:
        """Let something happen once `now` is `when`."""
        timer = Timer(happen)
        heapq.heappush(self._timers, (when, next(self._ids), timer))
        if self._timers[0][2] is timer:
            self._set()
        return timer

    def later(self, seconds: float, happen: Callable[[], object]) -> None:
        """Let something happen after so many seconds of work."""
        if self._cores:
            self.call_at(self.now + seconds, happen)
        else:
            self._clock.call_later(seconds, happen)

    def occupy(self, processes: int) -> None:
        """So many processes more are busy, or less if negative."""
        self._busy += processes
        cores = self._cores
        speed = speed_on(cores, self._busy, crowding=self._crowding) if cores else 1.0
        if speed != self._speed:
            self._worked, self._since = self.now, self._clock.time()
            self._speed = speed
            self._set()

    async def until(self, when: float) -> None:
        """Wait until `now` is `when`."""
        if when > self.now:
            waiting = self._clock.create_future()
            timer = self.call_at(when, partial(_wake, waiting))
            try:
                await waiting
            finally:
                timer.cancel()

    async def work(self, seconds: float, *, processes: int = 1) -> None:
        """So many processes are busy with something that takes each of them so long."""
        self.occupy(processes)
        try:
            await self.until(self.now + seconds)
        finally:
            self.occupy(-processes)

    def _set(self) -> None:
        """Ring at the first timer, at the speed of now."""
        if self._next is not None:
            self._next.cancel()
            self._next = None
        timers = self._timers
        while timers and timers[0][2].happen is None:
            heapq.heappop(timers)
        if timers:
            wait_s = (timers[0][0] - self._worked) / self._speed
            self._next = self._clock.call_at(self._since + wait_s, self._ring)

    def _ring(self) -> None:
        self._next, timers = None, self._timers
        while timers and self.has_come(timers[0][0]):
            happen = heapq.heappop(timers)[2].happen
            if happen is not None:
                happen()
        if self._next is None:
            self._set()


class Clerk:
    """A process that does what it is given one by one, and nobody waits for it."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._until = 0.0
        self._is_busy = False

    def work(self, seconds: float) -> None:
        """There is so much more to do."""
        if not seconds:
            return
        self._until = max(self._until, self._machine.now) + seconds
        if not self._is_busy:
            self._is_busy = True
            self._machine.occupy(1)
            self._machine.call_at(self._until, self._rest)

    def _rest(self) -> None:
        """Unless more has come."""
        if self._machine.has_come(self._until):
            self._is_busy = False
            self._machine.occupy(-1)
        else:
            self._machine.call_at(self._until, self._rest)


def _wake(waiting: "asyncio.Future[None]") -> None:
    if not waiting.done():
        waiting.set_result(None)

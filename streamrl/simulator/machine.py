"""Time in which work is done: that of the clock, or slower where processes share a few cores."""

import asyncio
import heapq
import itertools
from collections.abc import Callable
from functools import partial


class Timer:
    """Something that is to happen at a time of a machine."""

    def __init__(self, happen: Callable[[], object]) -> None:
        self._happen: Callable[[], object] | None = happen
        self.handle: asyncio.TimerHandle | None = None

    def cancel(self) -> None:
        """It will not."""
        self._happen = None
        if self.handle is not None:
            self.handle.cancel()

    def ring(self) -> None:
        """It happens."""
        if self._happen is not None:
            self._happen()


class Machine:
    """Every process has devices, or a core, of its own: work takes its seconds."""

    def __init__(self) -> None:
        self._clock = asyncio.get_running_loop()

    @property
    def now(self) -> float:
        """Seconds that a process which was busy throughout has worked."""
        return self._clock.time()

    def call_at(self, when: float, happen: Callable[[], object]) -> Timer:
        """Let something happen once `now` is `when`."""
        timer = Timer(happen)
        timer.handle = self._clock.call_at(when, timer.ring)
        return timer

    def occupy(self, processes: int) -> None:
        """So many processes more are busy, or less if negative."""

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


class SharedCores(Machine):
    """So many cores that all processes share: each is as fast as all others.

    Where more are busy than there are cores, each has its part of a core; `now` goes slower by as
    much.
    """

    def __init__(self, cores: int) -> None:
        super().__init__()
        self._cores = cores
        self._busy = 0
        self._since = self._clock.time()
        self._worked = self._since
        self._timers: list[tuple[float, int, Timer]] = []
        self._ids = itertools.count()
        self._next: asyncio.TimerHandle | None = None

    @property
    def _speed(self) -> float:
        return min(1.0, self._cores / self._busy) if self._busy else 1.0

    @property
    def now(self) -> float:
        """As of any machine."""
        return self._worked + (self._clock.time() - self._since) * self._speed

    def call_at(self, when: float, happen: Callable[[], object]) -> Timer:
        """As of any machine."""
        timer = Timer(happen)
        heapq.heappush(self._timers, (when, next(self._ids), timer))
        self._set()
        return timer

    def occupy(self, processes: int) -> None:
        """As of any machine; all others become slower, or faster."""
        self._worked, self._since = self.now, self._clock.time()
        self._busy += processes
        self._set()

    def _set(self) -> None:
        """Ring at the first timer, at the speed of now."""
        if self._next is not None:
            self._next.cancel()
        if self._timers:
            wait_s = max(0.0, self._timers[0][0] - self.now) / self._speed
            self._next = self._clock.call_later(wait_s, self._ring)

    def _ring(self) -> None:
        self._next = None
        # What was to be now, to rounding.
        now = self.now + 1e-9
        while self._timers and self._timers[0][0] <= now:
            heapq.heappop(self._timers)[2].ring()
        self._set()


def _wake(waiting: "asyncio.Future[None]") -> None:
    if not waiting.done():
        waiting.set_result(None)


def make_machine(cores: int) -> Machine:
    """With so many cores for all; 0 for one of each process's own."""
    return SharedCores(cores) if cores else Machine()

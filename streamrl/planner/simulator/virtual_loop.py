"""asyncio event loop on a virtual clock: timers fire in order and without waiting."""

import asyncio
import math
import selectors
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, TypeVar

T = TypeVar("T")
MIN_CLOCK_RESOLUTION_S = 1e-9


class _InstantSelector(selectors.SelectSelector):
    """Selector that advances the loop's clock to the next timer instead of sleeping."""

    def __init__(self, *, polls: bool) -> None:
        super().__init__()
        self.now = 0.0
        self._polls = polls

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0) if self._polls else []
        if not ready:
            if timeout is None:
                raise RuntimeError("deadlock: no timer is pending and no I/O is ready")
            self.now += max(timeout, 0.0)
        return ready


class VirtualEventLoop(asyncio.SelectorEventLoop):
    """Event loop whose `time()` starts at 0 and jumps from timer to timer.

    A timer at infinity is never scheduled; waiting for it alone raises RuntimeError (deadlock).

    polls: whether to poll for events from outside the loop: other threads, files, signals.
    """

    def __init__(self, *, polls: bool = True) -> None:
        self._instant_selector = _InstantSelector(polls=polls)
        super().__init__(self._instant_selector)

    @property
    def _clock_resolution(self) -> float:
        """Seconds within which timers count as due together.

        After about half a year (1e7 s), one nanosecond is below the rounding error.
        """
        return max(MIN_CLOCK_RESOLUTION_S, math.ulp(self._instant_selector.now))

    @_clock_resolution.setter
    def _clock_resolution(self, seconds: float) -> None:
        """Ignore the resolution of the system's clock, which BaseEventLoop sets."""

    def time(self) -> float:
        return self._instant_selector.now

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        if when == math.inf:
            return asyncio.TimerHandle(when, callback, args, self, context)
        return super().call_at(when, callback, *args, context=context)


def run_virtual(main: Coroutine[Any, Any, T], *, polls: bool = True) -> T:
    with asyncio.Runner(loop_factory=lambda: VirtualEventLoop(polls=polls)) as runner:
        return runner.run(main)

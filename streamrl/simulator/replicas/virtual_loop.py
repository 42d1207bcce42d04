"""An asyncio event loop whose time is a number: nothing waits, schedules run in microseconds."""

import asyncio
import math
import selectors
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, TypeVar

T = TypeVar("T")
MIN_CLOCK_RESOLUTION_S = 1e-9


class _InstantSelector(selectors.SelectSelector):
    """Instead of sleeping until the next timer, moves the loop's clock there."""

    def __init__(self, *, polls: bool) -> None:
        super().__init__()
        self.now = 0.0
        self._polls = polls

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0) if self._polls else []
        if not ready:
            if timeout is None:
                raise RuntimeError("deadlock: nothing is scheduled and nobody can wake the loop")
            self.now += max(timeout, 0.0)
        return ready


class VirtualEventLoop(asyncio.SelectorEventLoop):
    """`loop.time()` starts at 0 and jumps from timer to timer.

    A timer that is never due is not kept: where nothing else goes on, to wait for it is a deadlock.
    polls: whether to look for what comes from outside the loop: other threads, files, signals.
    """

    def __init__(self, *, polls: bool = True) -> None:
        self._instant_selector = _InstantSelector(polls=polls)
        super().__init__(self._instant_selector)

    @property
    def _clock_resolution(self) -> float:
        """What is this close is due, s: after half a year a nanosecond is less than rounding."""
        return max(MIN_CLOCK_RESOLUTION_S, math.ulp(self._instant_selector.now))

    @_clock_resolution.setter
    def _clock_resolution(self, seconds: float) -> None:
        """That of a clock which goes on by itself is of no matter here."""

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._instant_selector.now

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """As any loop's."""
        if when == math.inf:
            return asyncio.TimerHandle(when, callback, args, self, context)
        return super().call_at(when, callback, *args, context=context)


def run_virtual(main: Coroutine[Any, Any, T], *, polls: bool = True) -> T:
    """Run a coroutine to its end on a virtual clock."""
    with asyncio.Runner(loop_factory=lambda: VirtualEventLoop(polls=polls)) as runner:
        return runner.run(main)

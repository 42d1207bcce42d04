"""An asyncio event loop whose time is a number: nothing waits, schedules run in microseconds."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _InstantSelector(selectors.SelectSelector):
    """Instead of sleeping until the next timer, moves the loop's clock there."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise RuntimeError("deadlock: nothing is scheduled and nobody can wake the loop")
            self.now += max(timeout, 0.0)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """`loop.time()` starts at 0 and jumps from timer to timer."""

    def __init__(self) -> None:
        self._instant = _InstantSelector()
        super().__init__(self._instant)

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._instant.now


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end on a virtual clock."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)

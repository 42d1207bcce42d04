"""Tests in virtual time: timers fire in order and without waiting; a clock set by hand."""

import functools
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec

from streamrl.planner.simulator.virtual_loop import run_virtual

P = ParamSpec("P")


def in_virtual_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run an async test on a virtual clock."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        run_virtual(test(*args, **kwargs))

    return run


class ManualClock:
    """Clock that advances by assignment."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

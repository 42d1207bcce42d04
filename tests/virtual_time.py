"""Tests in virtual time: timers fire in order and without waiting."""

import functools
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec

from streamrl.simulator.replicas.virtual_loop import run_virtual

P = ParamSpec("P")


def in_virtual_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run an async test on a virtual clock."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        run_virtual(test(*args, **kwargs))

    return run

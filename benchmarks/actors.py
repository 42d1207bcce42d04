"""Ray actors of a benchmark: start an actor, wait for the calls of many."""

import time
from collections.abc import Sequence
from typing import Any

import ray

from benchmarks.command import BenchmarkError
from streamrl.actors.transport.ray_calls import fetch_reply


def start_actor(actor_class: type, *arguments: Any, **options: Any) -> Any:
    """Start an actor that reserves no CPU, unless its options do."""
    return ray.remote(**{"num_cpus": 0, **options})(actor_class).remote(*arguments)


def wait_for_all(
    calls: Sequence[Any], description: str, *, timeout_s: float, beside: Sequence[Any] = ()
) -> list[Any]:
    """Return the results of all calls, in order.

    Raises the first error at once, including errors of `beside`: endless calls on which the others
    depend. Raises StreamError with `description` on a timeout.
    """
    deadline = time.monotonic() + timeout_s
    pending, open_calls = [*calls, *beside], set(calls)
    while open_calls:
        left_s = max(0.0, deadline - time.monotonic())
        ready, pending = ray.wait(pending, timeout=left_s)
        if not ready:
            raise BenchmarkError(f"{description}: not done after {timeout_s:g} s")
        fetch_reply(ready, description)
        open_calls.difference_update(ready)
    return list(fetch_reply(list(calls), description))

"""Ray actors of a benchmark: start one, and wait for calls of many."""

import time
from collections.abc import Sequence
from typing import Any

import ray

from benchmarks.command import BenchmarkError
from streamrl.actors.transport.ray_calls import fetch_reply


def start_actor(actor_class: type, *arguments: Any, **options: Any) -> Any:
    """Start an actor that asks for no CPU, unless its options say so."""
    return ray.remote(**{"num_cpus": 0, **options})(actor_class).remote(*arguments)


def wait_for_all(
    calls: Sequence[Any], what: str, *, timeout_s: float, beside: Sequence[Any] = ()
) -> list[Any]:
    """Return the results of all calls, in order, once all are there.

    The first that fails ends the wait at once, also one of those `beside`: work without end that
    the calls depend on. Raises StreamError naming `what`.
    """
    deadline = time.monotonic() + timeout_s
    pending, open_calls = [*calls, *beside], set(calls)
    while open_calls:
        left_s = max(0.0, deadline - time.monotonic())
        ready, pending = ray.wait(pending, timeout=left_s)
        if not ready:
            raise BenchmarkError(f"{what}: not done after {timeout_s:g} s")
        fetch_reply(ready, what)
        open_calls.difference_update(ready)
    return list(fetch_reply(list(calls), what))

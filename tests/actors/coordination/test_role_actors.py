"""Actors of a role: what generators report when a run stalls."""

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

from streamrl.actors.coordination.role_actors import RoleActors, describe_waits
from streamrl.dataflow import GENERATE_CALL
from tests.virtual_time import in_virtual_time


def make_actor(answer: Callable[[], Awaitable[str]]) -> Any:
    return SimpleNamespace(
        describe_waits=SimpleNamespace(remote=lambda: asyncio.ensure_future(answer()))
    )


@in_virtual_time
async def test_waits_are_those_of_generators_that_answer():
    async def wait() -> str:
        return "1 of 2 open episodes wait"

    async def stay_silent() -> str:
        return ""

    async def hang() -> str:
        await asyncio.sleep(1e6)
        raise AssertionError("the call has a deadline")

    actors = [make_actor(answer) for answer in (wait, stay_silent, hang)]
    names = [f"generator-{i}" for i in range(3)]
    generators = RoleActors([GENERATE_CALL], names, actors)
    assert await describe_waits(generators) == "generator-0: 1 of 2 open episodes wait"
    assert asyncio.get_running_loop().time() < 10.0

import asyncio

import pytest

from streamrl.errors import DeadlineError, WeightsError
from streamrl.weights import HeldVersion


async def test_who_waits_for_a_version_goes_on_when_it_is_held() -> None:
    held = HeldVersion("generator 2")
    waiting = [asyncio.create_task(held.at_least(v, timeout_s=5)) for v in (0, 1, 3)]
    await asyncio.sleep(0)
    held.advance(0)
    await asyncio.sleep(0.01)
    assert [task.done() for task in waiting] == [True, False, False]
    held.advance(2)
    await asyncio.sleep(0.01)
    assert [task.done() for task in waiting] == [True, True, False]
    held.advance(3)
    assert await asyncio.gather(*waiting) == [0, 2, 3]


async def test_a_version_that_is_held_is_not_waited_for() -> None:
    held = HeldVersion("generator 2", version=7)
    assert await held.at_least(5, timeout_s=0.001) == 7
    assert held.version == 7


async def test_a_wait_past_its_deadline_names_what_it_waited_for() -> None:
    held = HeldVersion("generator 2", version=4)
    message = "waited 0.01 s for version 6 of the weights: generator 2 holds version 4"
    with pytest.raises(DeadlineError, match=message):
        await held.at_least(6, timeout_s=0.01)


async def test_every_newer_version_gives_the_wait_its_time_anew() -> None:
    held = HeldVersion("generator 2")
    waiting = asyncio.create_task(held.at_least(10, timeout_s=0.2))
    for version in range(11):
        held.advance(version)
        await asyncio.sleep(0.03)
    assert await waiting == 10


@pytest.mark.parametrize("version", [3, 2, -1])
async def test_a_version_never_goes_backwards(version: int) -> None:
    held = HeldVersion("generator 2", version=3)
    with pytest.raises(WeightsError, match=f"generator 2 holds version 3: .* version {version}"):
        held.advance(version)
    assert held.version == 3

import asyncio

import pytest

from streamrl.errors import DeadlineError, WeightsError
from streamrl.weights import HeldVersion
from tests.virtual_clock import run_virtual


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


def test_every_newer_version_gives_the_wait_its_time_anew() -> None:
    async def main() -> int:
        held = HeldVersion("generator 2")
        waiting = asyncio.create_task(held.at_least(10, timeout_s=5.0))
        for version in range(11):
            await asyncio.sleep(4.0)
            held.advance(version)
        return await waiting

    assert run_virtual(main()) == 10


def test_versions_that_stop_coming_end_the_wait() -> None:
    async def main() -> float:
        held = HeldVersion("generator 2")
        waiting = asyncio.create_task(held.at_least(1000, timeout_s=5.0))
        for version in range(3):
            await asyncio.sleep(4.0)
            held.advance(version)
        with pytest.raises(
            DeadlineError, match=r"waited 5 s .* 1000 .*generator 2 holds version 2"
        ):
            await waiting
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == 17.0


@pytest.mark.parametrize("version", [3, 2, -1])
async def test_a_version_never_goes_backwards(version: int) -> None:
    held = HeldVersion("generator 2", version=3)
    with pytest.raises(WeightsError, match=f"generator 2 holds version 3: .* version {version}"):
        held.advance(version)
    assert held.version == 3

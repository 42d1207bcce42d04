import asyncio

import pytest

from streamrl.errors import WeightsError
from streamrl.weights import ServedVersion


async def test_who_waits_for_a_version_goes_on_when_it_is_held() -> None:
    held = ServedVersion("generator 2")
    waiting = [asyncio.create_task(held.wait_for_version(v)) for v in (0, 1, 3)]
    await asyncio.sleep(0)
    held.advance_to(0)
    await asyncio.sleep(0.01)
    assert [task.done() for task in waiting] == [True, False, False]
    held.advance_to(2)
    await asyncio.sleep(0.01)
    assert [task.done() for task in waiting] == [True, True, False]
    held.advance_to(3)
    assert await asyncio.gather(*waiting) == [0, 2, 3]


async def test_a_version_that_is_held_is_not_waited_for() -> None:
    held = ServedVersion("generator 2", version=7)
    assert await held.wait_for_version(5) == 7
    assert held.version == 7


async def test_of_a_model_that_stands_still_the_version_it_moved_at_last_will_do() -> None:
    held = ServedVersion(
        "reference-0", version=3, resolve_due_version=lambda version: version - version % 4
    )
    assert await held.wait_for_version(3) == 3
    waiting = asyncio.create_task(held.wait_for_version(6))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    held.advance_to(4)
    assert await waiting == 4


@pytest.mark.parametrize("version", [3, 2, -1])
async def test_a_version_never_goes_backwards(version: int) -> None:
    held = ServedVersion("generator 2", version=3)
    with pytest.raises(WeightsError, match=f"generator 2 holds version 3: .* version {version}"):
        held.advance_to(version)
    assert held.version == 3

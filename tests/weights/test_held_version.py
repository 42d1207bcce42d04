import asyncio

import pytest

from streamrl.errors import WeightsError
from streamrl.weights import ServedVersion


async def test_waiters_resume_when_their_version_is_served() -> None:
    served = ServedVersion("generator 2")
    waiting = [asyncio.create_task(served.wait_for_version(v)) for v in (0, 1, 3)]
    await asyncio.sleep(0)
    served.advance_to(0)
    await asyncio.sleep(0.01)
    assert [task.done() for task in waiting] == [True, False, False]
    served.advance_to(2)
    await asyncio.sleep(0.01)
    assert [task.done() for task in waiting] == [True, True, False]
    served.advance_to(3)
    assert await asyncio.gather(*waiting) == [0, 2, 3]


async def test_a_served_version_needs_no_wait() -> None:
    served = ServedVersion("generator 2", version=7)
    assert await served.wait_for_version(5) == 7
    assert served.version == 7


async def test_a_model_that_skips_versions_waits_only_for_the_due_version() -> None:
    served = ServedVersion(
        "reference-0", version=3, resolve_due_version=lambda version: version - version % 4
    )
    assert await served.wait_for_version(3) == 3
    waiting = asyncio.create_task(served.wait_for_version(6))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    served.advance_to(4)
    assert await waiting == 4


@pytest.mark.parametrize("version", [3, 2, -1])
async def test_a_version_never_goes_backwards(version: int) -> None:
    served = ServedVersion("generator 2", version=3)
    with pytest.raises(WeightsError, match=f"generator 2 holds version 3: .* version {version}"):
        served.advance_to(version)
    assert served.version == 3

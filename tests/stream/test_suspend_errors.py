"""Failed suspends and resumes of a device lease holder block no other holder."""

import asyncio

import pytest

from streamrl.errors import GenerationError
from streamrl.stream.device_lease import DeviceArbiter, SharedDeviceLease
from tests.virtual_time import in_virtual_time


class FailingSuspendable:
    """Work that fails to suspend or resume, like an engine whose step hangs."""

    def __init__(self, fails: str) -> None:
        self._fails = fails

    async def suspend(self) -> None:
        await asyncio.sleep(0.1)
        self._fail("suspend")

    async def resume(self) -> None:
        await asyncio.sleep(0.1)
        self._fail("resume")

    def _fail(self, operation: str) -> None:
        if self._fails == operation:
            raise GenerationError(f"{operation} failed")


@pytest.mark.parametrize("fails", ["suspend", "resume"])
@in_virtual_time
async def test_failed_suspend_raises_and_releases_the_pool(fails: str):
    arbiter = DeviceArbiter(timeout_s=20.0, slice_s=0.0)
    generator = SharedDeviceLease(arbiter, "generator-0", suspendable=FailingSuspendable(fails))

    async def sample() -> None:
        async with generator.hold("generate"):
            await asyncio.sleep(5.0)

    async def train() -> None:
        async with SharedDeviceLease(arbiter, "trainer").hold("train"):
            await asyncio.sleep(1.0)

    sampling = asyncio.create_task(sample())
    await asyncio.sleep(1.0)
    await train()
    with pytest.raises(GenerationError, match=f"{fails} failed"):
        await sampling
    await train()

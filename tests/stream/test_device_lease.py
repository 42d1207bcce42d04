"""Device lease: one holder at a time, in turn, with a deadline."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from streamrl.errors import DeadlineError
from streamrl.stream.device_lease import DeviceArbiter, SharedDeviceLease
from tests.virtual_time import in_virtual_time


@in_virtual_time
async def test_pool_is_held_until_the_last_work_ends():
    arbiter = DeviceArbiter(timeout_s=100.0)
    generator_lease = SharedDeviceLease(arbiter, "generator-0")

    async def work(seconds: float) -> None:
        async with generator_lease.hold("generate"):
            await asyncio.sleep(seconds)

    running = asyncio.gather(work(1.0), work(7.0))
    await asyncio.sleep(0.5)
    async with SharedDeviceLease(arbiter, "trainer").hold("train"):
        acquired_at = asyncio.get_running_loop().time()
    await running
    assert acquired_at == pytest.approx(7.0)


@in_virtual_time
async def test_failed_work_releases_the_pool():
    arbiter = DeviceArbiter(timeout_s=3.0)
    with pytest.raises(RuntimeError, match="boom"):
        async with SharedDeviceLease(arbiter, "a").hold("stage"):
            raise RuntimeError("boom")
    async with SharedDeviceLease(arbiter, "b").hold("stage"):
        pass


@in_virtual_time
async def test_lease_deadline_restarts_with_progress():
    arbiter = DeviceArbiter(timeout_s=3.0)
    trainer = SharedDeviceLease(arbiter, "trainer")

    async def train() -> None:
        async with trainer.hold("train"):
            for _ in range(5):
                await asyncio.sleep(2.0)
                trainer.report_progress()
            await asyncio.sleep(100.0)

    training = asyncio.create_task(train())
    await asyncio.sleep(0.1)
    with pytest.raises(DeadlineError, match=r"reward-0 waited 13 s .* trainer has held it for"):
        await arbiter.acquire("reward-0")
    training.cancel()


@pytest.mark.parametrize("order", [1, -1])
@in_virtual_time
async def test_grant_at_the_deadline_is_never_lost(order: int):
    arbiter = DeviceArbiter(timeout_s=3.0)
    await arbiter.acquire("trainer")

    async def train() -> None:
        await asyncio.sleep(3.0)
        await arbiter.release("trainer")

    async def score() -> None:
        await arbiter.acquire("reward-0")
        await arbiter.release("reward-0")

    coroutines = [train(), score()][::order]
    await asyncio.gather(*coroutines, return_exceptions=True)
    await arbiter.acquire("generator-0")


@in_virtual_time
async def test_dead_waiter_gets_no_grant():
    arbiter, log = DeviceArbiter(timeout_s=100.0), list[str]()
    await arbiter.acquire("trainer")

    async def wait(holder: str) -> None:
        await arbiter.acquire(holder)
        log.append(holder)

    dead = asyncio.create_task(arbiter.acquire("generator-0"))
    await asyncio.sleep(1.0)
    arbiter.remove_holder("generator-0")
    waiters = [asyncio.create_task(wait(name)) for name in ("reward-0", "generator-0")]
    await asyncio.sleep(1.0)
    await arbiter.release("trainer")
    await dead
    await waiters[0]
    await arbiter.release("reward-0")
    await waiters[1]
    assert log == ["reward-0", "generator-0"]


@in_virtual_time
async def test_pool_of_a_dead_holder_goes_to_the_next_waiter():
    arbiter = DeviceArbiter(timeout_s=100.0)
    await arbiter.acquire("generator-0")
    waiting = asyncio.create_task(arbiter.acquire("trainer"))
    await asyncio.sleep(7.0)
    arbiter.remove_holder("reward-0")
    await asyncio.sleep(1.0)
    assert not waiting.done(), "the dead process was no holder"
    arbiter.remove_holder("generator-0")
    await waiting
    assert asyncio.get_running_loop().time() == pytest.approx(8.0)


class RemoteArbiter:
    """Arbiter as if in another process: cancelling a wait does not cancel the request."""

    def __init__(self, arbiter: DeviceArbiter) -> None:
        self._arbiter = arbiter
        self._calls: set[asyncio.Task[None]] = set()

    async def acquire(self, holder: str, phase: str) -> None:
        await self._call(self._arbiter.acquire(holder, phase))

    async def release(self, holder: str) -> None:
        await self._call(self._arbiter.release(holder))

    async def wait_for_preemption(self, holder: str) -> bool:
        return await self._arbiter.wait_for_preemption(holder)

    def report_progress(self, holder: str) -> None:
        self._arbiter.report_progress(holder)

    async def _call(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._calls.add(task)
        await asyncio.shield(task)


@in_virtual_time
async def test_work_cancelled_while_waiting_releases_a_late_grant():
    arbiter, log = DeviceArbiter(timeout_s=100.0), list[str]()
    generator_lease = SharedDeviceLease(RemoteArbiter(arbiter), "generator-0")

    async def work(name: str) -> None:
        async with generator_lease.hold("generate"):
            log.append(name)

    await arbiter.acquire("trainer")
    cancelled_work = asyncio.create_task(work("lost"))
    await asyncio.sleep(1.0)
    cancelled_work.cancel()
    await asyncio.sleep(1.0)
    later_work = asyncio.create_task(work("kept"))
    await asyncio.sleep(1.0)
    await arbiter.release("trainer")
    await later_work
    await arbiter.acquire("trainer")
    assert log == ["kept"]

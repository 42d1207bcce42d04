"""Device lease: holders take turns with a deadline; phases share it and preempt each other."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.errors import DeadlineError, GenerationError
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


@in_virtual_time
async def test_requests_behind_a_cancelled_one_are_granted():
    arbiter = DeviceArbiter(timeout_s=100.0)
    await arbiter.acquire("generator-0", "generate")
    trainer = asyncio.create_task(arbiter.acquire("trainer"))
    await asyncio.sleep(1.0)
    joining = asyncio.create_task(arbiter.acquire("generator-1", "generate"))
    await asyncio.sleep(1.0)
    assert not joining.done(), "it must not overtake the trainer"
    trainer.cancel()
    await joining
    assert asyncio.get_running_loop().time() == pytest.approx(2.0)


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


class Decoding:
    """Suspendable rollouts; `computing` counts the running ones. `fails` names what fails."""

    def __init__(self, *, fails: str = "") -> None:
        self._fails = fails
        self._is_resumed = asyncio.Event()
        self._is_resumed.set()
        self.computing = 0

    async def suspend(self) -> None:
        self._is_resumed.clear()
        if self._fails == "suspend":
            raise GenerationError("suspend failed")

    async def resume(self) -> None:
        if self._fails == "resume":
            raise GenerationError("resume failed")
        self._is_resumed.set()

    async def work(self, seconds: float) -> None:
        for _ in range(round(seconds * 10)):
            await self._is_resumed.wait()
            self.computing += 1
            await asyncio.sleep(0.1)
            self.computing -= 1


@in_virtual_time
async def test_holders_of_a_phase_share_the_pool():
    arbiter = DeviceArbiter(timeout_s=100.0, slice_s=60.0)

    async def work(holder: str, phase: str, after_s: float) -> None:
        await asyncio.sleep(after_s)
        async with SharedDeviceLease(arbiter, holder, phase).hold(phase):
            await asyncio.sleep(5.0)

    await asyncio.gather(
        work("generator-0", "generate", 0.0),
        work("trainer", "train", 1.0),
        # Joins the phase although the trainer waits: the slice is not over.
        work("generator-1", "generate", 2.0),
    )
    assert asyncio.get_running_loop().time() == pytest.approx(2.0 + 5.0 + 5.0)


@pytest.mark.parametrize("train_s", [3.0, 35.0])
@in_virtual_time
async def test_rollouts_are_preempted_after_their_slice_and_resume_however_late(train_s: float):
    arbiter, decoding = DeviceArbiter(timeout_s=10.0, slice_s=2.0), Decoding()
    generator_lease = SharedDeviceLease(arbiter, "generator-0", "generate", suspendable=decoding)
    clock = asyncio.get_running_loop().time

    async def generate() -> None:
        async with generator_lease.hold("generate"):
            await decoding.work(6.0)

    running = asyncio.create_task(generate())
    await asyncio.sleep(0.5)
    async with SharedDeviceLease(arbiter, "trainer").hold("train"):
        assert clock() == pytest.approx(2.0)
        await asyncio.sleep(0.2)
        assert not decoding.computing
        await asyncio.sleep(train_s - 0.2)
    await running
    assert clock() == pytest.approx(6.0 + train_s, abs=0.2)
    await arbiter.acquire("trainer")


async def _hold_for(lease: SharedDeviceLease, seconds: float) -> None:
    async with lease.hold("stage"):
        await asyncio.sleep(seconds)


@pytest.mark.parametrize("fails", ["suspend", "resume"])
@in_virtual_time
async def test_failed_suspend_or_resume_raises_and_releases_the_pool(fails: str):
    arbiter = DeviceArbiter(timeout_s=20.0, slice_s=0.0)
    generator = SharedDeviceLease(arbiter, "generator-0", suspendable=Decoding(fails=fails))
    sampling = asyncio.create_task(_hold_for(generator, 5.0))
    await asyncio.sleep(1.0)
    trainer = SharedDeviceLease(arbiter, "trainer")
    await _hold_for(trainer, 1.0)
    with pytest.raises(GenerationError, match=f"{fails} failed"):
        await sampling
    await _hold_for(trainer, 1.0)


PIECES = st.lists(
    st.tuples(st.sampled_from(["generator-0", "generator-1"]), st.floats(0, 20), st.floats(0.1, 9)),
    min_size=1,
    max_size=12,
)


@given(PIECES, PIECES, st.floats(0.1, 5.0))
@in_virtual_time
async def test_conflicting_phases_never_overlap_and_none_starves(
    rollouts: list[tuple[str, float, float]], steps: list[tuple[str, float, float]], slice_s: float
):
    arbiter = DeviceArbiter(timeout_s=1000.0, slice_s=slice_s)
    decoding = {name: Decoding() for name in ("generator-0", "generator-1")}
    leases = {
        name: SharedDeviceLease(arbiter, name, "generate", suspendable=decoding[name])
        for name in decoding
    }
    trainer = SharedDeviceLease(arbiter, "trainer", "train")
    clock = asyncio.get_running_loop().time

    async def generate(name: str, at: float, seconds: float) -> None:
        await asyncio.sleep(at)
        async with leases[name].hold("generate"):
            await decoding[name].work(seconds)

    async def train(at: float, seconds: float) -> None:
        await asyncio.sleep(at)
        waiting = clock()
        async with trainer.hold("train"):
            # Rollouts suspend at the next token boundary.
            await asyncio.sleep(0.11)
            assert not any(rollout.computing for rollout in decoding.values())
            waited = clock() - waiting
            assert waited <= slice_s + 1.0 + sum(seconds for _, _, seconds in steps)
            await asyncio.sleep(seconds)
            assert not any(rollout.computing for rollout in decoding.values())

    async with asyncio.TaskGroup() as tasks:
        for name, at, seconds in rollouts:
            tasks.create_task(generate(name, at, seconds))
        for _, at, seconds in steps:
            tasks.create_task(train(at, seconds))
    # All holders have released their leases.
    await arbiter.acquire("last")


PHASE_SLOTS = {"reference": {0}, "reward": {1}, "train": {0, 1}, "evaluate": {2}}


@in_virtual_time
async def test_phase_on_many_devices_is_not_starved_by_single_device_phases():
    arbiter, clock = (
        DeviceArbiter(timeout_s=100.0, slots=PHASE_SLOTS),
        asyncio.get_running_loop().time,
    )

    async def score(phase: str, after_s: float) -> None:
        await asyncio.sleep(after_s)
        while clock() < 50.0:
            async with SharedDeviceLease(arbiter, f"{phase}-0", phase).hold(phase):
                await asyncio.sleep(4.0)

    scoring = [asyncio.create_task(score("reference", 0.0))]
    scoring += [asyncio.create_task(score("reward", 2.0))]
    await asyncio.sleep(3.0)
    async with SharedDeviceLease(arbiter, "trainer", "train").hold("train"):
        acquired_at = clock()
    await asyncio.gather(*scoring)
    assert acquired_at == pytest.approx(6.0)


@in_virtual_time
async def test_deadline_names_only_conflicting_holders():
    arbiter = DeviceArbiter(timeout_s=3.0, slots=PHASE_SLOTS)
    await arbiter.acquire("reference-0", "reference")
    await arbiter.acquire("reward-0", "reward")
    arbiter.remove_holder("reward-0")
    await arbiter.acquire("evaluate-0", "evaluate")
    with pytest.raises(DeadlineError, match=r"lease; reference-0 has held it for 3 s$"):
        await arbiter.acquire("trainer", "train")


@given(
    st.dictionaries(
        st.sampled_from("abcde"), st.sets(st.integers(0, 3), min_size=1), min_size=1, max_size=5
    ),
    st.lists(
        st.tuples(st.sampled_from("abcde"), st.integers(0, 1), st.floats(0, 20), st.floats(0.1, 9)),
        max_size=25,
    ),
    st.sampled_from([0.0, 1.0, float("inf")]),
)
@in_virtual_time
async def test_no_device_is_in_two_phases_and_every_phase_gets_a_turn(
    slots: dict[str, set[int]], pieces: list[tuple[str, int, float, float]], slice_s: float
):
    arbiter, sleep = DeviceArbiter(timeout_s=1e4, slice_s=slice_s, slots=slots), asyncio.sleep
    computing: list[str] = []

    async def work(phase: str, number: int, at: float, seconds: float) -> None:
        await sleep(at)
        async with leases[phase, number].hold(phase):
            for running_phase in computing:
                devices = slots.get(running_phase, {0, 1, 2, 3}) & slots.get(phase, {0, 1, 2, 3})
                assert running_phase == phase or not devices, (running_phase, phase)
            computing.append(phase)
            await sleep(seconds)
            computing.remove(phase)

    leases = {
        (phase, number): SharedDeviceLease(arbiter, f"{phase}-{number}", phase)
        for phase in "abcde"
        for number in (0, 1)
    }
    async with asyncio.TaskGroup() as tasks:
        for piece in pieces:
            tasks.create_task(work(*piece))
    await arbiter.acquire("last")


@in_virtual_time
async def test_holder_is_preempted_for_each_conflicting_request():
    """The preemption also follows if the previous request was cancelled."""
    arbiter, clock = DeviceArbiter(timeout_s=100.0, slice_s=2.0), asyncio.get_running_loop()
    await arbiter.acquire("a")
    waiting = asyncio.create_task(arbiter.wait_for_preemption("a", wait_s=50.0))
    rival = asyncio.create_task(arbiter.acquire("b"))
    await asyncio.sleep(1.0)
    rival.cancel()
    await asyncio.sleep(4.0)
    assert not waiting.done()
    rival = asyncio.create_task(arbiter.acquire("c"))
    preempted, at = await waiting, clock.time()
    await arbiter.release("a")
    await rival
    assert (preempted, at) == (True, 5.0)


@in_virtual_time
async def test_released_holder_is_not_preempted():
    arbiter, clock = DeviceArbiter(timeout_s=100.0), asyncio.get_running_loop()
    await arbiter.acquire("a")
    waiting = asyncio.create_task(arbiter.wait_for_preemption("a", wait_s=50.0))
    await asyncio.sleep(3.0)
    await arbiter.release("a")
    assert not await waiting
    assert clock.time() == 3.0

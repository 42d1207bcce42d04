"""CPU time of processes that share cores."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.planner.simulator.replicas.cpu_model import CpuModel, SerialProcess
from streamrl.planner.simulator.replicas.virtual_loop import run_virtual
from tests.virtual_time import in_virtual_time


async def run_works(cores: int, works: list[tuple[float, float]]) -> list[float]:
    """Return the end time of each work, given as (begin, duration) in seconds."""
    machine, clock = CpuModel(cores), asyncio.get_running_loop()
    end_times = [0.0] * len(works)

    async def run_one(index: int, at: float, seconds: float) -> None:
        await asyncio.sleep(at)
        await machine.run_work(seconds)
        end_times[index] = clock.time()

    await asyncio.gather(*(run_one(i, *work) for i, work in enumerate(works)))
    return [round(end, 6) for end in end_times]


@pytest.mark.parametrize(
    ("cores", "works", "ends"),
    [
        pytest.param(0, [(0, 1), (0, 3), (2, 2)], [1, 3, 4], id="a core per process"),
        pytest.param(2, [(0, 1), (0, 3), (2, 2)], [1, 3, 4], id="two at a time on two cores"),
        # Both run at half speed until 2; then the longer work runs at full speed for its last 2 s.
        pytest.param(1, [(0, 1), (0, 3)], [2, 4], id="two on one core"),
        # The first is alone until 1; both run until 3, when the second ends; 1 s is left.
        pytest.param(1, [(0, 3), (1, 1)], [4, 3], id="a later one"),
    ],
)
def test_processes_share_the_cores(cores: int, works: list[tuple[float, float]], ends: list[float]):
    assert run_virtual(run_works(cores, works)) == ends


@in_virtual_time
async def test_crowding_slows_two_processes_on_two_cores():
    machine = CpuModel(2, crowding=0.25)
    await machine.run_work(4.0, processes=2)
    assert asyncio.get_running_loop().time() == 5.0


@in_virtual_time
async def test_work_of_several_processes_ends_together():
    machine = CpuModel(2)
    await machine.run_work(3.0, processes=4)
    assert asyncio.get_running_loop().time() == 6.0


works = st.lists(st.tuples(st.floats(0, 5), st.floats(0.1, 5)), min_size=1, max_size=6)


@given(works, st.integers(1, 3))
def test_total_work_is_bounded_by_the_cores(works: list[tuple[float, float]], cores: int):
    end_times = run_virtual(run_works(cores, works))
    undisturbed = [at + seconds for at, seconds in works]
    assert all(end >= least - 1e-5 for end, least in zip(end_times, undisturbed, strict=True))
    assert max(end_times) >= sum(seconds for _, seconds in works) / cores - 1e-5
    assert max(end_times) <= max(at for at, _ in works) + sum(s for _, s in works) + 1e-5


@in_virtual_time
async def test_a_cancelled_timer_does_not_fire():
    machine, rung = CpuModel(), list[str]()
    machine.call_at(1.0, lambda: rung.append("first")).cancel()
    machine.call_at(2.0, lambda: rung.append("second"))
    await asyncio.sleep(3.0)
    assert rung == ["second"]


@in_virtual_time
async def test_a_serial_process_works_through_its_queue():
    machine, clock = CpuModel(2), asyncio.get_running_loop()
    clerk = SerialProcess(machine)
    for seconds in (1.0, 3.0, 0.0):
        clerk.add_work(seconds)
    # Three work processes and the serial process compete for two cores.
    await machine.run_work(3.0)
    beside = clock.time()
    await asyncio.gather(machine.run_work(1.5), machine.run_work(1.5))
    # At 3 s the serial process has 1 s left: three run at 2/3 speed for 1.5 s, then two for 0.5 s.
    assert (beside, clock.time()) == pytest.approx((3.0, 3.0 + 1.5 + 0.5))

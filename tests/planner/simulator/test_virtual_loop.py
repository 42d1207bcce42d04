"""Event loop on a virtual clock."""

import asyncio
import math

import pytest

from streamrl.planner.simulator.virtual_loop import run_virtual
from tests.virtual_time import in_virtual_time


@pytest.mark.parametrize("polls", [True, False])
def test_time_jumps_to_the_next_timer(polls: bool):
    async def main() -> float:
        await asyncio.sleep(1e6)
        return asyncio.get_running_loop().time()

    assert run_virtual(main(), polls=polls) == 1e6


@pytest.mark.parametrize("polls", [True, False])
def test_waiting_without_timers_is_a_deadlock(polls: bool):
    async def woken() -> None:
        event = asyncio.Event()
        asyncio.get_running_loop().call_later(5.0, event.set)
        await asyncio.wait_for(event.wait(), math.inf)

    async def forgotten() -> None:
        await asyncio.wait_for(asyncio.Event().wait(), math.inf)

    run_virtual(woken(), polls=polls)
    with pytest.raises(RuntimeError, match="deadlock"):
        run_virtual(forgotten(), polls=polls)


@in_virtual_time
async def test_time_advances_beyond_nanosecond_precision():
    for _ in range(100):
        await asyncio.sleep(1e9 / 3)
    assert asyncio.get_running_loop().time() == pytest.approx(1e11 / 3)

"""Reports from the coordinator to the driver."""

import asyncio

from streamrl.actors.coordination.driver_events import DriverEvents, DriverReport
from streamrl.telemetry.progress import WorkStatus
from tests.virtual_time import in_virtual_time


async def work(seconds: float) -> list[DriverReport]:
    """Return the reports on work that counts ten units in `seconds`."""
    events, status = DriverEvents(), WorkStatus("evaluating version 3", 10, "prompts")
    with events.report_status(status):
        for _ in range(10):
            await asyncio.sleep(seconds / 10)
            status.advance()
    return await events.read_after(0, 0.0)


@in_virtual_time
async def test_short_work_only_clears_the_status():
    assert await work(1.9) == [WorkStatus("")]


@in_virtual_time
async def test_long_work_is_reported_every_second_until_it_ends():
    *reports, last = await work(5.5)
    times = [(r.elapsed_s, r.completed) for r in reports if isinstance(r, WorkStatus)]
    assert times == [(2.0, 3), (3.0, 5), (4.0, 7), (5.0, 9)]
    assert last == WorkStatus("")

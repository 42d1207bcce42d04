import asyncio

from hypothesis import given
from hypothesis import strategies as st

from streamrl.environments.episodes.driver import DecodeSlots
from streamrl.planner.simulator.virtual_loop import run_virtual
from tests.virtual_time import in_virtual_time


@in_virtual_time
async def test_the_earliest_group_gets_a_free_slot_first():
    slots, order = DecodeSlots(1), []

    async def take(priority, name):
        async with slots.hold(priority):
            order.append(name)
            await asyncio.sleep(1)

    requests = [(1, "first"), (3, "late"), (2, "b"), (2, "c"), (1, "early")]
    await asyncio.gather(*(take(*request) for request in requests))
    assert order == ["first", "early", "b", "c", "late"]


@given(
    st.integers(1, 4),
    st.lists(
        st.tuples(st.integers(0, 3), st.floats(0, 3), st.floats(0, 5), st.booleans()), max_size=20
    ),
)
def test_never_more_than_count_slots_are_held_and_none_is_lost(count, turns):
    async def run():
        slots, held, most = DecodeSlots(count), 0, 0

        async def take(priority, starts_s, holds_s):
            nonlocal held, most
            await asyncio.sleep(starts_s)
            async with slots.hold(priority):
                held += 1
                most = max(most, held)
                try:
                    await asyncio.sleep(holds_s)
                finally:
                    held -= 1

        async def cancel_after(task, delay_s):
            await asyncio.sleep(delay_s)
            task.cancel()

        tasks = []
        for priority, starts_s, holds_s, is_cancelled in turns:
            task = asyncio.create_task(take(priority, starts_s, holds_s))
            tasks.append(task)
            if is_cancelled:
                tasks.append(asyncio.create_task(cancel_after(task, holds_s)))
        await asyncio.gather(*tasks, return_exceptions=True)
        assert most <= count
        async with asyncio.timeout(1), asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(take(0, 0, 0.5))

    run_virtual(run())

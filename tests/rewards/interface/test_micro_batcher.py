import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.rewards.kinds.model import MicroBatcher, plan_batches


@given(st.lists(st.integers(1, 30), max_size=40), st.integers(30, 100), st.integers(1, 5))
def test_every_row_is_in_exactly_one_batch_within_the_bounds(lengths, max_tokens, max_rows):
    batches = plan_batches(lengths, max_tokens, max_rows)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        assert 1 <= len(batch) <= max_rows
        assert len(batch) * max(lengths[index] for index in batch) <= max_tokens


class FakeCompute:
    """Returns each row's sum once released; records the batches."""

    def __init__(self):
        self.batches, self.released = [], asyncio.Event()

    async def __call__(self, rows):
        self.batches.append(sorted(map(tuple, rows)))
        await self.released.wait()
        if [13] in rows:
            raise ValueError("thirteen")
        return [float(sum(row)) for row in rows]


async def test_rows_that_arrive_during_a_batch_share_the_next():
    compute = FakeCompute()
    batcher = MicroBatcher(compute, max_tokens=10, max_rows=99)
    calls = []
    for rows in ([[1], [2]], [[3]], [[4, 4]]):
        calls.append(asyncio.create_task(batcher.compute_rows(rows)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    compute.released.set()
    assert await asyncio.gather(*calls) == [[1.0, 2.0], [3.0], [8.0]]
    assert compute.batches == [[(1,), (2,)], [(3,), (4, 4)]]


async def test_an_error_reaches_only_the_callers_of_its_batch():
    compute = FakeCompute()
    compute.released.set()
    batcher = MicroBatcher(compute, max_tokens=2, max_rows=1)
    results = await asyncio.gather(
        *(batcher.compute_rows([[n]]) for n in (5, 13, 6)), return_exceptions=True
    )
    assert results[0] == [5.0] and results[2] == [6.0]
    assert isinstance(results[1], ValueError)


async def test_rows_of_cancelled_callers_are_not_computed():
    compute = FakeCompute()
    batcher = MicroBatcher(compute, max_tokens=10, max_rows=99)
    first = asyncio.create_task(batcher.compute_rows([[1]]))
    await asyncio.sleep(0.01)
    second = asyncio.create_task(batcher.compute_rows([[2]]))
    await asyncio.sleep(0)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    compute.released.set()
    assert await first == [1.0]
    assert compute.batches == [[(1,)]]


async def test_closing_cancels_waiting_callers():
    compute = FakeCompute()
    batcher = MicroBatcher(compute, max_tokens=10, max_rows=99)
    waiting = asyncio.create_task(batcher.compute_rows([[1]]))
    await asyncio.sleep(0.01)
    batcher.close()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(waiting, 1)

"""Requests in flight: when they are done, and timeouts that are suspended during a pause."""

import asyncio

import pytest

from streamrl.engines.generation.generation_engine import (
    PauseState,
    ProgressWatch,
    RequestInFlight,
)
from tests.rollouts import make_rollout
from tests.virtual_time import in_virtual_time


@in_virtual_time
async def test_a_request_of_finished_rollouts_is_done_at_once():
    finished = make_rollout([1, 2], [3])
    calls: list[None] = []
    done = asyncio.get_running_loop().create_future()
    watch = ProgressWatch("uid", lambda: calls.append(None))
    request = RequestInFlight([finished, finished], (), done, watch)
    assert done.done() and len(calls) == 2
    assert all(rollout is finished for rollout in request.build_rollouts())


@in_virtual_time
async def test_a_timeout_is_suspended_while_the_engine_is_paused():
    pause, clock = PauseState(), asyncio.get_running_loop().time

    async def work() -> float:
        try:
            async with pause.pausable_timeout(10.0):
                await asyncio.sleep(1000.0)
        except TimeoutError:
            return clock()
        raise AssertionError("the sleep was not cancelled")

    task = asyncio.create_task(work())
    await asyncio.sleep(4.0)
    pause.add_reason("lease")
    await asyncio.sleep(100.0)
    assert pause.remove_reason("lease")
    assert (await task) == pytest.approx(4.0 + 100.0 + 6.0)


@in_virtual_time
async def test_paused_time_counts_overlapping_pauses_once_and_the_current_one():
    pause = PauseState()
    await asyncio.sleep(7.0)
    assert pause.paused_s == 0.0
    pause.add_reason("lease")
    await asyncio.sleep(2.0)
    pause.add_reason("update")
    await asyncio.sleep(1.0)
    pause.remove_reason("lease")
    assert pause.paused_s == 3.0
    pause.remove_reason("update")
    await asyncio.sleep(9.0)
    pause.add_reason("lease")
    await asyncio.sleep(4.0)
    assert pause.paused_s == 7.0


@in_virtual_time
async def test_the_engine_resumes_after_the_last_reason_is_removed():
    pause = PauseState()
    pause.add_reason("update")
    pause.add_reason("lease")
    reasons = ("update", "update", "lease", "lease")
    assert [pause.remove_reason(reason) for reason in reasons] == [False, False, True, False]


@in_virtual_time
async def test_a_timeout_started_while_paused_runs_in_full_after_resume():
    pause, clock = PauseState(), asyncio.get_running_loop().time
    pause.add_reason("update")

    async def work() -> float:
        with pytest.raises(TimeoutError):
            async with pause.pausable_timeout(10.0):
                await asyncio.sleep(1000.0)
        return clock()

    task = asyncio.create_task(work())
    await asyncio.sleep(50.0)
    pause.remove_reason("update")
    assert (await task) == pytest.approx(60.0)

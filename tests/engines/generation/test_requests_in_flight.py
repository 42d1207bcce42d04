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


@pytest.mark.parametrize(("pause_at", "resume_at"), [(4.0, 104.0), (0.0, 50.0), (9.999, 12.0)])
@in_virtual_time
async def test_a_timeout_does_not_count_pauses(pause_at: float, resume_at: float):
    loop, pause = asyncio.get_running_loop(), PauseState()
    if not pause_at:
        pause.add_reason("lease")
    task = asyncio.create_task(pause.wait(loop.create_future(), 10.0))
    await asyncio.sleep(pause_at)
    pause.add_reason("lease")
    await asyncio.sleep(resume_at - pause_at)
    assert pause.remove_reason("lease")
    assert not await task
    assert 10.0 + resume_at - pause_at <= loop.time() + 1e-9 <= 11.1 + resume_at - pause_at


@in_virtual_time
async def test_overlapping_pauses_count_once_and_end_with_the_last_reason():
    pause = PauseState()
    await asyncio.sleep(7.0)
    assert pause.paused_s == 0.0
    pause.add_reason("lease")
    await asyncio.sleep(2.0)
    pause.add_reason("update")
    await asyncio.sleep(1.0)
    assert not pause.remove_reason("lease") and not pause.remove_reason("lease")
    assert pause.paused_s == 3.0
    assert pause.remove_reason("update") and not pause.remove_reason("update")
    await asyncio.sleep(9.0)
    pause.add_reason("lease")
    await asyncio.sleep(4.0)
    assert pause.paused_s == 7.0

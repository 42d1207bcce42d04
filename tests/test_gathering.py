"""A step's groups are gathered while others are trained, and while the trainer has no devices."""

import asyncio

import pytest

from streamrl.errors import FilterError
from streamrl.simulator.clock import run_virtual
from tests.fake_stream import Stream, run_stream
from tests.fakes import Plan

FILTERING = Plan(
    seed=3,
    steps=3,
    groups_per_step=6,
    max_staleness=0,
    generators=3,
    scorers=3,
    filter_rate=0.5,
    generate_s=(1.0, 9.0),
    score_s=(0.2, 0.2),
    micro_batch_tokens=20,
    train_s=10.0,
)
"""A group is a micro-batch that takes as long as it takes to sample some."""


def test_what_is_filtered_while_others_are_trained_is_booked_at_once() -> None:
    booked: list[float] = []

    async def watch(stream: Stream) -> None:
        clock = asyncio.get_running_loop().time
        stream.control.on_end = lambda uid, how: booked.append(clock())
        await asyncio.Event().wait()

    stream = run_virtual(run_stream(FILTERING, disturb=watch))
    scorers = [r for process, r in stream.recorders.items() if process.startswith("reward")]
    scored = [span.end_s for recorder in scorers for span in recorder.drain()]
    assert len(booked) > 6
    late = [at - max(end for end in scored if end <= at) for at in booked]
    assert max(late) < 0.1


def test_too_much_that_is_filtered_ends_the_run_also_if_it_comes_while_others_are_trained() -> None:
    plan = Plan(**{**vars(FILTERING), "max_filtered": 3, "filter_rate": 0.8})
    with pytest.raises(FilterError, match="step 0 has filtered"):
        run_virtual(run_stream(plan))

"""Group collector: collects groups during training and while the trainer waits for devices."""

import asyncio
import math
from types import SimpleNamespace
from typing import Any

import pytest

from streamrl.errors import FilterLimitError, LedgerError
from streamrl.messages import Experience, GroupInfo, GroupLease, GroupOutcome
from streamrl.planner.simulator.virtual_loop import run_virtual
from streamrl.stream.run_state import PipelineConfig
from streamrl.stream.train_step import GroupCollector
from tests.fake_stream import Stream, run_stream
from tests.fakes import Plan
from tests.stream.test_run_state import make_run_state, uids
from tests.virtual_time import in_virtual_time

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
"""Plan with one group per micro-batch, which trains as long as several groups sample."""


def test_groups_filtered_during_training_are_logged_at_once():
    logged_at: list[float] = []

    async def watch(stream: Stream) -> None:
        clock = asyncio.get_running_loop().time
        stream.control.on_group_finished = lambda uid, how: logged_at.append(clock())
        await asyncio.Event().wait()

    stream = run_virtual(run_stream(FILTERING, disturb=watch))
    scorers = [r for process, r in stream.recorders.items() if process.startswith("reward")]
    scored = [span.end_s for recorder in scorers for span in recorder.drain_spans()]
    assert len(logged_at) > 6
    delays = [at - max(end for end in scored if end <= at) for at in logged_at]
    assert max(delays) < 0.1


def test_filter_limit_is_raised_even_if_the_run_is_stopped():
    plan = Plan(**{**vars(FILTERING), "max_filtered": 3, "filter_rate": 0.8})

    async def stop(stream: Stream) -> None:
        while stream.control.filter_tally.num_groups <= 3:
            await asyncio.sleep(0.1)
        # Rounds are training for a few more seconds.
        await asyncio.sleep(3.0)
        stream.control.request_stop()
        await asyncio.Event().wait()

    with pytest.raises(FilterLimitError, match="step 1 has filtered"):
        run_virtual(run_stream(plan, disturb=stop))


def ready(number: int, ended: GroupOutcome | None = None) -> Experience:
    info = None if ended else GroupInfo((5,), 4, ((0, 4),))
    lease = GroupLease(number, f"0:{number}:0", "train", 1, math.inf)
    return Experience(lease, 0, info=info, ready_version=0, outcome=ended)


@in_virtual_time
async def test_error_during_the_last_groups_is_raised(monkeypatch: pytest.MonkeyPatch):
    """The last group is drawn while a filtered group of the same call is being logged."""
    run_state = make_run_state()
    await run_state.run_log.record_admissions(uids(4), 0)
    for uid in uids(4):
        run_state.assembler.admit_group(uid, 0)

    class Queue:
        coming = (
            ([ready(0), ready(1)], 0.0),
            ([ready(2), ready(3, GroupOutcome("filtered", filtered=True))], 5.0),
        )
        answers = iter(coming)

        async def lease_groups(self, stage: str, **settings: Any) -> list[Experience]:
            groups, after_s = next(self.answers)
            await asyncio.sleep(after_s)
            return groups

    async def finish_groups(queue: Any, ended: Any, infos: Any) -> None:
        await asyncio.sleep(20.0)
        raise LedgerError("0:3:0 was never admitted")

    monkeypatch.setattr(run_state, "finish_groups", finish_groups)
    stage: Any = SimpleNamespace(name="train", queue=Queue())
    with pytest.raises(LedgerError, match="never admitted"):
        async with GroupCollector(stage, run_state, PipelineConfig(groups_per_step=3)) as collector:
            for _ in range(2):
                assert await collector.wait_for_groups()
                run_state.assembler.draw_groups(0)
                await asyncio.sleep(10.0)
            assert run_state.assembler.is_complete

"""Training step: collection, updates, stop, replay after a crash, stalls."""

import asyncio
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.buffer.micro_batch_schedule import UpdatePlan
from streamrl.dataflow import POLICY
from streamrl.errors import DeadlineError, FilterLimitError, LedgerError
from streamrl.messages import Experience, parse_uid
from streamrl.planner.simulator.virtual_loop import run_virtual
from streamrl.stream.device_lease import DedicatedDeviceLease
from streamrl.stream.run_state import PipelineConfig
from streamrl.stream.stage_worker import POLL_WAIT_S
from streamrl.stream.train_step import (
    GroupCollector,
    ReadyRounds,
    RoundRunner,
    add_metric_sums,
    make_scheduler,
)
from tests.fake_stream import Stream, run_stream
from tests.fakes import FakeTrainer, Plan
from tests.rollouts import make_ready_group
from tests.stream.test_run_state import FILTERED, make_run_state, uids
from tests.virtual_time import in_virtual_time

PACE = UpdatePlan(requires_full_step=True, num_epochs=2, num_mini_batches=2)


def list_trained_uids(stream: Stream) -> list[list[str]]:
    return [[group.uid for group in outcome.groups] for outcome in stream.outcomes]


@pytest.mark.parametrize(
    ("train_s", "has_grace", "is_step_finished"),
    [(0.3, True, True), (3.0, True, False), (0.3, False, False)],
)
def test_stop_between_two_updates_finishes_the_step_within_the_grace_period(
    train_s: float, has_grace: bool, is_step_finished: bool
):
    async def stop(stream: Stream) -> None:
        while not stream.trainer.num_updates:
            await asyncio.sleep(0.01)
        (stream.control.request_stop if has_grace else stream.control.stop_requested.set)()

    plan = Plan(steps=1000, pace=PACE, train_s=train_s, critic=True)
    stream = run_virtual(run_stream(plan, disturb=stop))
    assert stream.control.has_partial_update is not is_step_finished
    assert len(stream.outcomes) == stream.control.admission.version == int(is_step_finished)


@given(
    seed=st.integers(0, 1000),
    stop_s=st.floats(0.0, 6.0),
    train_s=st.sampled_from([0.05, 0.08]),
    pace=st.sampled_from([UpdatePlan(), PACE]),
)
def test_stop_at_any_time_leaves_short_steps_complete(
    seed: int, stop_s: float, train_s: float, pace: UpdatePlan
):
    async def stop(stream: Stream) -> None:
        await asyncio.sleep(stop_s)
        stream.control.request_stop()

    facts: dict[str, Any] = {"micro_batch_tokens": 11, "generate_s": (0.1, 0.5), "train_s": train_s}
    stream = run_virtual(
        run_stream(Plan(seed=seed, steps=1000, pace=pace, critic=True, **facts), disturb=stop)
    )
    assert not stream.control.has_partial_update
    versions = {trainer.version for trainer in stream.trainers.values()}
    assert versions == {stream.control.admission.version}
    assert len(stream.outcomes) == stream.control.admission.version


@pytest.mark.parametrize("critic", [False, True])
@pytest.mark.parametrize("train_s", [0.3, 2.0, 4.0])
def test_stop_before_the_first_update_makes_none(train_s: float, critic: bool):
    async def stop(stream: Stream) -> None:
        while not stream.trainer.planned:  # until the first round
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        stream.control.request_stop()

    plan = Plan(steps=9, pace=PACE, train_s=train_s, critic=critic)
    stream = run_virtual(run_stream(plan, disturb=stop))
    assert not stream.control.has_partial_update
    assert not stream.outcomes


@pytest.mark.parametrize("train_s", [1.0, 2.0, 3.0, 4.0])
@in_virtual_time
async def test_step_that_cannot_finish_in_time_is_abandoned_at_once(train_s: float):
    times: list[float] = []

    async def stop(stream: Stream) -> None:
        while not stream.trainer.num_updates:
            await asyncio.sleep(0.01)
        stream.control.request_stop()
        times.append(asyncio.get_running_loop().time())

    pace = UpdatePlan(requires_full_step=True, num_epochs=4, num_mini_batches=2)
    plan = Plan(steps=9, pace=pace, train_s=train_s, critic=True)
    stream = await run_stream(plan, disturb=stop)
    times.append(asyncio.get_running_loop().time())
    assert stream.control.has_partial_update and not stream.outcomes
    # Work in progress: a round and an update of the slower trainer.
    assert times[1] - times[0] < 4 * train_s + POLL_WAIT_S + 0.1


class StopAtUpdate:
    """Control that abandons a step at its `last` update."""

    def __init__(self, last: int) -> None:
        self.last, self.updates = last, list[tuple[str, bool]]()

    def should_abandon_step(self, *, needs_s: float = 0.0) -> bool:
        return False

    async def begin_update(self, role: str, *, finishes_step: bool) -> bool:
        self.updates.append((role, finishes_step))
        return len(self.updates) < self.last


@pytest.mark.parametrize("last", [3, 9])
@in_virtual_time
async def test_rounds_are_trained_without_a_run_until_the_control_abandons_the_step(last: int):
    trainer, control = FakeTrainer(update_plan=PACE), StopAtUpdate(last)
    scheduler = make_scheduler(trainer, PipelineConfig(micro_batch_tokens=11))
    for uid in "abcd":
        scheduler.add_group(uid, [5, 5, 5])
    runner = RoundRunner(trainer, control, DedicatedDeviceLease())
    rounds = scheduler.take_rounds(complete=True)
    await runner.run_rounds(POLICY, ReadyRounds({POLICY: rounds}, list("abcd")))
    num_updates = min(last - 1, 4)
    assert len(runner.result.update_metrics) == num_updates
    assert runner.is_done is (num_updates == 4)
    finishes = [False, False, False, True]
    assert control.updates == [(POLICY, end) for end in finishes[: min(last, 4)]]
    # Two epochs of twelve rollouts; a rollout is counted in each round that trains it.
    assert runner.result.metric_sums["rollouts"] == (24 if runner.is_done else 18)


def test_depth_above_max_staleness_drops_stale_groups_and_readmits_their_prompts():
    plan = Plan(seed=1, steps=8, max_staleness=1, depth=4, on_stale="drop", max_attempts=9)
    stream = run_virtual(run_stream(plan))
    drops = dict(stream.ledger.counts.drops)
    assert drops.keys() == {"stale"}
    tallies = [stream.control.filter_tally, *(o.filter_tally for o in stream.outcomes)]
    assert sum(tally.num_stale for tally in tallies) == drops["stale"]
    assert min(t.num_stale_tokens >= t.num_stale_rollouts >= t.num_stale for t in tallies)
    assert [len(groups) for groups in list_trained_uids(stream)] == [4] * 8
    ended = {uid for uid, _ in stream.ended}
    later = {uid for groups in list_trained_uids(stream) for uid in groups} | set(
        stream.ledger.in_flight
    )
    for uid in ended:
        epoch, index, attempt = parse_uid(uid)
        assert f"{epoch}:{index}:{attempt + 1}" in later | ended
    ages = [
        outcome.version - version
        for outcome in stream.outcomes
        for group in outcome.groups
        for version, _ in group.info.version_tokens
    ]
    assert max(ages) <= 1


def test_a_step_waits_for_rollouts_that_grow_longer_than_the_stall_time_and_for_their_scores():
    async def main(stall_s: float, score_s: float) -> float:
        plan = Plan(
            generate_s=(280.0, 280.0),
            score_s=(score_s, score_s),
            stall_s=stall_s,
            on_stall="abort",
            steps=1,
        )
        await run_stream(plan)
        return asyncio.get_running_loop().time()

    assert run_virtual(main(150.0, score_s=0.1)) > 280.0
    assert run_virtual(main(150.0, score_s=100.0)) > 380.0
    for stall_s, score_s in ((20.0, 0.1), (150.0, 250.0)):
        with pytest.raises(DeadlineError, match=f"got no group for {stall_s:g} s"):
            run_virtual(main(stall_s, score_s))


def test_moving_weights_is_no_stall_for_as_long_as_their_bytes_may_take():
    gigabyte = 10**9  # 10 s on the slowest network
    plan = Plan(max_staleness=0, steps=2, stall_s=50.0)
    run_virtual(run_stream(replace(plan, publish_s=400.0)))
    run_virtual(run_stream(replace(plan, pull_s=400.0, weight_bytes=40 * gigabyte)))
    with pytest.raises(DeadlineError, match="got no group for 50 s"):
        run_virtual(run_stream(replace(plan, pull_s=400.0, weight_bytes=20 * gigabyte)))


def test_stall_error_counts_groups_of_the_step_and_missing_ones():
    async def stop_generators(stream: Stream) -> None:
        """Stop generation once the step has some of its groups."""
        while not stream.control.assembler.num_drawn:
            await asyncio.sleep(0.01)
        for name, tasks in stream.loops.items():
            for task in tasks if name.startswith("generator-") else ():
                task.cancel()

    plan = Plan(max_staleness=1, steps=9, groups_per_step=6, stall_s=50.0, lease_s=1e6)
    with pytest.raises(DeadlineError) as stall:
        run_virtual(run_stream(plan, disturb=stop_generators))
    match = re.search(r"its step has (\d+) of 6 groups, and (\d+) that were", str(stall.value))
    assert match is not None, stall.value
    num_ready, num_missing = map(int, match.groups())
    # All groups of this step and the next are admitted.
    assert 0 < num_ready < 6 and num_ready + num_missing == 12


def test_stall_error_tells_what_open_episodes_wait_for():
    waits = "generator-0: 2 of 4 open episodes wait for their environment, the longest for 49 s"

    async def describe_waits() -> str:
        return waits

    async def add_description(stream: Stream) -> None:
        stream.control.describe_waits = describe_waits
        await asyncio.Event().wait()

    plan = Plan(generate_s=(1e6, 1e6), stall_s=50.0, lease_s=1e7)
    with pytest.raises(DeadlineError, match=f"; {waits}$"):
        run_virtual(run_stream(plan, disturb=add_description))


def test_metric_sums_add_and_negative_maxima_are_kept():
    total: dict[str, float] = {}
    for ready in ({"a": 1.0, "b_max": -3.0}, {"a": 2.0, "b_max": -5.0}):
        add_metric_sums(total, ready)
    assert total == {"a": 3.0, "b_max": -3.0}


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

    with pytest.raises(FilterLimitError, match=r"step 1 has filtered .*rewards are equal"):
        run_virtual(run_stream(plan, disturb=stop))


@in_virtual_time
async def test_error_during_the_last_groups_is_raised(monkeypatch: pytest.MonkeyPatch):
    """The last group is drawn while a filtered group of the same call is being logged."""
    run_state = make_run_state()
    await run_state.run_log.record_admissions(uids(4), 0)
    for uid in uids(4):
        run_state.assembler.admit_group(uid, 0)

    class Queue:
        coming = (
            ([make_ready_group("0:0:0"), make_ready_group("0:1:0")], 0.0),
            ([make_ready_group("0:2:0"), make_ready_group("0:3:0", outcome=FILTERED)], 5.0),
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

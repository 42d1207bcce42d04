"""Run state: admission, readmission, oversampling, filter and drop limits."""

import asyncio
from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.buffer import (
    ExperienceQueue,
    QueueConfig,
    ShardCapacity,
)
from streamrl.buffer.journal import JournalRecord
from streamrl.buffer.staleness_credits import compute_credit_limit
from streamrl.errors import DropLimitError, FilterLimitError, StaleGroupError
from streamrl.messages import GroupOutcome, Prompt
from streamrl.pipeline import admit_prompts
from streamrl.planner.simulator.virtual_loop import run_virtual
from streamrl.stream.run_state import RunState
from tests.buffer.clients import queue_of
from tests.buffer.shards import STAGES
from tests.fake_shards import LocalShard, MemoryLog
from tests.fake_stream import Disk, Stream, build_stream, run_stream
from tests.fakes import FakePrompts, Plan
from tests.rollouts import make_ready_group
from tests.virtual_time import in_virtual_time

FAILED = GroupOutcome("reward_error", "the verifier is down")
STALE = GroupOutcome("stale", "tokens beyond pipeline.max_staleness")
FILTERED = GroupOutcome("filtered", "all 2 rewards are 1", filtered=True)


class FakeQueue:
    """Queue that records inserted prompts with their versions, and removed uids."""

    def __init__(self) -> None:
        self.inserted: list[tuple[str, int]] = []
        self.removed: list[str] = []
        self.kept_uids: list[str] = []

    async def find_uids_with(self, column: str) -> list[str]:
        return self.kept_uids

    async def insert_prompts(
        self,
        prompts: Sequence[Prompt],
        version: int,
        *,
        wait_s: float,
        on_entered: Callable[[Collection[str]], None],
    ) -> None:
        await asyncio.sleep(0.1)
        self.inserted += [(prompt.uid, version) for prompt in prompts]
        on_entered([prompt.uid for prompt in prompts])

    async def remove_groups(self, uids: Sequence[str], version: int) -> None:
        await asyncio.sleep(0.1)
        self.removed += uids


def make_run_state(log: MemoryLog | None = None, **settings: Any) -> RunState:
    """Make a run state for two steps of three groups in flight; more with oversampling."""
    plan = Plan(**{"steps": 100, "groups_per_step": 3, **settings})
    return build_stream(plan, Disk(log or MemoryLog(), [MemoryLog()] * plan.shards)).control


def uids(count: int) -> list[str]:
    return [f"0:{i}:0" for i in range(count)]


# Readmission


def run_with_outcomes(
    *outcomes_by_call: dict[str, GroupOutcome],
    on_finished: Callable[[str, GroupOutcome], None] = lambda uid, how: None,
    **settings: Any,
) -> tuple[RunState, FakeQueue]:
    """Make a run state that fills the queue, then finishes the groups of each dict in one call."""

    async def main() -> tuple[RunState, FakeQueue]:
        run_state, fake_queue = make_run_state(**settings), FakeQueue()
        run_state.on_group_finished = on_finished
        await run_state.fill_queue(fake_queue)  # type: ignore[arg-type]
        for outcomes in outcomes_by_call:
            await run_state.finish_groups(fake_queue, outcomes)  # type: ignore[arg-type]
            run_state.check_step_limits(outcomes)
            await run_state.fill_queue(fake_queue)  # type: ignore[arg-type]
        return run_state, fake_queue

    return run_virtual(main())


def test_ended_group_is_logged_reported_and_removed():
    reported: list[tuple[str, GroupOutcome]] = []
    outcomes = {"0:1:0": FAILED, "0:2:0": FILTERED}
    run_state, fake_queue = run_with_outcomes(
        outcomes, on_finished=lambda uid, how: reported.append((uid, how))
    )
    assert reported == list(outcomes.items())
    assert fake_queue.removed == ["0:1:0", "0:2:0"]
    counts = run_state.admission.ledger.counts
    assert (counts.filtered, counts.dropped, counts.in_flight) == (1, 1, 6)
    assert set(run_state.assembler.pending_uids) == set(run_state.admission.ledger.in_flight)
    assert run_state.inserted_uids == set(run_state.admission.ledger.in_flight)


def test_stale_group_is_always_readmitted():
    outcomes = {"0:1:0": STALE, "0:2:0": FAILED}
    run_state, fake_queue = run_with_outcomes(outcomes, max_dropped=1)
    assert run_state.drop_counts == {"reward_error": 1}, "stale groups count to no limit"
    assert fake_queue.inserted[6:] == [("0:1:1", 0), ("0:6:0", 0)]


def test_prompt_is_readmitted_up_to_max_attempts_then_replaced():
    outcomes = [{f"0:1:{attempt}": how} for attempt, how in enumerate((FAILED, STALE, FAILED))]
    _, fake_queue = run_with_outcomes(*outcomes, readmits=True, max_attempts=3)
    assert [uid for uid, _ in fake_queue.inserted[6:]] == ["0:1:1", "0:1:2", "0:6:0"]


@in_virtual_time
async def test_readmitted_prompt_is_inserted_at_its_logged_version():
    run_state, fake_queue = make_run_state(readmits=True), FakeQueue()
    await run_state.fill_queue(fake_queue)  # type: ignore[arg-type]
    await run_state.finish_groups(fake_queue, {"0:1:0": FAILED})  # type: ignore[arg-type]
    run_state.admission.advance_version(1)
    await run_state.finish_groups(fake_queue, {"0:2:0": FAILED})  # type: ignore[arg-type]
    assert run_state.pending_inserts == {"0:1:1", "0:2:1"}
    await run_state.fill_queue(fake_queue)  # type: ignore[arg-type]
    assert not run_state.pending_inserts
    assert fake_queue.inserted[6:] == [("0:1:1", 0), ("0:2:1", 1)]


@in_virtual_time
async def test_readmitted_prompt_needs_no_credit():
    run_state, fake_queue = make_run_state(readmits=True), FakeQueue()
    admitting = asyncio.create_task(admit_prompts(run_state, fake_queue))  # type: ignore[arg-type]
    await asyncio.sleep(10.05)
    await run_state.finish_groups(fake_queue, {"0:1:0": FAILED})  # type: ignore[arg-type]
    ended_at = asyncio.get_running_loop().time()
    while len(fake_queue.inserted) < 7:
        await asyncio.sleep(0.01)
    run_state.stop_requested.set()
    await admitting
    assert fake_queue.inserted[6] == ("0:1:1", 0)
    assert (asyncio.get_running_loop().time() - ended_at) < 1.5


@in_virtual_time
async def test_training_does_not_wait_for_capacity():
    # Capacity for four groups while six may be in flight: the shard is bounded in bytes.
    bounds = ShardCapacity(100, max_bytes=4000, reserved_group_bytes=1000)
    shard = LocalShard(STAGES, QueueConfig(max_attempts=1), bounds, log=MemoryLog())
    run_state, queue = (
        make_run_state(readmits=True),
        ExperienceQueue([shard], "coordinator"),
    )
    admitting = asyncio.create_task(admit_prompts(run_state, queue))
    await asyncio.sleep(5.0)
    assert len((await queue.get_stats()).uids) == 4
    started = asyncio.get_running_loop().time()
    # The fifth prompt, which has waited for capacity, gets the capacity of the failed group.
    await run_state.finish_groups(queue, {"0:1:0": FAILED})
    assert asyncio.get_running_loop().time() - started < 0.1
    await asyncio.sleep(1.0)
    assert len((await queue.get_stats()).uids) == 4
    await queue.remove_groups(["0:0:0", "0:2:0"], 1)
    await asyncio.sleep(1.0)
    assert "0:1:1" in (await queue.get_stats()).uids
    admitting.cancel()


async def watch_credit(stream: Stream) -> None:
    """Assert at all times that admissions do not exceed the credits."""
    plan, admission = stream.plan, stream.control.admission
    lead = plan.max_staleness if plan.depth is None else plan.depth
    while True:
        limit = compute_credit_limit(
            admission.version, depth=lead, groups_per_step=plan.groups_per_step
        )
        claimed = admission.ledger.num_credits_spent
        assert claimed <= min(limit, plan.steps * plan.groups_per_step)
        await asyncio.sleep(0.001)


@given(
    st.builds(
        Plan,
        seed=st.integers(0, 10_000),
        readmits=st.booleans(),
        fail_rate=st.just(0.5),
        max_attempts=st.integers(1, 2),
        generate_s=st.sampled_from([(0.1, 0.3), (0.5, 2.0)]),
        shards=st.integers(1, 2),
    )
)
def test_readmissions_spend_only_refunded_credits_under_any_schedule(plan: Plan):
    stream = run_virtual(run_stream(plan, disturb=watch_credit))
    assert stream.ledger.counts.in_flight == 0


class LateLog(MemoryLog):
    """Log whose writes return a second after they are durable."""

    async def append(self, records: Sequence[JournalRecord], *, sync: bool = True) -> None:
        await super().append(records, sync=sync)
        await asyncio.sleep(1.0)

    def crash(self) -> MemoryLog:
        return self


@in_virtual_time
async def test_log_and_ledger_agree_whenever_the_lock_is_free():
    log = LateLog()
    run_state, fake_queue = make_run_state(log=log), FakeQueue()
    await run_state.fill_queue(fake_queue)  # type: ignore[arg-type]
    finishing = asyncio.create_task(
        run_state.finish_groups(fake_queue, {"0:1:0": FAILED})  # type: ignore[arg-type]
    )
    await asyncio.sleep(0.5)
    assert log.records[-1].meta["kind"] == "end"
    async with run_state.run_log_lock:
        assert "0:1:0" not in run_state.admission.ledger.in_flight
    await finishing


@in_virtual_time
async def test_reconcile_removes_unknown_groups_and_inserts_missing_ones():
    run_state, queue = make_run_state(), queue_of(1)
    await run_state.run_log.record_admissions(uids(3), 0)
    # The queue has one of the three groups, and a group that is not in flight in the log.
    await queue.insert_prompts([FakePrompts.get_prompt(uid) for uid in ("0:1:0", "0:7:0")], 0)
    await run_state.reconcile_queue(queue)
    assert (await queue.get_stats()).uids == ("0:1:0",)
    assert [prompt.uid for prompt in run_state.prompts_to_insert] == ["0:0:0", "0:2:0"]


# Oversampling


async def make_oversampling_run_state(factor: float | None) -> tuple[RunState, FakeQueue]:
    """Make an oversampling run state that has filled the queue."""
    run_state, fake_queue = make_run_state(oversample=factor), FakeQueue()
    await run_state.fill_queue(fake_queue)  # type: ignore[arg-type]
    return run_state, fake_queue


@in_virtual_time
async def test_oversampling_undecided_group_spends_a_fraction_of_a_credit():
    run_state, fake_queue = await make_oversampling_run_state(4.0)
    assert len(fake_queue.inserted) == 24, "four for each of the six slots"
    fake_queue.kept_uids = ["0:0:0"]
    await run_state.fill_queue(fake_queue)  # type: ignore[arg-type]
    # Five slots are free: they need twenty undecided groups, and there are 23.
    assert len(fake_queue.inserted) == 24
    await run_state.finish_groups(fake_queue, dict.fromkeys(uids(5)[1:], FILTERED))  # type: ignore[arg-type]
    await run_state.fill_queue(fake_queue)  # type: ignore[arg-type]
    assert len(fake_queue.inserted) == 25, "19 undecided groups are one too few"


@in_virtual_time
async def test_oversampling_auto_follows_the_recent_keep_rate():
    run_state, fake_queue = await make_oversampling_run_state(None)
    assert len(fake_queue.inserted) == 6, "the keep rate is not yet estimated"
    await run_state.finish_groups(fake_queue, dict.fromkeys(uids(6), FILTERED))  # type: ignore[arg-type]
    await run_state.fill_queue(fake_queue)  # type: ignore[arg-type]
    assert len(fake_queue.inserted) == 6 + 15, "2.5 for each slot: an estimated keep rate of 4/10"


@in_virtual_time
async def test_surplus_prompts_are_readmitted_first():
    run_state, fake_queue = await make_oversampling_run_state(4.0)
    for version in (1, 2):
        run_state.admission.advance_version(version)
    fake_queue.kept_uids = [f"0:{n}:0" for n in range(14, 24)]
    run_state.keep_groups(fake_queue.kept_uids)
    late = run_state.remove_late_groups()
    assert len(late) == 24, "all groups were due at the step of version 1"
    await run_state.finish_groups(fake_queue, {u: late[u] for u in uids(14)})  # type: ignore[arg-type]
    assert dict(run_state.admission.ledger.counts.drops) == {"surplus": 14}
    run_state.check_step_limits(late)  # surplus groups do not count as dropped
    assert not run_state.prompts_to_insert
    await run_state.fill_queue(fake_queue)  # type: ignore[arg-type]
    # Version 2 allows twelve groups, and ten are kept: two slots of four prompts each.
    assert fake_queue.inserted[24:] == [(f"0:{n}:1", 2) for n in range(8)]
    filtered = dict.fromkeys([f"0:{n}:1" for n in range(8)], FILTERED)
    await run_state.finish_groups(fake_queue, filtered)  # type: ignore[arg-type]
    await run_state.fill_queue(fake_queue)  # type: ignore[arg-type]
    readmitted = [f"0:{n}:1" for n in range(8, 14)]
    assert [uid for uid, _ in fake_queue.inserted[32:]] == [*readmitted, "0:24:0", "0:25:0"]


@in_virtual_time
async def test_late_group_is_an_error_without_oversampling():
    run_state, _ = await make_oversampling_run_state(1.0)
    for version in (1, 2):
        run_state.admission.advance_version(version)
    assert run_state.remove_late_groups() == {}
    run_state.offer_groups([make_ready_group("0:0:0")])
    with pytest.raises(StaleGroupError):
        run_state.assembler.draw_groups(2)


# Filter and drop limits


def test_step_that_filters_or_drops_too_much_raises_with_the_cause():
    message = r"^step 1 has filtered 3 groups, more than 2 \(filter.max_filter_rounds\): all 2 rew"
    with pytest.raises(FilterLimitError, match=message):
        run_with_outcomes(dict.fromkeys(uids(2), FILTERED), {"0:2:0": FILTERED}, max_filtered=2)
    late = GroupOutcome("reward_timeout", "no result in 30 s")
    message = (
        "^step 0 .* 3 groups, more than 2, 2 of them as reward_error; the last: no result in 30"
    )
    with pytest.raises(DropLimitError, match=message):
        run_with_outcomes({**dict.fromkeys(uids(2), FAILED), "0:2:0": late}, max_dropped=2)


@in_virtual_time
async def test_resumed_groups_do_not_count_as_dropped():
    run_state, queue = make_run_state(max_dropped=0), queue_of(1)
    await run_state.run_log.record_admissions(
        [prompt.uid for prompt in run_state.prompt_source.draw_prompts(2)], 0
    )
    await run_state.reconcile_queue(queue)
    await run_state.fill_queue(queue)
    for outcomes in (dict.fromkeys(uids(2), FAILED), {"0:3:0": FAILED}):
        await run_state.finish_groups(queue, outcomes)
        if "0:3:0" not in outcomes:
            run_state.check_step_limits(outcomes)
    with pytest.raises(DropLimitError, match="step 0 has dropped 1 groups"):
        run_state.check_step_limits({"0:3:0": FAILED})
    assert run_state.drop_counts == {"reward_error": 1}

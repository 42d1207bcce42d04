"""Guarantees of the stage loops under any schedule, on fake engines and a virtual clock."""

import asyncio
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.buffer import ExperienceQueue
from streamrl.buffer.micro_batch_schedule import UpdatePlan
from streamrl.buffer.staleness_credits import MAX_FACTOR
from streamrl.errors import DropLimitError, LogprobCheckError
from streamrl.messages import Columns, GroupLease, parse_uid
from streamrl.pipeline import count_sampled_tokens, find_newest_version
from streamrl.planner.simulator.virtual_loop import run_virtual
from streamrl.stream.run_state import SURPLUS_CAUSE
from tests.fake_stream import Stream, build_stream, draw_plans, run_loops, run_stream
from tests.fakes import Plan
from tests.test_stream_faults import check_accounts, check_conservation
from tests.virtual_time import in_virtual_time

plans = draw_plans(
    shards=st.integers(1, 3),
    publish_s=st.sampled_from([0.0, 0.2, 2.0]),
    filter_rate=st.sampled_from([0.0, 0.0, 0.0, 0.5]),
    oversample=st.sampled_from([1.0, 1.0, 2.5, 6.0, None]),
    on_stale=st.sampled_from(["wait", "wait", "drop"]),
    # With one stage at a time, 24 groups of 20 s in 3 slots keep the trainer waiting for minutes.
    one_at_a_time=st.booleans(),
    # A step with many filtered groups takes as long as several steps.
    stall_s=st.just(5000.0),
)


def uids(stream: Stream) -> list[str]:
    return [group.uid for outcome in stream.outcomes for group in outcome.groups]


@given(plans)
def test_stream_guarantees_hold_under_any_schedule(plan: Plan):
    stream = run_virtual(run_stream(plan, disturb=watch_bounds))
    assert [outcome.version for outcome in stream.outcomes] == list(range(plan.steps))
    assert stream.ledger.counts.trained == plan.steps * plan.groups_per_step
    check_accounts(stream)
    check_surplus(plan, stream)
    check_gated(stream)
    refused = sum(outcome.queue_stats.counts["refused"] for outcome in stream.outcomes)
    assert refused == 0, "commits were refused without failures"


def check_surplus(plan: Plan, stream: Stream) -> None:
    """Assert that only oversampling leaves surplus groups."""
    drops = dict(stream.ledger.counts.drops)
    if plan.oversample == 1.0 or plan.on_stale == "drop":
        assert SURPLUS_CAUSE not in drops
    if plan.oversample == 1.0 and not plan.fail_rate and plan.on_stale == "wait":
        assert stream.ledger.counts.in_flight == 0


def check_gated(stream: Stream) -> None:
    """Assert that filtered groups cost only rollouts and rewards."""
    filtered = {uid for uid, how in stream.ended if how.filtered}
    for stage, computed in stream.disk.computed.items():
        if stage not in ("generate", "reward"):
            assert not filtered & computed, stage


async def watch_bounds(stream: Stream) -> None:
    """Assert at all times that groups in flight are bounded and the ledger balances."""
    plan, ledger = stream.plan, stream.ledger
    step_groups = (plan.max_staleness + 1) * plan.groups_per_step
    max_in_flight = step_groups * (MAX_FACTOR if plan.oversample is None else plan.oversample)
    while True:
        num_in_flight = ledger.counts.in_flight
        assert 0 <= stream.control.oversampling.num_kept <= num_in_flight
        assert num_in_flight <= math.ceil(max_in_flight)
        check_conservation(stream)
        await asyncio.sleep(0.5)


FILTERED = Plan(
    seed=5,
    max_staleness=0,
    slots=40,
    scorers=2,
    generate_s=(4.0, 6.0),
    score_s=(0.1, 0.1),
    filter_rate=0.9,
    reference=True,
    critic=True,
    stall_s=5000.0,
)
"""Nine of ten groups are filtered; a step without a filter takes one round of generation."""


def step_s(plan: Plan) -> float:
    """Return the mean duration of the last two steps."""
    step_ends = run_virtual(run_stream(plan)).step_ends
    return (step_ends[-1] - step_ends[-3]) / 2


@pytest.mark.parametrize("staleness", [0, 1])
def test_oversampling_fills_a_step_in_one_round_of_generation(staleness: int):
    plan = replace(FILTERED, max_staleness=staleness)
    unfiltered = step_s(replace(plan, filter_rate=0.0))
    not_oversampled = step_s(plan)
    tenfold = step_s(replace(plan, oversample=10.0))
    adaptive = step_s(replace(plan, oversample=None))
    assert not_oversampled > 6 * unfiltered, "filtered groups are replaced in sequence"
    # One round decides the first groups; another samples the missing ones.
    assert tenfold < 2.5 * unfiltered
    assert adaptive < 3.5 * unfiltered, "the factor follows the filter rate"


def test_surplus_is_trained_within_staleness_or_readmitted():
    # The filter keeps all groups: three of four prompts for each slot are surplus.
    plan = replace(FILTERED, filter_rate=1e-9, oversample=4.0, critic=False)
    on_policy = run_virtual(run_stream(plan))
    ahead = run_virtual(run_stream(replace(plan, max_staleness=1)))
    assert dict(on_policy.ledger.counts.drops)[SURPLUS_CAUSE] > 4 * plan.groups_per_step
    first_versions, second_versions = (
        {group.info.min_version for group in outcome.groups} for outcome in ahead.outcomes[:2]
    )
    assert first_versions == second_versions == {0}, (
        "with staleness 1 the next step trains the surplus"
    )
    readmitted = [uid for uid in uids(on_policy) if parse_uid(uid)[2]]
    assert readmitted, "prompts of dropped groups are readmitted"


def test_surplus_rollouts_are_cancelled_early():
    plan = replace(FILTERED, filter_rate=1e-9, oversample=8.0, steps=3, generate_s=(1.0, 60.0))
    stream = run_virtual(run_stream(replace(plan, critic=False, reference=False)))
    assert stream.step_ends[-1] < 3 * 30.0
    # A stage learns of lost leases within a second, and frees their slots.
    late = [token for sampler in stream.samplers for token in sampler.sampled]
    step_ends = dict(zip(range(plan.steps), stream.step_ends, strict=True))
    gone = {uid: how for uid, how in stream.ended if how.cause == SURPLUS_CAUSE}
    assert gone
    first_end = step_ends[0]
    stale = [t for t in late if t.uid in gone and t.version == 0 and t.at_s > first_end + 1.5]
    assert not stale


@in_virtual_time
async def test_resume_with_oversampled_groups_keeps_the_guarantees():
    plan = replace(FILTERED, oversample=6.0, steps=3, filter_rate=0.5)
    first = build_stream(plan)
    await run_loops(first, checkpoint_every=2)
    # Resume with more steps and without oversampling.
    later = replace(plan, steps=6, oversample=1.0)
    stream = build_stream(later, first.disk, session="second")
    await run_loops(stream)
    assert [outcome.version for outcome in stream.outcomes] == [2, 3, 4, 5]
    for outcome in stream.outcomes:
        oldest = min(group.info.min_version for group in outcome.groups)
        assert oldest >= outcome.version - plan.max_staleness
    check_conservation(stream)


def test_publish_every_two_samples_two_steps_per_version():
    """Version 1 is trained but not published, so that no rollout is sampled from it."""
    plan = Plan(steps=6, groups_per_step=2, max_staleness=1, publish_every=2)
    stream = run_virtual(run_stream(plan))
    sampled_from = [
        {version for group in outcome.groups for version, _ in group.info.version_tokens}
        for outcome in stream.outcomes
    ]
    assert sampled_from == [{0}, {0}, {2}, {2}, {4}, {4}]


@given(st.integers(0, 1000), st.integers(1, 3))
def test_on_policy_steps_do_not_depend_on_placement(seed: int, generators: int):
    plan = Plan(seed=seed, max_staleness=0, generators=generators)
    pipelined = run_virtual(run_stream(plan))
    sequential = run_virtual(run_stream(replace(plan, one_at_a_time=True)))
    steps = [
        [sorted(group.uid for group in outcome.groups) for outcome in stream.outcomes]
        for stream in (pipelined, sequential)
    ]
    assert steps[0] == steps[1]


def test_on_policy_training_overlaps_generation_of_the_same_step():
    plan = Plan(
        max_staleness=0,
        groups_per_step=12,
        generate_s=(1.0, 6.0),
        train_s=0.2,
        micro_batch_tokens=30,
    )
    stream = run_virtual(run_stream(plan))
    end = stream.step_ends[0]
    generating = [s for p in ("generator-0", "generator-1") for s in spans(stream, p, "generate")]
    training = [s for s in spans(stream, "trainer", "train") if s.start_s < end]
    last_generated = max(s.end_s for s in generating if s.end_s <= end)
    assert min(s.start_s for s in training) < last_generated


def test_staleness_one_generates_the_next_step_during_training():
    balanced = Plan(generate_s=(4.0, 4.0), train_s=2.0, micro_batch_tokens=1000, steps=8)
    slow = run_virtual(run_stream(replace(balanced, max_staleness=0)))
    fast = run_virtual(run_stream(balanced))
    assert fast.step_ends[-1] < 0.75 * slow.step_ends[-1]


def test_shared_pool_runs_one_stage_at_a_time():
    stream = run_virtual(run_stream(Plan(max_staleness=0, one_at_a_time=True, reference=True)))
    work = [
        span
        for process in stream.recorders
        for span in spans(stream, process)
        if span.name in ("generate", "reward", "reference", "train")
    ]
    assert all(
        a.process == b.process or a.end_s <= b.start_s or b.end_s <= a.start_s
        for a, b in itertools.combinations(work, 2)
    )


@pytest.mark.parametrize("on_stall", ["abort", "redeliver"])
@pytest.mark.parametrize(
    "long",
    [
        {"generate_s": (2.0, 9.0)},
        {"train_s": 2.0},
        # Generators wait for the next step meanwhile.
        {"train_s": 2.0, "pace": UpdatePlan(True, 4, 1), "max_staleness": 1},
    ],
)
def test_long_phase_with_progress_is_no_stall(long: dict[str, Any], on_stall: str):
    # All rollouts or micro-batches of a step take more than 8 s; each takes less.
    shared: dict[str, Any] = {"one_at_a_time": True, "groups_per_step": 8, "generators": 1}
    plan = Plan(**{"max_staleness": 0, "stall_s": 8.0, "on_stall": on_stall, **shared, **long})
    stream = run_virtual(run_stream(plan))
    assert max(b - a for a, b in itertools.pairwise(stream.step_ends)) > plan.stall_s
    assert stream.ledger.counts.trained == plan.steps * plan.groups_per_step
    assert not stream.stalls
    assert not stream.ledger.counts.dropped


@pytest.mark.parametrize("readmits", [False, True])
def test_reward_that_always_fails_ends_the_run_with_the_reason(readmits: bool):
    dropped: list[str] = []

    async def watch(stream: Stream) -> None:
        stream.control.on_group_finished = lambda uid, how: dropped.append(uid)
        await asyncio.Event().wait()

    # The scorer scores batches of two groups a second: the 41st may fail along with another.
    plan = Plan(fail_rate=1.0, max_dropped=40, readmits=readmits, score_s=(1.0, 1.0))
    message = r"^step 0 has dropped 4\d groups, more than 40, .*; the last: the verifier is down$"
    with pytest.raises(DropLimitError, match=message):
        run_virtual(run_stream(plan, disturb=watch))
    assert 41 <= len(dropped) <= 42


def test_step_may_take_longer_than_a_capacity_wait():
    # Groups of this step and the next fill the shard.
    plan = Plan(
        steps=2,
        group_size=12,
        micro_batch_tokens=1000,
        train_s=700.0,
        stall_s=10_000.0,
        capacity_steps=1.0,
        shards=1,
    )
    stream = run_virtual(run_stream(plan))
    assert len(stream.outcomes) == plan.steps


def spans(stream: Stream, process: str, name: str | None = None) -> list:  # type: ignore[type-arg]
    recorder = stream.recorders[process]
    if not hasattr(recorder, "kept"):
        recorder.kept = recorder.drain_spans()  # type: ignore[attr-defined]
    return [s for s in recorder.kept if name is None or s.name == name]  # type: ignore[attr-defined]


def test_generator_commits_nothing_of_an_unverified_version(monkeypatch: pytest.MonkeyPatch):
    versions: list[int] = []

    def record(send: Callable[..., Any]) -> Callable[..., Any]:
        async def recording(
            queue: ExperienceQueue, entries: Sequence[tuple[GroupLease, Columns]]
        ) -> Any:
            versions.extend(find_newest_version(columns) for _, columns in entries)
            return await send(queue, entries)

        return recording

    for send in (ExperienceQueue.commit_columns, ExperienceQueue.save_partials):
        monkeypatch.setattr(ExperienceQueue, send.__name__, record(send))
    # During the logprob check of the version, groups finish and partial rollouts are due.
    plan = Plan(steps=8, generate_s=(3.0, 12.0), broken_version=3, probe_s=8.0)
    with pytest.raises(LogprobCheckError, match=r"generator-[01], with version 3, gives"):
        run_virtual(run_stream(plan))
    assert max(versions) == 2


def test_sampled_tokens_are_counted_per_completion():
    mask = np.array([0, 0, 1, 1, 1, 0, 0, 1], np.bool_)
    columns: Columns = {"lengths": np.array([5, 3], np.int32), "loss_mask": mask}
    assert count_sampled_tokens(columns) == [3, 1]
    assert count_sampled_tokens({"greedy_ids": np.zeros(4, np.int32)}) == [4]
    assert count_sampled_tokens({"scores": np.zeros(2, np.float32)}) == []


def test_spans_record_the_amount_of_work():
    stream = run_virtual(run_stream(Plan(steps=2, groups_per_step=3, group_size=2)))
    spans = [span for recorder in stream.recorders.values() for span in recorder.drain_spans()]
    by_uid = {group.uid: group.info for step in stream.outcomes for group in step.groups}
    generated = [span.args for span in spans if span.name == "generate"]
    assert len(generated) == 6
    for args in generated:
        info = by_uid[str(args["uid"])]
        lengths = [int(tokens) for tokens in str(args["lengths"]).split()]
        assert sum(lengths) == info.num_loss_tokens
        assert [tokens + int(args["prompt"]) for tokens in lengths] == list(info.lengths)
    scored = [span.args for span in spans if span.name == "reward"]
    assert sum(int(args["tokens"]) for args in scored) == sum(
        info.num_tokens for info in by_uid.values()
    )

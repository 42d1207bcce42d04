"""Guarantees after deaths of generators, scorers, shards and whole runs, on a virtual clock."""

import asyncio
import itertools
import math
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from streamrl.errors import DeadlineError, ServiceOutageError
from streamrl.messages import find_replayed_uid, parse_uid
from streamrl.planner.simulator.virtual_loop import run_virtual
from tests.fake_stream import Disk, Disturb, Stream, build_stream, draw_plans, run_loops, run_stream
from tests.fakes import Plan
from tests.virtual_time import in_virtual_time

FAULTS: dict[str, st.SearchStrategy[Any]] = {
    "shards": st.integers(1, 4),
    "filter_rate": st.sampled_from([0.0, 0.3]),
    "rows": st.sampled_from([0, 0, 12, 100]),
    "replay_frac": st.sampled_from([0.0, 0.4]),
    "oversample": st.sampled_from([1.0, 1.0, 3.0, None]),
    "duplicate_rate": st.sampled_from([0.0, 0.3]),
    "lost_rate": st.sampled_from([0.0, 0.1]),
    "readmits": st.booleans(),
    "on_stale": st.sampled_from(["wait", "drop"]),
    "on_stall": st.sampled_from(["abort", "redeliver", "warn"]),
    "lease_s": st.sampled_from([2.0, 30.0]),
    "stall_s": st.just(1000.0),
}
"""Overrides of `draw_plans` for runs with faults."""
plans = draw_plans(**FAULTS)


async def harm(stream: Stream) -> None:
    """Kill and restart shards and generators at random times; some deaths stay undetected."""
    rng = random.Random(f"harm/{stream.plan.seed}")
    for _ in range(rng.randint(1, 12)):
        await asyncio.sleep(rng.choice([0.003, 0.1, 1.0, 5.0]) * rng.random())
        check_conservation(stream)
        if rng.random() < 0.5:
            shard = rng.choice(stream.shards)
            shard.kill()
            await asyncio.sleep(rng.choice([0.0, 1.0, 5.0]))
            shard.revive()
        else:
            await replace_generator(stream, rng)


async def replace_generator(stream: Stream, rng: random.Random) -> None:
    index = rng.randrange(stream.plan.generators)
    name = f"generator-{index}"
    for task in stream.loops[name]:
        task.cancel()
    await asyncio.sleep(rng.choice([0.0, 2.0]))
    if rng.random() < 0.5:
        await stream.queue.release_holder(name)
    stream.start_generator(index)


def check_conservation(stream: Stream) -> None:
    counts = stream.ledger.counts
    ended = counts.trained + counts.filtered + counts.dropped
    assert counts.admitted == ended + counts.in_flight


def check_accounts(stream: Stream) -> None:
    """Assert that every admitted prompt is trained exactly once or ended with a cause."""
    plan = stream.plan
    trained = [group.uid for outcome in stream.outcomes for group in outcome.groups]
    assert len(set(trained)) == len(trained), "a group was trained twice"
    for outcome in stream.outcomes:
        assert len(outcome.groups) == plan.groups_per_step, "an incomplete step"
        expected_picks = [(g.uid, i) for g in outcome.groups for i in range(plan.group_size)]
        for trainer in stream.trainers.values():
            picks = trainer.trained.get(outcome.version, [])
            expected = [] if trainer.is_frozen(outcome.version) else sorted(expected_picks)
            assert sorted(picks) == expected, "a group was split"
        for group in outcome.groups:
            is_replay = find_replayed_uid(group.uid) is not None
            for version, _ in group.info.version_tokens:
                oldest = plan.replay_age if is_replay else plan.max_staleness
                assert 0 <= outcome.version - version <= oldest
    check_conservation(stream)
    counts = stream.ledger.counts
    causes = Counter(how.cause for _, how in stream.ended if not how.filtered)
    assert dict(counts.drops) == causes
    assert counts.filtered == sum(how.filtered for _, how in stream.ended)
    assert not set(trained) & {uid for uid, _ in stream.ended}


FULL_OF_ONE_THAT_WAITS = Plan(
    seed=283,
    steps=3,
    groups_per_step=1,
    group_size=1,
    shards=3,
    scorers=2,
    micro_batch_tokens=11,
    generate_s=(0.1, 20.0),
    score_s=(0.0, 0.0),
    train_s=3.0,
    pull_s=0.0,
    filter_rate=0.3,
    duplicate_rate=0.3,
    lost_rate=0.1,
    stall_s=1000.0,
    lease_s=30.0,
    reference=True,
    capacity_steps=1.0,
)
"""A ready group waits for an older group that is then filtered, and fills the shard meanwhile."""


@example(FULL_OF_ONE_THAT_WAITS)
@given(plans)
def test_any_deaths_leave_every_prompt_trained_once_or_accounted_for(plan: Plan):
    stream = run_virtual(run_stream(plan, disturb=harm))
    assert [outcome.version for outcome in stream.outcomes] == list(range(plan.steps))
    check_accounts(stream)
    if not plan.readmits and plan.on_stale == "wait" and plan.oversample == 1.0:
        trained = [group.uid for outcome in stream.outcomes for group in outcome.groups]
        attempts = {parse_uid(find_replayed_uid(uid) or uid)[2] for uid in trained}
        assert attempts <= {0}, "a prompt was readmitted without `readmits`"


@pytest.mark.parametrize("crashes", [[], [9.0], [20.0, 7.0, 11.0]])
def test_on_policy_draws_by_difficulty_survive_crashes_and_any_schedule(crashes: list[float]):
    plan = Plan(steps=12, max_staleness=0, rows=12, filter_rate=0.4)
    quick = replace(plan, seed=8, generators=3, scorers=2, generate_s=(0.0, 0.1), train_s=3.0)
    uids = [
        {group.uid for outcome in stream.outcomes for group in outcome.groups}
        for stream in (run_virtual(run_stream(plan)), run_virtual(run_stream(quick)))
    ]
    streams = run_virtual(crash_and_resume(plan, crashes=crashes, every=4))
    resumed = {g.uid for stream in streams for outcome in stream.outcomes for g in outcome.groups}
    assert uids[0] == uids[1] == resumed
    odd = sum(parse_uid(uid)[1] % 2 for uid in uids[0])
    assert odd < len(uids[0]) / 3, "rows that always pass are drawn as often as others"


@pytest.mark.parametrize("crashes", [[], [9.0], [20.0, 7.0, 11.0]])
def test_on_policy_replays_survive_crashes_and_any_schedule(crashes: list[float]):
    plan = Plan(steps=14, max_staleness=0, rows=40, filter_rate=0.4, replay_frac=0.4)
    # Several groups end at once, so that several are admitted at once.
    at_once = replace(
        plan, seed=8, slots=99, generate_s=(0.0, 0.0), score_s=(0.0, 0.0), train_s=3.0
    )
    undisturbed = run_virtual(run_stream(plan))
    streams = run_virtual(crash_and_resume(at_once, crashes=crashes, every=4))
    uids = list_admitted(undisturbed)
    assert uids == list_admitted(streams[-1]), "in another order"
    trained = {group.uid for outcome in undisturbed.outcomes for group in outcome.groups}
    sources = {uid: source for uid in uids if (source := find_replayed_uid(uid))}
    assert len(sources) > 5, "hardly any replay"
    assert {*sources.values()} <= trained - sources.keys(), "a replay of what was not trained"
    assert all(parse_uid(uid)[1] % 2 == 0 for uid in sources), "rows that always pass are replayed"
    assert not streams[-1].disk.generated.keys() & sources.keys(), "a replay was generated"


def list_admitted(stream: Stream) -> list[str]:
    """Return the uids that a run has admitted, over all its lives, in order."""
    metas = (record.meta for record in stream.disk.books.records)
    return [uid for meta in metas if meta["kind"] == "admit" for uid in meta["uids"]]


async def crash_and_resume(plan: Plan, *, crashes: list[float], every: int) -> list[Stream]:
    """Kill the whole run at these times (s after each start), and resume it after each crash.

    Lives alternate between publishing every version and `plan.publish_every`: a resumed run has to
    publish versions that groups were admitted at.
    """
    disk, streams = Disk.empty(plan), []
    for life, seconds in enumerate([*crashes, None]):
        life_plan = replace(plan, publish_every=plan.publish_every if life % 2 else 1)
        stream = build_stream(life_plan, disk, session=f"life-{life}")
        streams.append(stream)
        if await lives(stream, seconds, disturb=harm, checkpoint_every=every):
            break
    return streams


async def lives(
    stream: Stream,
    lifetime_s: float | None,
    *,
    disturb: Disturb | None = None,
    checkpoint_every: int = 0,
) -> bool:
    """Return whether a run ends within `lifetime_s`; otherwise kill all its processes."""
    try:
        async with asyncio.timeout(lifetime_s):
            await run_loops(stream, disturb=disturb, checkpoint_every=checkpoint_every)
    except TimeoutError:
        for shard in stream.shards:
            shard.kill()  # otherwise its calls in flight would still write to the journal
        return False
    return True


@example(plan=Plan(seed=5, steps=6, train_s=1.0), crashes=[14.0], every=2)
@given(plans, st.lists(st.floats(0.0, 40.0), min_size=1, max_size=3), st.integers(0, 3))
def test_resumed_run_trains_every_prompt_once(plan: Plan, crashes: list[float], every: int):
    plan = replace(plan, fail_rate=0.0, filter_rate=0.0, oversample=1.0, on_stale="wait")
    plan = replace(plan, max_attempts=1000)
    streams = run_virtual(crash_and_resume(plan, crashes=crashes, every=every))
    last_stream = streams[-1]
    counts = last_stream.ledger.counts
    assert counts.trained == counts.admitted == plan.steps * plan.groups_per_step
    assert counts.in_flight == 0

    digests: dict[int, set[int]] = {}
    for stream in streams:
        for version, digest in stream.trainer.digests.items():
            digests.setdefault(version, set()).add(digest)
    assert digests.keys() <= set(range(1, plan.steps + 1))
    records = last_stream.disk.books.records
    logged = [record.meta["version"] for record in records if record.meta["kind"] == "step"]
    assert logged == list(range(plan.steps)), "each step is logged once"
    for stream, after in itertools.pairwise(streams):
        replayed = stream.trainer.digests.keys() & after.trainer.digests.keys()
        for version in replayed - find_unlogged_versions(stream):
            assert stream.trainer.digests[version] == after.trainer.digests[version]


@in_virtual_time
async def test_resume_may_replay_steps_for_longer_than_a_stall():
    plan = Plan(
        steps=12, max_staleness=3, publish_every=4, train_s=30.0, stall_s=150.0, lease_s=1000.0
    )
    disk = Disk.empty(plan)
    first = build_stream(plan, disk)
    assert not await lives(first, 1000.0)
    assert len(first.outcomes) > 6, "without a checkpoint all steps are replayed"
    stream = build_stream(plan, disk, session="second")
    first_version = max(stream.ledger.in_flight.values())
    began = asyncio.get_running_loop().time()
    await run_loops(stream)
    replay_s = stream.step_ends[first_version - 1] - began
    assert replay_s > 2 * plan.stall_s, "the wait for a version exceeds stall_s"
    assert stream.ledger.counts.trained == plan.steps * plan.groups_per_step


@given(st.integers(0, 100_000), st.floats(1.0, 20.0))
def test_resume_publishes_a_version_that_groups_were_admitted_at(seed: int, crash: float):
    plan = Plan(seed=seed, steps=6, groups_per_step=2, filter_rate=0.4, max_attempts=1000)

    async def main() -> bool:
        disk = Disk.empty(plan)
        first = build_stream(plan, disk)
        if await lives(first, crash):
            return True
        second = build_stream(replace(plan, publish_every=2), disk, session="second")
        return await lives(second, None)

    assert run_virtual(main())


def find_unlogged_versions(stream: Stream) -> set[int]:
    """Return the version trained but not yet logged when the run died."""
    done = {outcome.version + 1 for outcome in stream.outcomes}
    return {version for version in stream.trainer.digests if version not in done}


@given(plans, st.floats(0.0, 40.0), st.integers(0, 3))
def test_resume_generates_no_finished_group_again(plan: Plan, crash: float, every: int):
    plan = replace(plan, fail_rate=0.0, filter_rate=0.0, on_stale="wait")

    async def main() -> tuple[set[str], Counter[str]]:
        disk = Disk.empty(plan)
        first = build_stream(plan, disk)
        await lives(first, crash, checkpoint_every=every)
        safe = {
            record.meta["uid"]
            for log in disk.shards
            for record in log.records
            if record.meta["kind"] == "put" and record.meta["stage"] == "generate"
        }
        disk.generated.clear()
        second = build_stream(plan, disk, session="second")
        await run_loops(second)
        return safe, disk.generated

    safe, generated = run_virtual(main())
    assert not safe & generated.keys()
    assert all(count == 1 for count in generated.values())


def test_hung_work_is_reported_and_redelivered():
    plan = Plan(stuck_attempts=1, on_stall="redeliver", stall_s=20.0, scorers=2)
    stream = run_virtual(run_stream(plan))
    assert stream.ledger.counts.dropped == 0
    (stall,) = [stall for stall in stream.stalls if stall.uid == "0:1:0"]
    assert (stall.lease.stage, stall.lease.attempt) == ("reward", 1)
    assert stall.lease.holder.startswith("reward-")
    assert 20.0 <= stall.age_s <= 26.0


@pytest.mark.parametrize(("on_stall", "waited"), [("abort", 20), ("warn", 120)])
@in_virtual_time
async def test_step_without_groups_ends_the_run(on_stall: str, waited: int):
    stream = build_stream(Plan(stuck_attempts=100, on_stall=on_stall, stall_s=20.0))
    message = rf"got no group for {waited} s.*0:1:0: held by reward-0 for"
    with pytest.raises(DeadlineError, match=message):
        await run_loops(stream)
    assert max(Counter(stall.stall_key for stall in stream.stalls).values()) == 1, "reported once"


outages = st.lists(
    st.tuples(st.floats(0.0, 60.0), st.floats(0.1, 300.0)).map(lambda o: (o[0], o[0] + o[1])),
    max_size=3,
).map(tuple)


@given(
    draw_plans(
        fail_rate=st.just(0.0),
        max_turns=st.sampled_from([0, 2]),
        greedy=st.just(False),
        judge_outages=outages,
        tool_outages=outages,
        micro_batch_tokens=st.integers(50, 200),
        lease_s=st.just(10.0),
        on_stall=st.sampled_from(["abort", "redeliver"]),
    )
)
def test_outages_of_services_lose_no_prompt_and_cost_no_attempt(plan: Plan):
    stream = run_virtual(run_stream(plan))
    check_accounts(stream)
    assert stream.ledger.counts.dropped == 0
    assert stream.ledger.counts.trained == plan.steps * plan.groups_per_step
    assert not stream.stalls
    assert sum(outcome.queue_stats.counts["redelivered"] for outcome in stream.outcomes) == 0


def test_a_longer_outage_than_allowed_ends_the_run_with_its_groups_in_flight():
    plan = Plan(judge_outages=((5.0, math.inf),), stall_s=50.0)
    reported: list[tuple[float, str]] = []

    async def run() -> Stream:
        stream = build_stream(plan)
        stream.control.on_outages = lambda found: reported.extend(
            (outage.down_s, outage.reason) for outage in found
        )
        with pytest.raises(
            ServiceOutageError,
            match=r"^http://judge: refused.*1800 s; a resumed run continues",
        ):
            await run_loops(stream)
        return stream

    stream = run_virtual(run())
    assert reported[0][0] <= 3.0 and {reason for _, reason in reported} == {"http://judge: refused"}
    counts = stream.ledger.counts
    assert counts.dropped == 0 and counts.in_flight == counts.admitted - counts.trained > 0

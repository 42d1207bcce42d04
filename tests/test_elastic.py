"""Elastic generators on a virtual clock: joining, leaving, deaths, partial rollouts."""

import asyncio
import itertools
import random
from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from streamrl.messages import GroupInfo
from streamrl.planner.simulator.virtual_loop import run_virtual
from streamrl.stream.stage_worker import PARTIAL_SAVE_INTERVAL_S
from tests.fake_stream import Disturb, Stream, drain_generator, run_stream
from tests.fakes import Plan, SampledToken
from tests.test_stream_faults import check_accounts, check_conservation, harm, plans

CALLS_S = 0.05
"""Upper bound of the latency of a `save_partials` call."""
SLOW = Plan(steps=5, generators=3, generate_s=(4.0, 30.0), stall_s=1000.0, lease_s=1000.0)


async def come_and_go(stream: Stream) -> None:
    """Start and drain generators at random times; the first one stays."""
    rng = random.Random(f"scale/{stream.plan.seed}")
    present = list(range(stream.plan.generators))
    for _ in range(rng.randint(1, 12)):
        await asyncio.sleep(rng.choice([0.003, 0.1, 1.0, 8.0]) * rng.random())
        check_conservation(stream)
        if rng.random() < 0.5 and len(present) > 1:
            await drain_generator(stream, present.pop())
        else:
            present.append(present[-1] + 1)
            stream.start_generator(present[-1])


async def come_go_and_die(stream: Stream) -> None:
    # Initial generators die and restart; added generators join and may leave.
    plan = stream.plan
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(harm(stream))
        rng = random.Random(f"more/{plan.seed}")
        for i in range(plan.generators, plan.generators + rng.randint(1, 6)):
            await asyncio.sleep(rng.choice([0.1, 5.0]) * rng.random())
            stream.start_generator(i)
            await asyncio.sleep(rng.choice([0.1, 5.0]) * rng.random())
            if rng.random() < 0.8:
                await drain_generator(stream, i)


@given(plans)
def test_elastic_generators_train_or_account_for_every_prompt_once(plan: Plan):
    stream = run_virtual(run_stream(plan, disturb=come_go_and_die))
    assert [outcome.version for outcome in stream.outcomes] == list(range(plan.steps))
    check_accounts(stream)


def slow_plans() -> st.SearchStrategy[Plan]:
    """Draw plans with groups long enough to start on one generator and finish on another."""
    return st.builds(
        lambda seed, staleness, greedy: replace(
            SLOW, seed=seed, max_staleness=staleness, greedy=greedy
        ),
        st.integers(0, 100_000),
        st.integers(0, 3),
        st.booleans(),
    )


def list_sampled_tokens(stream: Stream) -> list[SampledToken]:
    """Return the sampled tokens of all generators in order of time."""
    tokens = [token for generator in stream.samplers for token in generator.sampled]
    return sorted(tokens, key=lambda token: token.at_s)


def check_versions(stream: Stream) -> None:
    """Assert that trained tokens have the versions of their last sampling."""
    versions: dict[str, dict[int, int]] = {}
    for token in list_sampled_tokens(stream):
        versions.setdefault(token.uid, {})[token.position] = token.version
    for outcome in stream.outcomes:
        for group in outcome.groups:
            counts = Counter(versions[group.uid].values())
            size = stream.plan.group_size
            expected = tuple((version, size * counts[version]) for version in sorted(counts))
            assert isinstance(group.info, GroupInfo)
            assert group.info.version_tokens == expected


@given(slow_plans())
def test_leaving_generator_loses_no_sampled_token(plan: Plan):
    stream = run_virtual(run_stream(plan, disturb=come_and_go))
    check_accounts(stream)
    check_versions(stream)
    counts = Counter((token.uid, token.position) for token in list_sampled_tokens(stream))
    assert set(counts.values()) == {1}


def make_killer(deaths: list[tuple[float, str]]) -> Disturb:
    """Return a disturbance that kills and restarts generators, appending each death to `deaths`."""

    async def kill(stream: Stream) -> None:
        rng = random.Random(f"kill/{stream.plan.seed}")
        for _ in range(rng.randint(1, 8)):
            await asyncio.sleep(15.0 * rng.random())
            index = rng.randrange(stream.plan.generators)
            for task in stream.loops[f"generator-{index}"]:
                task.cancel()
            deaths.append((asyncio.get_running_loop().time(), f"generator-{index}"))
            await asyncio.sleep(0.1)
            await stream.queue.release_holder(f"generator-{index}")
            stream.start_generator(index)

    return kill


@given(slow_plans())
def test_death_loses_only_tokens_sampled_since_the_last_save(plan: Plan):
    plan = replace(plan, max_attempts=100)
    deaths: list[tuple[float, str]] = []
    stream = run_virtual(run_stream(plan, disturb=make_killer(deaths)))
    check_accounts(stream)
    check_versions(stream)
    sampled_at: dict[tuple[str, int], float] = {}
    for token in list_sampled_tokens(stream):
        lost_at = sampled_at.setdefault((token.uid, token.position), token.at_s)
        if lost_at < token.at_s:
            sampled_at[token.uid, token.position] = token.at_s
            nearest = min(at for at, _ in deaths if at >= lost_at)
            assert nearest - lost_at <= PARTIAL_SAVE_INTERVAL_S + CALLS_S


def test_generator_without_a_version_leases_no_work():
    plan = Plan(steps=30, generators=1, max_staleness=0, newcomer_pull_s=60.0, pull_s=0.0)

    async def scale(stream: Stream) -> None:
        while len(stream.outcomes) < 5:
            await asyncio.sleep(0.1)
        stream.start_generator(1)

    baseline, stream = run_virtual(run_stream(plan)), run_virtual(run_stream(plan, disturb=scale))
    slowest = max(b - a for a, b in itertools.pairwise(baseline.step_ends))
    assert max(b - a for a, b in itertools.pairwise(stream.step_ends)) <= 2 * slowest
    assert stream.samplers[1].sampled, "the generator samples after its first pull"


def test_generator_without_a_version_leaves_at_once():
    plan = Plan(steps=10, generators=1, newcomer_pull_s=1000.0)

    async def scale(stream: Stream) -> None:
        while len(stream.outcomes) < 3:
            await asyncio.sleep(0.1)
        stream.start_generator(1)
        await asyncio.sleep(0.5)
        clock = asyncio.get_running_loop().time
        began = clock()
        await drain_generator(stream, 1)
        assert clock() - began < 0.1

    check_accounts(run_virtual(run_stream(plan, disturb=scale)))

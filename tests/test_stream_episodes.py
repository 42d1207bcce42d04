"""Guarantees of a stream of episodes, with the real driver, on a virtual clock."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.planner.simulator.virtual_loop import run_virtual
from tests.fake_episodes import SLOW_S, FakeEpisodeGenerator
from tests.fake_stream import EPISODES, Stream, draw_plans, run_stream
from tests.fakes import Plan
from tests.test_stream_faults import FAULTS, check_accounts, harm

LONG_S = 1e6
SLOW = Plan(
    steps=4,
    groups_per_step=2,
    max_turns=3,
    generators=1,
    generate_s=(1.0, 1.0),
    environment_s=(0.5, 2.0),
    train_s=1.0,
    slow_prompt="0:0:0",
    stall_s=LONG_S,
)
"""Steps of seconds, and a prompt whose environment takes a minute for each turn."""


def list_waits(stream: Stream) -> list[tuple[str, float, float]]:
    """Return uid, start and end of each time that an episode waited for its environment."""
    generators = [s for s in stream.samplers if isinstance(s, FakeEpisodeGenerator)]
    return [wait for generator in generators for wait in generator.waits]


def count_sampled(stream: Stream, uid: str) -> dict[int, int]:
    """Return how many tokens of a prompt each version sampled, as the engines noted them."""
    tokens = [token for sampler in stream.samplers for token in sampler.sampled]
    return dict(Counter(token.version for token in tokens if token.uid == uid))


@given(
    draw_plans(
        **EPISODES,
        on_stale=st.sampled_from(["wait", "drop"]),
        one_at_a_time=st.booleans(),
        # Steps pass while episodes wait for their environment.
        train_s=st.sampled_from([0.0, 0.3]),
        stall_s=st.just(LONG_S),
    )
)
def test_the_staleness_bound_holds_for_each_token_of_an_episode(plan: Plan):
    stream = run_virtual(run_stream(plan))
    assert [outcome.version for outcome in stream.outcomes] == list(range(plan.steps))
    check_accounts(stream)
    for outcome in stream.outcomes:
        for group in outcome.groups:
            sampled = count_sampled(stream, group.uid)
            assert dict(group.info.version_tokens) == sampled
            assert outcome.version - min(sampled) <= plan.max_staleness


def run_slow(plan: Plan) -> Stream:
    stream = run_virtual(run_stream(plan))
    check_accounts(stream)
    num_turns = sum(uid == plan.slow_prompt for uid, _, _ in list_waits(stream))
    assert num_turns > plan.group_size, "its episodes have several turns"
    return stream


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_the_step_at_the_bound_waits_for_an_episode_longer_than_the_bound(max_staleness: int):
    stream = run_slow(replace(SLOW, max_staleness=max_staleness))
    steps = {group.uid: outcome.version for outcome in stream.outcomes for group in outcome.groups}
    assert steps[SLOW.slow_prompt] == max_staleness
    assert min(count_sampled(stream, SLOW.slow_prompt)) == 0, "its first turn is of version 0"
    last_wait_end = max(end for uid, _, end in list_waits(stream) if uid == SLOW.slow_prompt)
    is_before = [end < last_wait_end for end in stream.step_ends]
    assert is_before == [version < max_staleness for version in range(SLOW.steps)]
    if max_staleness:
        assert max(count_sampled(stream, SLOW.slow_prompt)) > 0, "and its last of a newer one"


def test_an_episode_longer_than_the_bound_is_dropped_as_stale_and_its_prompt_sampled_again():
    plan = replace(SLOW, max_staleness=1, on_stale="drop", steps=6)
    stream = run_virtual(run_stream(plan))
    check_accounts(stream)
    ended = {uid: how.cause for uid, how in stream.ended}
    assert ended["0:0:0"] == "stale" and set(ended.values()) == {"stale"}
    trained = [group.uid for outcome in stream.outcomes for group in outcome.groups]
    assert "0:0:1" in trained
    assert stream.step_ends[-2] < SLOW_S, "only the last step, without other prompts, waits"


@given(draw_plans(**{**FAULTS, **EPISODES}, environment_fail_rate=st.sampled_from([0.0, 0.05])))
def test_any_deaths_in_mid_episode_leave_every_prompt_trained_once_or_accounted_for(plan: Plan):
    stream = run_virtual(run_stream(plan, disturb=harm))
    assert [outcome.version for outcome in stream.outcomes] == list(range(plan.steps))
    check_accounts(stream)


def test_groups_whose_environment_fails_are_dropped_with_the_cause_and_replaced():
    plan = replace(SLOW, environment_fail_rate=0.3, steps=6, slow_prompt="", seed=1)
    stream = run_virtual(run_stream(plan))
    check_accounts(stream)
    counts = stream.ledger.counts
    assert dict(counts.drops) == {"environment_error": counts.dropped} and counts.dropped
    assert counts.trained == plan.steps * plan.groups_per_step


def test_on_shared_devices_the_trainer_trains_while_all_open_episodes_wait():
    # The episodes of the second prompt wait for a minute, while those of the first are trained.
    plan = replace(
        SLOW, groups_per_step=1, max_staleness=1, slow_prompt="0:1:0", one_at_a_time=True
    )
    stream = run_virtual(run_stream(plan))
    check_accounts(stream)
    spans = stream.recorders["trainer"].drain_spans()
    first_step = next(span for span in spans if span.name == "train")
    waits = [(start, end) for uid, start, end in list_waits(stream) if uid == plan.slow_prompt]
    first_waits = sorted(waits)[: plan.group_size]
    assert all(start < first_step.start_s for start, _ in first_waits)
    assert all(first_step.end_s < end for _, end in first_waits)

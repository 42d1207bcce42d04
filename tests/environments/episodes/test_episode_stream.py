"""Episodes in the stream, in virtual time: staleness over long ones, smaller groups, masks."""

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.buffer import StageSchema
from streamrl.buffer.encoding.column_codec import encode_columns
from streamrl.buffer.encoding.wire_types import ColumnCommit
from streamrl.buffer.schema import ColumnContract
from streamrl.environments.interface import EnvironmentStep, ResetResult
from streamrl.errors import ContractError, EpisodeError
from streamrl.messages import (
    EPISODE_COLUMNS,
    ROLLOUT_COLUMNS,
    Columns,
    GroupInfo,
    GroupLease,
    Prompt,
    TokenSource,
    make_rollout_seeds,
    measure_columns,
)
from streamrl.simulator.replicas.virtual_loop import run_virtual
from streamrl.stream.protocols import FinishedCallback, SampleFunction, StageContext
from streamrl.stream.run_state import STALE_CAUSE
from streamrl.weights import WeightLoadStats
from tests.environments.episodes.scripted import (
    ScriptedHosts,
    ScriptedSampler,
    ScriptedSession,
    make_driver,
    run_group,
    say,
)
from tests.fake_stream import Stream, draw_plans, run_stream
from tests.fakes import FakeGenerator, Plan
from tests.virtual_time import in_virtual_time

DONE = EnvironmentStep(done=True)


class EpisodeGenerator(FakeGenerator):
    """Generator whose driver runs episodes; every token has the version served when it is sampled.

    An environment answers each turn after as long as a group takes in `FakeGenerator`, and fails
    at the plan's rate.
    """

    min_episodes: int | None = None

    def __init__(self, plan: Plan, rng: random.Random, generated: Counter[str]) -> None:
        super().__init__(plan, rng, generated)
        self._sampler = ScriptedSampler(lambda context, seed: "ab;"[seed % 3 :])
        self._sampler.token_s = rng.uniform(0.0, 1.0)

    async def load_weights(self, tensors: Mapping[str, Any], version: int) -> WeightLoadStats:
        stats = await super().load_weights(tensors, version)
        self._sampler.version = version
        return stats

    def make_sample_function(self, stage: StageContext) -> SampleFunction:
        hosts = ScriptedHosts(self._open_session)
        driver = make_driver(self._sampler, hosts, slots=4, timeout_s=1e9)

        async def run_episodes(
            prompt: Prompt, partials: Columns | None, finished: FinishedCallback
        ) -> Columns:
            return await driver.run_group(
                prompt,
                seeds=make_rollout_seeds(0, prompt.uid, self._plan.group_size),
                environment_seed=0,
                compute=stage.record_compute,
                min_episodes=self.min_episodes,
                on_finished=finished,
            )

        return run_episodes

    def _open_session(self) -> ScriptedSession:
        answers: list[object] = [*(say("go") for _ in range(self._rng.randint(0, 3))), DONE]
        if self._rng.random() < self._plan.fail_rate:
            answers[-1] = EpisodeError("the environment's process ended")
        steps = [(self._rng.uniform(*self._plan.generate_s), answer) for answer in answers]
        return ScriptedSession(steps, ResetResult(messages=[{"role": "user", "content": "?"}]))


plans = draw_plans(
    on_stale=st.sampled_from(["wait", "drop"]),
    groups_per_step=st.integers(1, 3),
    micro_batch_tokens=st.integers(25, 120),
    generate_s=st.sampled_from([(0.0, 0.1), (0.1, 20.0), (20.0, 60.0)]),
    train_s=st.sampled_from([0.0, 0.3]),
    one_at_a_time=st.booleans(),
    greedy=st.just(False),
    stall_s=st.just(5000.0),
)


def list_staleness(stream: Stream) -> list[int]:
    return [
        outcome.version - version
        for outcome in stream.outcomes
        for group in outcome.groups
        for version, _ in group.info.version_tokens
    ]


@given(plans)
def test_the_staleness_bound_holds_for_episodes_of_any_length(plan: Plan):
    stream = run_virtual(run_stream(plan, generator_class=EpisodeGenerator))
    assert all(0 <= staleness <= plan.max_staleness for staleness in list_staleness(stream))
    trained = [group.uid for outcome in stream.outcomes for group in outcome.groups]
    assert len(trained) == len(set(trained)) == plan.steps * plan.groups_per_step
    counts = stream.ledger.counts
    assert counts.admitted == counts.trained + counts.dropped + counts.in_flight


LONG = Plan(
    seed=1,
    steps=8,
    groups_per_step=2,
    max_staleness=1,
    depth=4,
    on_stale="drop",
    generate_s=(0.1, 60.0),
    train_s=0.1,
    stall_s=5000.0,
    max_attempts=9,
)
"""Some episodes take longer than several steps."""


def test_episodes_longer_than_the_bound_are_dropped_or_waited_for():
    dropping = run_virtual(run_stream(LONG, generator_class=EpisodeGenerator))
    assert dict(dropping.ledger.counts.drops)[STALE_CAUSE] > 0
    assert max(list_staleness(dropping)) == 1
    plan = replace(LONG, on_stale="wait", depth=None)
    waiting = run_virtual(run_stream(plan, generator_class=EpisodeGenerator))
    assert not waiting.ledger.counts.dropped
    assert max(list_staleness(waiting)) == 1
    mixed = [
        group
        for outcome in waiting.outcomes
        for group in outcome.groups
        if len(group.info.version_tokens) > 1
    ]
    assert mixed, "the weights were updated amid episodes"


class LenientGenerator(EpisodeGenerator):
    min_episodes = 2


def test_a_group_without_its_failed_episodes_is_trained_with_the_others():
    plan = Plan(seed=2, steps=4, group_size=3, fail_rate=0.6, train_s=0.1, stall_s=5000.0)
    stream = run_virtual(run_stream(plan, generator_class=LenientGenerator))
    sizes = {
        group.uid: len(group.info.lengths) for step in stream.outcomes for group in step.groups
    }
    assert set(sizes.values()) == {2, 3}
    picks = [pick for step in stream.trainer.trained.values() for pick in step]
    assert sorted(picks) == sorted((uid, i) for uid, size in sizes.items() for i in range(size))
    assert dict(stream.ledger.counts.drops)["environment_error"] > 0, "of groups of fewer than 2"


@in_virtual_time
async def test_a_mask_that_trains_the_environments_tokens_is_refused_at_its_commit():
    """Such a mask teaches the policy to write observations, while rewards rise all the same."""
    hosts = ScriptedHosts(lambda: ScriptedSession([say("go"), DONE]))
    columns = await run_group(make_driver(ScriptedSampler(lambda context, seed: "a;"), hosts))
    produced = (*ROLLOUT_COLUMNS, *EPISODE_COLUMNS)
    contract = ColumnContract({"generate": StageSchema((), produced)})

    def commit(columns: Columns) -> None:
        lease = GroupLease(1, "0:0:0", "generate", 1, 0.0)
        info = GroupInfo.from_columns(columns)
        sizes = measure_columns(columns)
        contract.check_commit(ColumnCommit(lease, encode_columns(columns), sizes, info), info)

    commit(columns)
    for source in (TokenSource.PROMPT, TokenSource.SCAFFOLD, TokenSource.OBSERVATION):
        mask = np.logical_or(columns["loss_mask"], columns["token_source"] == source)
        with pytest.raises(ContractError, match="a sampled token has no policy_version"):
            commit({**columns, "loss_mask": mask})

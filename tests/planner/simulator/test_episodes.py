"""Simulated episodes: turns in the engine alternate with the time of their environment."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.messages import Array
from streamrl.placement.placements import Placement
from streamrl.planner.problem.problem import RunOptions
from streamrl.planner.problem.stage_timings import ScoreTiming, StageTimings, WeightsTiming
from streamrl.planner.problem.workload import (
    EpisodeTurns,
    EpisodeWork,
    FixedLength,
    TurnWork,
    Workload,
)
from streamrl.planner.simulator.simulated_engine import SimulatedEngine
from streamrl.planner.simulator.simulation import run_simulation
from streamrl.stream.stage_worker import ConcurrencyLimit
from tests.planner.simulator.test_invariants import (
    COLUMNS,
    SimulationCase,
    cases,
    check_devices,
    check_ledger,
)
from tests.planner.simulator.test_simulation import APART, FLOW, GENERATOR, TIMINGS, TOGETHER

FREE_SCORE = ScoreTiming(1, 100, batch_s=0.0, rollout_s=0.0, token_s=0.0)
NO_PULLS = replace(TIMINGS, weights={}, score={"reward": FREE_SCORE})
"""A token takes a second, a score nothing, training 2 + 1 seconds."""
AFTER_GENERATION_S = 2 + 1


def make_episode(
    *tokens: int, delay_s: float = 0.0, reset_s: float = 0.0, observed_tokens: int = 0
) -> EpisodeWork:
    """Return an episode whose environment takes `delay_s` after every turn."""
    turns = tuple(
        TurnWork(delay_s if i else reset_s, observed_tokens if i else 0, count)
        for i, count in enumerate(tokens)
    )
    return EpisodeWork(turns, delay_s)


def make_workload(*episodes: EpisodeWork, groups: int = 2, **options: Any) -> Workload:
    turns = EpisodeTurns(episodes)
    options = {"micro_batch_tokens": 100, "turns": turns, **options}
    return Workload(groups, 1, 1, options.pop("lengths", turns.lengths), **options)


def find_step_ends(
    workload: Workload,
    timings: StageTimings = NO_PULLS,
    placement: Placement = APART,
    *,
    steps: int = 1,
    open_episodes: int | None = None,
) -> list[float]:
    options = RunOptions(open_episodes=open_episodes)
    result = run_simulation(
        FLOW, placement, timings, workload, steps=steps, seed=1, run_options=options
    )
    return list(result.step_ends)


@pytest.mark.parametrize("delay_s", [0.0, 0.2, 2.0])
def test_open_episodes_take_their_turns_side_by_side(delay_s: float):
    workload = make_workload(make_episode(4, 4, 4, delay_s=delay_s))
    expected = 12 + 3 * delay_s + AFTER_GENERATION_S
    assert find_step_ends(workload) == [pytest.approx(expected)]


@pytest.mark.parametrize("delay_s", [0.0, 0.2, 2.0])
def test_an_open_episode_uses_the_slot_of_another_in_its_environment(delay_s: float):
    # One slot, two open episodes: the engine is busy for 24 s, whatever the delay below 4 s.
    workload = make_workload(make_episode(4, 4, 4, delay_s=delay_s))
    timings = replace(NO_PULLS, generator=replace(GENERATOR, max_running=1))
    ends = find_step_ends(workload, timings, open_episodes=2)
    assert ends == [pytest.approx(24 + delay_s + AFTER_GENERATION_S)]


def test_observations_are_prefilled_and_trained_but_not_sampled():
    workload = make_workload(make_episode(4, 4, observed_tokens=6), groups=1)
    generator = replace(GENERATOR, prefill_token_s=0.25)
    train = replace(TIMINGS.train["policy"], token_s=0.125)
    timings = replace(NO_PULLS, generator=generator, train={"policy": train})
    # The prompt has one token; the turns before the observation are in the prefix cache.
    generation_s = 0.25 + 4 + 6 * 0.25 + 4
    rollout_tokens = 1 + 4 + 6 + 4
    expected = generation_s + AFTER_GENERATION_S + 0.125 * rollout_tokens
    assert find_step_ends(workload, timings) == [expected]
    result = run_simulation(FLOW, APART, timings, workload, steps=1, seed=1)
    (group,) = result.outcomes[0].groups
    assert group.info.lengths == (rollout_tokens,)
    assert group.info.version_tokens == ((0, 8),)
    assert group.info.num_turns == 2


def test_a_new_version_makes_a_turn_prefill_its_whole_context():
    # One step ahead, the second step's group waits in its environment while version 1 arrives.
    workload = make_workload(make_episode(4, 4, delay_s=30.0), groups=1)
    generator = replace(GENERATOR, prefill_token_s=0.25)
    ahead, train = replace(APART, max_staleness=1), TIMINGS.train["policy"]

    def find_turn_durations(pull_s: float) -> list[float]:
        timings = replace(
            TIMINGS,
            generator=generator,
            train={"policy": replace(train, micro_batch_s=10.0)},
            weights={"generate": WeightsTiming(publish_s=0.0, pull_s=pull_s)},
        )
        result = run_simulation(FLOW, ahead, timings, workload, steps=3, seed=1)
        turns = [span for span in result.spans if span.args.get("uid") == "0:2:0"]
        return [span.end_s - span.start_s for span in sorted(turns, key=lambda t: t.start_s)]

    # Version 2 is loaded between the turns of the third group, or after both.
    assert find_turn_durations(0.0) == pytest.approx([0.25 + 4, 5 * 0.25 + 4])
    assert find_turn_durations(40.0) == pytest.approx([0.25 + 4, 4])


class PairedLengths(FixedLength):
    """Lengths of 4 tokens for the first prompt and 8 for the second, alternating."""

    def sample(self, count: int, rng: np.random.Generator) -> Array:
        return np.resize(np.array([4, 4, 8, 8], np.int64), count)


def test_shared_devices_are_free_while_all_episodes_are_in_their_environment():
    turns = EpisodeTurns((EpisodeWork((TurnWork(0.0, 0, 4),)), make_episode(4, 4, delay_s=10.0)))
    workload = make_workload(*turns.episodes, lengths=PairedLengths(8))
    timings = replace(TIMINGS, weights={})
    result = run_simulation(FLOW, TOGETHER, timings, workload, steps=1, seed=1)
    scores = [(span.start_s, span.end_s) for span in result.spans if span.name == "reward"]
    # The first group ends at 4 and is scored before the second takes its next turn at 14.
    assert scores == [(4.0, 4.5), (28.0, 28.5)]


class CheckedEngine(SimulatedEngine[Any]):
    """Engine that checks its limits after every change."""

    def add_group(self, *args: Any, **options: Any) -> None:
        super().add_group(*args, **options)
        assert self.num_running <= self._timing.max_running

    def advance_to(self, now: float) -> list[Any]:
        done = super().advance_to(now)
        assert self.num_running <= self._timing.max_running
        return done

    def reserve_slots(self, slots: ConcurrencyLimit, count: int) -> None:
        assert slots.free_slots > 0
        super().reserve_slots(slots, count)
        assert slots.free_slots > -slots.slots_per_group


episodes = st.builds(
    EpisodeWork,
    st.lists(
        st.builds(TurnWork, st.sampled_from([0.0, 0.4, 3.0]), st.integers(0, 2), st.integers(1, 4)),
        min_size=1,
        max_size=3,
    ).map(tuple),
    st.sampled_from([0.0, 0.7]),
)


@st.composite
def episode_cases(draw: st.DrawFn) -> SimulationCase:
    """Draw a simulation of episodes; greedy completions have none."""
    columns = draw(st.lists(st.sampled_from(COLUMNS[:2]), unique=True).map(tuple))
    turns = EpisodeTurns(tuple(draw(st.lists(episodes, min_size=1, max_size=4))))
    case = replace(draw(cases), columns=columns)
    workload = replace(case.workload, lengths=turns.lengths, turns=turns)
    options = replace(case.run_options, open_episodes=draw(st.none() | st.integers(1, 9)))
    return replace(case, workload=workload, run_options=options)


@given(episode_cases())
def test_ledger_devices_and_slots_hold_for_episodes(case: SimulationCase):
    with patch("streamrl.planner.simulator.replicas.SimulatedEngine", CheckedEngine):
        result = case.run()
    check_ledger(case, result)
    check_devices(case, result)

"""Turns of episodes: drawn from distributions, and matched to sampled tokens."""

import numpy as np
import pytest

from streamrl.planner.problem.workload import (
    EmpiricalLengths,
    EnvironmentTime,
    EpisodeTurns,
    EpisodeWork,
    FixedLength,
    LognormalLengths,
    TurnParameters,
    TurnWork,
    Workload,
)


def test_fixed_turns_make_one_episode():
    parameters = TurnParameters(FixedLength(3), FixedLength(10), 4, EnvironmentTime(2.0), 100)
    turns = parameters.draw_episodes()
    first, later = TurnWork(0.0, 0, 10), TurnWork(2.0, 4, 10)
    assert turns.episodes == (EpisodeWork((first, later, later), 2.0),)
    assert turns.lengths.samples == (30,)
    assert (turns.mean_turns, turns.mean_observed_tokens, turns.mean_environment_s) == (3, 8, 6)
    workload = Workload(4, 2, 7, turns.lengths, turns=turns)
    assert (workload.rollout_tokens, workload.max_rollout_tokens) == (7 + 30 + 8, 45)


def test_an_episode_is_cut_at_max_tokens():
    parameters = TurnParameters(FixedLength(5), FixedLength(10), 4, EnvironmentTime(0.0), 30)
    (episode,) = parameters.draw_episodes().episodes
    assert [turn.sampled_tokens for turn in episode.turns] == [10, 10, 2]
    assert episode.sampled_tokens + episode.observed_tokens == 30
    # No room for a token after the observation: the episode ends with the turn before.
    parameters = TurnParameters(FixedLength(5), FixedLength(10), 4, EnvironmentTime(0.0), 28)
    (episode,) = parameters.draw_episodes().episodes
    assert [turn.sampled_tokens for turn in episode.turns] == [10, 10]


def test_means_follow_the_distributions():
    turns = EmpiricalLengths.from_samples([1, 2, 6])
    parameters = TurnParameters(
        turns, LognormalLengths(20, 0.5, 200), 3, EnvironmentTime(1.5, 0.4), 10_000
    )
    episodes = parameters.draw_episodes()
    assert episodes == parameters.draw_episodes()
    assert episodes.mean_turns == pytest.approx(3, rel=0.05)
    assert episodes.mean_observed_tokens == pytest.approx(2 * 3, rel=0.05)
    mean_s = 1.5 * np.exp(0.4**2 / 2)
    assert episodes.mean_environment_s == pytest.approx(3 * mean_s, rel=0.05)
    mean_tokens = LognormalLengths(20, 0.5, 200).mean
    assert episodes.lengths.mean == pytest.approx(3 * mean_tokens, rel=0.05)


def test_a_rollout_has_the_turns_of_an_episode_with_as_many_sampled_tokens():
    short = EpisodeWork((TurnWork(0.0, 0, 5),), 1.0)
    split = EpisodeWork((TurnWork(0.0, 0, 2), TurnWork(1.0, 3, 3)), 1.0)
    long = EpisodeWork((TurnWork(0.0, 0, 9),), 2.0)
    turns, rng = EpisodeTurns((short, split, long)), np.random.default_rng(0)
    assert {turns.draw_episode(5, rng) for _ in range(50)} == {short, split}
    assert turns.draw_episode(9, rng) == long

"""Turns of episodes: equally likely episodes, recorded in a run or drawn from distributions."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

import numpy as np

from streamrl.errors import ConfigError
from streamrl.messages import Array
from streamrl.planner.problem.workload import (
    MAX_SIGMA,
    EmpiricalLengths,
    EpisodeWork,
    LengthDistribution,
    TurnWork,
)

NUM_EPISODES = 4096
"""Episodes drawn to represent distributions of turns, tokens and seconds."""


@dataclass(frozen=True)
class EnvironmentTime:
    """Lognormal seconds of an environment's answer, at most `limit_s`; constant if `sigma` is 0."""

    median_s: float
    sigma: float = 0.0
    limit_s: float = math.inf

    def __post_init__(self) -> None:
        if not 0 <= self.median_s < math.inf or not 0 <= self.sigma <= MAX_SIGMA:
            raise ConfigError(
                f"environment time: {self.median_s:g}:{self.sigma:g}: the median must be at least"
                f" 0 and finite, sigma from 0 to {MAX_SIGMA}"
            )

    def sample(self, count: int, rng: np.random.Generator) -> Array:
        """Return `count` random times, s, float64 [count]."""
        times = self.median_s * np.exp(self.sigma * rng.standard_normal(count))
        return np.asarray(np.minimum(times, self.limit_s))


@dataclass(frozen=True)
class EpisodeTurns:
    """Turns of rollouts as those of equally likely `episodes`.

    A rollout of so many sampled tokens has the turns of a random episode of as many. So `lengths`
    of a workload must hold only lengths of these episodes; `lengths` of this class does.
    """

    episodes: tuple[EpisodeWork, ...]

    has_environment = True

    @cached_property
    def lengths(self) -> EmpiricalLengths:
        """Distribution of the sampled tokens of an episode."""
        return EmpiricalLengths.from_samples([e.sampled_tokens for e in self.episodes])

    @cached_property
    def mean_turns(self) -> float:
        return fmean(len(episode.turns) for episode in self.episodes)

    @cached_property
    def mean_observed_tokens(self) -> float:
        return fmean(episode.observed_tokens for episode in self.episodes)

    @cached_property
    def mean_environment_s(self) -> float:
        return fmean(episode.environment_s for episode in self.episodes)

    @cached_property
    def _episodes_by_tokens(self) -> Mapping[int, Sequence[EpisodeWork]]:
        by_tokens = defaultdict(list)
        for episode in self.episodes:
            by_tokens[episode.sampled_tokens].append(episode)
        return by_tokens

    def draw_episode(self, sampled_tokens: int, rng: np.random.Generator) -> EpisodeWork:
        episodes = self._episodes_by_tokens[sampled_tokens]
        return episodes[int(rng.integers(len(episodes)))]

    @cached_property
    def _completion_lengths(self) -> EmpiricalLengths:
        return EmpiricalLengths.from_samples(
            [episode.sampled_tokens + episode.observed_tokens for episode in self.episodes]
        )

    def add_observed_tokens(self, lengths: LengthDistribution) -> LengthDistribution:
        return self._completion_lengths


@dataclass(frozen=True)
class TurnParameters:
    """Independent distributions of an episode's turns, and the limits of the run.

    turns: number of turns. turn_lengths: sampled tokens of a turn. observed_tokens: tokens between
    two turns. environment: seconds after each turn. max_tokens: most tokens after the prompt.
    """

    turns: LengthDistribution
    turn_lengths: LengthDistribution
    observed_tokens: int
    environment: EnvironmentTime
    max_tokens: int

    def draw_episodes(self) -> EpisodeTurns:
        """Return random episodes, the same for the same parameters; one if all are equal."""
        rng = np.random.default_rng(0)
        num_turns = self.turns.sample(NUM_EPISODES, rng)
        firsts = np.cumsum(num_turns) - num_turns
        total = int(num_turns.sum())
        tokens = self.turn_lengths.sample(total, rng).tolist()
        seconds = self.environment.sample(total, rng).tolist()
        episodes = tuple(
            self._make_episode(tokens[first : first + count], seconds[first : first + count])
            for first, count in zip(firsts.tolist(), num_turns.tolist(), strict=True)
        )
        return EpisodeTurns(episodes if len(set(episodes)) > 1 else episodes[:1])

    def _make_episode(self, tokens: Sequence[int], seconds: Sequence[float]) -> EpisodeWork:
        """Return the episode of these turns, cut where it would exceed `max_tokens`."""
        turns = tuple(self._cut_turns(tokens, seconds))
        return EpisodeWork(turns, seconds[len(turns) - 1])

    def _cut_turns(self, tokens: Sequence[int], seconds: Sequence[float]) -> Iterator[TurnWork]:
        free_tokens = self.max_tokens
        for i, sampled_tokens in enumerate(tokens):
            observed_tokens = self.observed_tokens if i else 0
            free_tokens -= observed_tokens
            if free_tokens < 1:
                return
            turn_tokens = min(sampled_tokens, free_tokens)
            free_tokens -= turn_tokens
            yield TurnWork(seconds[i - 1] if i else 0.0, observed_tokens, turn_tokens)

"""Workload of a training step: number and lengths of rollouts, number of updates."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import NormalDist

import numpy as np

from streamrl.errors import ConfigError
from streamrl.messages import Array

MAX_FILTERED_FRACTION = 0.995
"""Largest accepted fraction of filtered groups: a run then samples 200 groups per trained group."""


_STANDARD_NORMAL = NormalDist()
_NUM_QUANTILES = 64
MAX_SIGMA = 5
"""Largest sigma of lognormal lengths; above, nearly all lengths are one token or the limit."""


def _compute_longest_quantile_ranks(count: int) -> list[float]:
    """Return quantiles, all equally likely, at which the longest of `count` samples lies.

    With F the distribution function, F(longest) is distributed as u ** (1 / count) for uniform u.
    """
    return [((i + 0.5) / _NUM_QUANTILES) ** (1 / count) for i in range(_NUM_QUANTILES)]


@dataclass(frozen=True)
class LognormalLengths:
    """Lognormal completion lengths, cut off at `limit`; `sigma` belongs to the logarithm."""

    median: float
    sigma: float
    limit: int

    def __post_init__(self) -> None:
        is_valid = 1 <= self.median < math.inf and 0 < self.sigma <= MAX_SIGMA
        if not is_valid or self.limit < 1:
            raise ConfigError(
                f"--lengths lognormal:{self.median:g}:{self.sigma:g}: the median must be at least"
                f" 1, sigma above 0 and at most {MAX_SIGMA}, the limit {self.limit} at least 1"
            )

    @cached_property
    def mean(self) -> float:
        # E[min(X, limit)] = E[X; X < limit] + limit * P(X >= limit).
        edge = (math.log(self.limit) - math.log(self.median)) / self.sigma
        below = math.exp(math.log(self.median) + self.sigma**2 / 2) * _STANDARD_NORMAL.cdf(
            edge - self.sigma
        )
        return below + self.limit * (1 - _STANDARD_NORMAL.cdf(edge))

    @property
    def max_tokens(self) -> int:
        return self.limit

    def sample(self, count: int, rng: np.random.Generator) -> Array:
        drawn = rng.lognormal(math.log(self.median), self.sigma, count)
        return np.clip(np.rint(drawn), 1, self.limit).astype(np.int64)

    def quantiles(self, parts: Array) -> Array:
        # Every actor imports this module; only planning needs scipy.
        from scipy.special import ndtri

        lengths = self.median * np.exp(self.sigma * ndtri(parts))
        return np.asarray(np.clip(lengths, 1.0, float(self.limit)))

    def expected_longest(self, count: int) -> float:
        lengths = [
            self.median * math.exp(self.sigma * _STANDARD_NORMAL.inv_cdf(rank))
            for rank in _compute_longest_quantile_ranks(count)
        ]
        return float(np.minimum(lengths, self.limit).mean())


@dataclass(frozen=True)
class EmpiricalLengths:
    """Completion lengths drawn with replacement from measured `samples`, in ascending order."""

    samples: tuple[int, ...]

    @classmethod
    def from_samples(cls, lengths: Sequence[int]) -> "EmpiricalLengths":
        return cls(tuple(sorted(int(length) for length in lengths)))

    @cached_property
    def mean(self) -> float:
        return float(np.mean(self.samples))

    @property
    def max_tokens(self) -> int:
        return max(self.samples)

    def sample(self, count: int, rng: np.random.Generator) -> Array:
        return rng.choice(np.asarray(self.samples, np.int64), count)

    def quantiles(self, parts: Array) -> Array:
        return np.asarray(np.quantile(self.samples, parts), np.float64)

    def expected_longest(self, count: int) -> float:
        at = np.multiply(_compute_longest_quantile_ranks(count), len(self.samples)).astype(int)
        return float(np.asarray(self.samples)[at].mean())


def make_fixed_lengths(tokens: int) -> EmpiricalLengths:
    """Return the distribution in which all completions have the same length."""
    return EmpiricalLengths((tokens,))


LengthDistribution = LognormalLengths | EmpiricalLengths
"""Distribution of completion lengths, in tokens.

`sample` returns random lengths, int64 [count], each at least 1. `quantiles` returns the lengths at
quantiles `parts` (0 to 1), float64 with the shape of `parts`.
"""


@dataclass(frozen=True)
class Workload:
    """Work of a training step.

    groups_per_step, group_size: as in a run's config.
    prompt_tokens: mean length of a prompt.
    lengths: distribution of the tokens after the prompt of a rollout.
    epochs, mini_batches: passes over each rollout, and updates per epoch.
    micro_batch_tokens: maximum tokens of a rank's micro-batch.
    requires_whole_step: whether training waits for all groups of a step, as streamrl does with
      several updates.
    filtered_fraction: fraction of sampled groups that a filter rejects and the run replaces.
    longest_rollout: (prompt, completion) tokens of the longest rollout that engines and
      micro-batches must hold; None takes the mean prompt and the longest of `lengths`.
    """

    groups_per_step: int
    group_size: int
    prompt_tokens: float
    lengths: LengthDistribution
    epochs: int = 1
    mini_batches: int = 1
    micro_batch_tokens: int = 16384
    requires_whole_step: bool = False
    filtered_fraction: float = 0.0
    longest_rollout: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.filtered_fraction <= MAX_FILTERED_FRACTION:
            raise ConfigError(
                f"workload: filtered={self.filtered_fraction:g}: must be 0 or more, and at most"
                f" {MAX_FILTERED_FRACTION:g}"
            )

    def check_micro_batch_tokens(self, setting: str = "workload.micro_batch_tokens") -> None:
        """Raise ConfigError unless a micro-batch of `micro_batch_tokens` holds the longest rollout.

        setting: key of micro_batch_tokens in the config or file of the reader, for the message.
        """
        prompt, longest = self.longest_rollout or (
            self.rounded_prompt_tokens,
            self.lengths.max_tokens,
        )
        if self.micro_batch_tokens < prompt + longest:
            raise ConfigError(
                f"{setting}={self.micro_batch_tokens}: must hold one rollout, {prompt + longest}"
                f" tokens = prompt {prompt} + longest completion {longest}"
            )

    @property
    def rounded_prompt_tokens(self) -> int:
        return max(1, round(self.prompt_tokens))

    @property
    def max_rollout_tokens(self) -> int:
        """Tokens of the longest possible rollout, prompt included."""
        longest = (self.rounded_prompt_tokens, self.lengths.max_tokens)
        return sum(self.longest_rollout or longest)

    @property
    def num_rollouts(self) -> int:
        return self.groups_per_step * self.group_size

    @cached_property
    def packing_cache(self) -> dict[int, tuple[int, float]]:
        """Cache of `call_durations.pack_mini_batch`, by data-parallel size."""
        return {}

    @property
    def has_varied_lengths(self) -> bool:
        return self.lengths.mean < self.lengths.max_tokens

    @property
    def sampled_workload(self) -> "Workload":
        """Workload of all groups that a step samples, including groups that the filter rejects."""
        if not self.filtered_fraction:
            return self
        groups = math.ceil(self.groups_per_step / (1 - self.filtered_fraction))
        return replace(self, groups_per_step=groups, filtered_fraction=0.0)

    @property
    def num_updates(self) -> int:
        return self.epochs * self.mini_batches

    @property
    def rollout_tokens(self) -> float:
        return self.prompt_tokens + self.lengths.mean

    @property
    def num_tokens(self) -> float:
        return self.num_rollouts * self.rollout_tokens

"""What a step of a run is made of: how many rollouts, how long, and how often it updates."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import NormalDist
from typing import Protocol

import numpy as np

from streamrl.errors import ConfigError
from streamrl.messages import Array

MAX_FILTERED_FRACTION = 0.995
"""Of all groups that are sampled: two hundred for each that is trained."""


class LengthDistribution(Protocol):
    """How many tokens completions have, and what the longest may have."""

    @property
    def mean(self) -> float:
        """The mean."""
        ...

    @property
    def max_tokens(self) -> int:
        """The most a completion has."""
        ...

    def sample(self, count: int, rng: np.random.Generator) -> Array:
        """So many lengths, int64 [count], each at least 1."""
        ...

    def quantiles(self, parts: Array) -> Array:
        """Lengths that these parts of all completions are below, float64 as `parts`."""
        ...

    def expected_longest(self, count: int) -> float:
        """About what the longest of so many has."""
        ...


_STANDARD_NORMAL = NormalDist()
_NUM_QUANTILES = 64
MAX_SIGMA = 5
"""Of a logarithm: with more, completions have one token or the limit."""


def _longest_quantile_ranks(count: int) -> list[float]:
    """At which parts of all lengths, in order, the longest of so many is, each as likely."""
    return [((i + 0.5) / _NUM_QUANTILES) ** (1 / count) for i in range(_NUM_QUANTILES)]


@dataclass(frozen=True)
class FixedLength:
    """All have the same length."""

    tokens: int

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ConfigError(f"lengths: fixed:{self.tokens}: must be at least 1")

    @property
    def mean(self) -> float:
        """The mean."""
        return float(self.tokens)

    @property
    def max_tokens(self) -> int:
        """The most."""
        return self.tokens

    def sample(self, count: int, rng: np.random.Generator) -> Array:
        """As many as asked for, all the same."""
        return np.full(count, self.tokens, np.int64)

    def quantiles(self, parts: Array) -> Array:
        """All the same."""
        return np.full(len(parts), float(self.tokens))

    def expected_longest(self, count: int) -> float:
        """The same."""
        return float(self.tokens)


@dataclass(frozen=True)
class LognormalLengths:
    """Lognormal with this median and sigma of the logarithm, cut off at `limit`."""

    median: float
    sigma: float
    limit: int

    def __post_init__(self) -> None:
        sane = 1 <= self.median < math.inf and 0 < self.sigma <= MAX_SIGMA
        if not sane or self.limit < 1:
            raise ConfigError(
                f"lengths: lognormal:{self.median:g}:{self.sigma:g}: the median must be at least 1,"
                f" sigma above 0 and at most {MAX_SIGMA}, the limit {self.limit} at least 1"
            )

    @property
    def mean(self) -> float:
        """The mean of what is cut off at the limit, in closed form."""
        edge = (math.log(self.limit) - math.log(self.median)) / self.sigma
        below = math.exp(math.log(self.median) + self.sigma**2 / 2) * _STANDARD_NORMAL.cdf(
            edge - self.sigma
        )
        return below + self.limit * (1 - _STANDARD_NORMAL.cdf(edge))

    @property
    def max_tokens(self) -> int:
        """The limit."""
        return self.limit

    def sample(self, count: int, rng: np.random.Generator) -> Array:
        """Independent ones."""
        drawn = rng.lognormal(math.log(self.median), self.sigma, count)
        return np.clip(np.rint(drawn), 1, self.limit).astype(np.int64)

    def quantiles(self, parts: Array) -> Array:
        """In closed form."""
        # For plans alone; every actor of a run loads what placements are.
        from scipy.special import ndtri

        found = self.median * np.exp(self.sigma * ndtri(parts))
        return np.asarray(np.clip(found, 1.0, float(self.limit)))

    def expected_longest(self, count: int) -> float:
        """About the mean of the longest."""
        found = [
            self.median * math.exp(self.sigma * _STANDARD_NORMAL.inv_cdf(rank))
            for rank in _longest_quantile_ranks(count)
        ]
        return float(np.minimum(found, self.limit).mean())


@dataclass(frozen=True)
class EmpiricalLengths:
    """Drawn, with repetition, from lengths that were seen, in ascending order."""

    samples: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.samples or min(self.samples) < 1:
            raise ConfigError("lengths: must be one length or more, each at least 1")
        assert list(self.samples) == sorted(self.samples)

    @classmethod
    def from_samples(cls, seen: Sequence[int]) -> "EmpiricalLengths":
        """Of these."""
        return cls(tuple(sorted(int(length) for length in seen)))

    @property
    def mean(self) -> float:
        """The mean."""
        return float(np.mean(self.samples))

    @property
    def max_tokens(self) -> int:
        """The most."""
        return max(self.samples)

    def sample(self, count: int, rng: np.random.Generator) -> Array:
        """Independent ones."""
        return rng.choice(np.asarray(self.samples, np.int64), count)

    def quantiles(self, parts: Array) -> Array:
        """Of those that were seen, interpolated."""
        return np.asarray(np.quantile(self.samples, parts), np.float64)

    def expected_longest(self, count: int) -> float:
        """About the mean of the longest."""
        at = np.multiply(_longest_quantile_ranks(count), len(self.samples)).astype(int)
        return float(np.asarray(self.samples)[at].mean())


@dataclass(frozen=True)
class Workload:
    """One step's work.

    groups_per_step, group_size: as in a run's config. prompt_tokens: mean of a prompt. lengths: of
    a completion. epochs, mini_batches: how often each rollout is trained, and updates per epoch.
    micro_batch_tokens: most tokens in one forward and backward of a rank. whole_steps: whether
    nothing is trained before all groups of a step are there, as streamrl does with several updates.
    filtered: of all groups that are sampled, the part that is taken out and replaced. longest:
    tokens of prompt and completion of the longest rollout there may be, for which engines and
    micro-batches need room; null takes the mean prompt and the longest of `lengths`.
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
        for key in ("groups_per_step", "group_size", "epochs", "mini_batches"):
            if vars(self)[key] < 1:
                raise ConfigError(f"workload: {key}={vars(self)[key]}: must be at least 1")
        if not 0 < self.prompt_tokens < math.inf or self.micro_batch_tokens <= 0:
            raise ConfigError(
                f"workload: prompt_tokens={self.prompt_tokens:g},"
                f" micro_batch_tokens={self.micro_batch_tokens}: must be above 0 and finite"
            )

    def check_micro_batch_tokens(self, setting: str = "workload.micro_batch_tokens") -> None:
        """Raise ConfigError unless a micro-batch holds the longest rollout.

        setting: what whoever reads the error knows micro_batch_tokens by.
        """
        prompt, most = self.longest_rollout or (self.rounded_prompt_tokens, self.lengths.max_tokens)
        if self.micro_batch_tokens < prompt + most:
            raise ConfigError(
                f"{setting}={self.micro_batch_tokens}: must hold one rollout, {prompt + most}"
                f" tokens = prompt {prompt} + longest completion {most}"
            )

    @property
    def rounded_prompt_tokens(self) -> int:
        """Of a prompt, where it is a whole number: at least 1."""
        return max(1, round(self.prompt_tokens))

    @property
    def max_rollout_tokens(self) -> int:
        """Of the longest rollout there may be, its prompt included."""
        return sum(self.longest_rollout or (self.rounded_prompt_tokens, self.lengths.max_tokens))

    @property
    def num_rollouts(self) -> int:
        """Rollouts in a step."""
        return self.groups_per_step * self.group_size

    @cached_property
    def packing_cache(self) -> dict[int, tuple[int, float]]:
        """What `micro_batch_rounds.pack_mini_batch` remembers."""
        return {}

    @property
    def has_varied_lengths(self) -> bool:
        """Whether some completions are longer than others."""
        return self.lengths.mean < self.lengths.max_tokens

    @property
    def sampled_workload(self) -> "Workload":
        """With all groups that are sampled for a step, those that are filtered included."""
        if not self.filtered_fraction:
            return self
        groups = math.ceil(self.groups_per_step / (1 - self.filtered_fraction))
        return replace(self, groups_per_step=groups, filtered_fraction=0.0)

    @property
    def num_updates(self) -> int:
        """Optimizer updates in a step."""
        return self.epochs * self.mini_batches

    @property
    def rollout_tokens(self) -> float:
        """Mean tokens of a rollout, its prompt included."""
        return self.prompt_tokens + self.lengths.mean

    @property
    def num_tokens(self) -> float:
        """Mean tokens of all rollouts of a step, prompts included."""
        return self.num_rollouts * self.rollout_tokens

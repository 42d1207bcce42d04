"""Groups that take the places of others: on policy, of those that are filtered.

Whoever is filtered has another prompt sampled in its place, which may be filtered too: a chain, of
which the last group is trained. How many groups a chain has is geometrically distributed.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from streamrl.messages import Array


@dataclass(frozen=True)
class RefillChains:
    """Groups and their order: lengths float64 [groups, rollouts], those asked for at once first.

    chain [groups]: which one each is in, numbered by the first of them. links [chains]: how many
    groups each has before the last, or how many one has that stands for a longer one.
    """

    lengths: Array
    chain_by_group: Array
    num_refills: Array

    @classmethod
    def from_counts(cls, lengths: Array, counts: Array) -> "RefillChains":
        """Groups [groups, rollouts] in chains with so many of them each, int [chains]."""
        turns = range(int(counts.max()))
        chain = np.concatenate([np.flatnonzero(counts > turn) for turn in turns])
        return cls(lengths, chain, counts - 1.0)

    def split_chains(self, parts: int) -> Iterator["RefillChains"]:
        """As many chains, next to one another, in each part."""
        each = self.num_chains // parts
        for part in range(parts):
            chosen = self.chain_by_group // each == part
            links = self.num_refills[part * each : (part + 1) * each]
            yield RefillChains(
                self.lengths[chosen], self.chain_by_group[chosen] - part * each, links
            )

    def stretch_longest(self, longest: float) -> "RefillChains":
        """With the longest chain made to have so many tokens that follow one another."""
        paths, links = self.chain_tokens, self.num_refills.copy()
        one = int(paths.argmax())
        factor = longest / float(paths[one])
        factors = np.where(self.chain_by_group == one, factor, 1.0)
        # It has more groups, which here are longer ones.
        links[one] = max(0.0, (links[one] + 1) * factor - 1)
        return replace(
            self, lengths=np.rint(self.lengths * factors[:, None]).clip(1.0), num_refills=links
        )

    @property
    def num_chains(self) -> int:
        """How many are asked for at once: one of each chain."""
        return int(self.chain_by_group.max()) + 1

    @cached_property
    def next_group(self) -> dict[int, int]:
        """Who comes when a group is done, if anybody does."""
        found: dict[int, int] = {}
        before: dict[int, int] = {}
        for group, chain in enumerate(self.chain_by_group.tolist()):
            if chain in before:
                found[before[chain]] = group
            before[chain] = group
        return found

    @cached_property
    def last_groups(self) -> Array:
        """The last group of each chain, int [chains]."""
        found = np.zeros(self.num_chains, np.int64)
        found[self.chain_by_group] = np.arange(len(self.chain_by_group))
        return found

    @property
    def chain_tokens(self) -> Array:
        """Tokens that follow one another in each chain: of each group's longest, [chains]."""
        return np.asarray(np.bincount(self.chain_by_group, weights=self.lengths.max(axis=1)))


def chain_length_quantiles(filtered: float, chains: int) -> Array:
    """Groups of so many chains, ascending: the quantiles of their distribution."""
    if not filtered:
        return np.ones(chains, np.int64)
    above: Array = 1 - (np.arange(chains) + 0.5) / chains
    counts = np.ceil(np.log(above) / math.log(filtered))
    return np.asarray(np.maximum(1, counts), np.int64)


def sample_chain_lengths(filtered: float, chains: int, rng: np.random.Generator) -> Array:
    """Groups of so many chains, drawn."""
    if not filtered:
        return np.ones(chains, np.int64)
    return rng.geometric(1 - filtered, chains)

"""Chains of replaced groups: on policy, a new group replaces each filtered group.

A replacement may be filtered too, so groups form chains whose last group is trained. The number of
groups in a chain is geometrically distributed.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from streamrl.messages import Array


@dataclass(frozen=True)
class RefillChains:
    """Chains of groups: each group replaces the filtered group before it.

    Groups are in order of arrival; the first group of every chain comes first.
    lengths: tokens of each rollout, float64 [groups, rollouts].
    chain_by_group [groups]: chain of each group, numbered by the chain's first group.
    num_refills [chains]: filtered groups before the last group, as a real number for a stretched
      chain.
    """

    lengths: Array
    chain_by_group: Array
    num_refills: Array

    @classmethod
    def from_counts(cls, lengths: Array, counts: Array) -> "RefillChains":
        """Build chains of a group and its replacements after filtering; the last one is trained.

        lengths: tokens of each rollout, float64 [groups, rollouts]; the first groups of all chains,
        then the second groups, and so on. counts: groups of each chain, int [chains].
        """
        positions = range(int(counts.max()))
        # Position k lists the chains with more than k groups.
        chain = np.concatenate([np.flatnonzero(counts > turn) for turn in positions])
        return cls(lengths, chain, counts - 1.0)

    def split_chains(self, parts: int) -> Iterator["RefillChains"]:
        chains_per_part = self.num_chains // parts
        for index in range(parts):
            is_in_part = self.chain_by_group // chains_per_part == index
            links = self.num_refills[index * chains_per_part : (index + 1) * chains_per_part]
            yield RefillChains(
                self.lengths[is_in_part],
                self.chain_by_group[is_in_part] - index * chains_per_part,
                links,
            )

    def stretch_longest(self, longest: float) -> "RefillChains":
        """Return chains in which the longest chain has `longest` consecutive tokens.

        All rollouts of that chain are lengthened by the same factor.
        """
        tokens, links = self.chain_tokens, self.num_refills.copy()
        longest_chain = int(tokens.argmax())
        factor = longest / float(tokens[longest_chain])
        factors = np.where(self.chain_by_group == longest_chain, factor, 1.0)
        # A longer chain has more groups; here its groups are longer instead.
        links[longest_chain] = max(0.0, (links[longest_chain] + 1) * factor - 1)
        return replace(
            self, lengths=np.rint(self.lengths * factors[:, None]).clip(1.0), num_refills=links
        )

    @property
    def num_chains(self) -> int:
        """Number of groups requested at the start."""
        return int(self.chain_by_group.max()) + 1

    @cached_property
    def next_group(self) -> dict[int, int]:
        """Replacement of each group, by group number; groups without a replacement are absent."""
        successors: dict[int, int] = {}
        previous: dict[int, int] = {}
        for group, chain in enumerate(self.chain_by_group.tolist()):
            if chain in previous:
                successors[previous[chain]] = group
            previous[chain] = group
        return successors

    @cached_property
    def last_groups(self) -> Array:
        """Number of each chain's last group, which is trained, int [chains]."""
        last = np.zeros(self.num_chains, np.int64)
        last[self.chain_by_group] = np.arange(len(self.chain_by_group))
        return last

    @property
    def chain_tokens(self) -> Array:
        """Tokens of each chain that are sampled one after another, float64 [chains].

        They are the sum of each group's longest rollout.
        """
        return np.asarray(np.bincount(self.chain_by_group, weights=self.lengths.max(axis=1)))


def compute_chain_length_quantiles(filtered: float, chains: int) -> Array:
    """Return ascending quantiles of the number of groups in a chain, int [chains].

    filtered: fraction of groups that a filter rejects.
    """
    if not filtered:
        return np.ones(chains, np.int64)
    above: Array = 1 - (np.arange(chains) + 0.5) / chains
    counts = np.ceil(np.log(above) / math.log(filtered))
    return np.asarray(np.maximum(1, counts), np.int64)


def sample_chain_lengths(filtered: float, chains: int, rng: np.random.Generator) -> Array:
    """Return random numbers of groups in a chain, int [chains].

    filtered: fraction of groups that a filter rejects.
    """
    if not filtered:
        return np.ones(chains, np.int64)
    return rng.geometric(1 - filtered, chains)

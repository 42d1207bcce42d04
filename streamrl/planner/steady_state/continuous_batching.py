"""Continuous batching of a replica's rollouts of a step, counted in decode steps.

Every running rollout gets a token in every decode step, so lengths and capacity alone determine
when a rollout starts and ends. `ReplicaSchedule.compute_group_ends_s` converts decode steps to
seconds.

On policy, a new group replaces each filtered group. A replacement may be filtered too, so groups
form chains whose last group is trained. The number of groups in a chain is geometrically
distributed.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from streamrl.messages import Array
from streamrl.planner.problem.stage_timings import GeneratorTiming
from streamrl.planner.simulator.simulated_engine import SimulatedEngine


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


MIN_EDGES = 33
MAX_CHANGES = 48
"""Sampling points of a schedule: evenly spaced, and at changes of the batch."""


@dataclass(frozen=True)
class ReplicaSchedule:
    """Rollouts of a step on a replica, in decode steps from the start.

    A rollout starts at once or replaces a filtered group. `edges` bound m segments of decode steps.
    group_ends [groups]: when each trained group is complete.
    num_refills [groups]: filtered groups before each trained group, each replaced by the next.
    edges [m + 1]: segment borders, from 0 on.
    running_rollouts [m]: mean running rollouts.
    resident_tokens [m]: mean tokens of running rollouts, prompts included.
    prefill_tokens [m]: tokens prefilled at the start of rollouts.
    num_groups_done [m]: completed groups, filtered groups included.
    slots: approximate concurrent rollouts when more are waiting.
    longest_tokens: tokens of the longest rollout, or of consecutive replaced groups.
    """

    group_ends: Array
    num_refills: Array
    edges: Array
    running_rollouts: Array
    resident_tokens: Array
    prefill_tokens: Array
    num_groups_done: Array
    slots: float
    longest_tokens: float

    def compute_group_ends_s(self, timing: GeneratorTiming, link_s: float = 0.0) -> Array:
        """Return when each trained group is complete, s after the step starts, float64 [groups].

        link_s: time from the end of a filtered group to the request of its replacement.
        """
        ends = np.interp(self.group_ends, self.edges, self._compute_elapsed_s(timing))
        return np.asarray(ends + self.num_refills * (link_s + timing.begin_s))

    def _compute_elapsed_s(self, timing: GeneratorTiming) -> Array:
        """Return the time of each segment border, s after the step starts, float64 [m + 1]."""
        segment_s = np.diff(self.edges) * timing.estimate_decode_steps_s(
            self.running_rollouts, self.resident_tokens
        )
        segment_s += self.prefill_tokens * timing.prefill_token_s
        # A group is complete before the host passes it on.
        segment_s[1:] += self.num_groups_done[:-1] * timing.group_s
        return timing.begin_s + np.concatenate(([0.0], np.cumsum(segment_s)))

    def compute_overhead_s(self, timing: GeneratorTiming) -> Array:
        """Return seconds per segment of prefill and of passing on finished groups, float64 [m]."""
        return self.prefill_tokens * timing.prefill_token_s + self.num_groups_done * timing.group_s


def schedule_replica(
    groups: RefillChains,
    *,
    prompt_tokens: float,
    token_capacity: float,
    num_slots: int,
    scale: float,
    slots: float,
) -> ReplicaSchedule:
    """Simulate the groups of a step on a replica; return their schedule.

    token_capacity: tokens that fit into the KV cache, divided by `scale`.
    num_slots: most simulated rollouts that run together.
    scale: number of real rollouts that each simulated rollout stands for.
    slots: concurrent real rollouts, for the result.
    """
    rollouts: list[tuple[int, int, float]] = []
    group_ends = _play_groups(groups, prompt_tokens, token_capacity, num_slots, rollouts)
    starts, ends, contexts = np.array(rollouts, np.float64).T
    changes = np.unique(np.concatenate(([0.0], starts, ends)))
    # Keep some of the changes, and even points in between, where other work may overlap.
    kept_changes = np.append(changes[:: -(-len(changes) // MAX_CHANGES)], changes[-1])
    edges = np.union1d(kept_changes, np.linspace(0.0, changes[-1], MIN_EDGES))
    # Of each rollout in each segment [segments, rollouts]: when it begins and ends to run.
    begins = np.maximum(edges[:-1, None], starts)
    widths = np.maximum(np.minimum(edges[1:, None], ends) - begins, 0.0)
    # Resident tokens grow by one per decode step.
    tokens = widths * (contexts + begins - starts + widths / 2)
    # Prefill that starts at an edge belongs to the segment after it.
    segments = np.searchsorted(edges, starts, side="right") - 1
    done = np.searchsorted(np.sort(group_ends), edges, side="right")
    per_step = scale / np.diff(edges)
    return ReplicaSchedule(
        group_ends[groups.last_groups],
        groups.num_refills,
        edges,
        widths.sum(axis=1) * per_step,
        tokens.sum(axis=1) * per_step,
        np.bincount(segments, contexts, len(edges) - 1) * scale,
        np.diff(done) * scale,
        slots,
        float(groups.chain_tokens.max()),
    )


def _play_groups(
    groups: RefillChains,
    prompt_tokens: float,
    token_capacity: float,
    num_slots: int,
    log: list[tuple[int, int, float]],
) -> Array:
    """Return the decode step in which each group ends, in the simulator's engine, float64 [groups].

    A replacement arrives when the filtered group is complete. log: as in `SimulatedEngine`.
    """
    longest = prompt_tokens + float(groups.lengths.max()) + 1
    timing = GeneratorTiming(
        replicas=1,
        max_running=num_slots,
        kv_tokens=max(token_capacity, longest),
        weights_s=0.0,
        kv_token_s=0.0,
        compute_rollout_s=0.0,
        step_s=1.0,
        rollout_s=0.0,
        prefill_token_s=0.0,
    )
    engine: SimulatedEngine[int] = SimulatedEngine(timing, log=log)
    lengths = groups.lengths.astype(int).tolist()
    group_ends = np.zeros(len(lengths))
    for group in range(groups.num_chains):
        engine.add_group(group, prompt_tokens, lengths[group], 0.0)
    while not engine.is_empty:
        now = engine.next_event_s
        for done in engine.advance_to(now):
            group_ends[done.key] = now
            if replacement := groups.next_group.get(done.key):
                engine.add_group(replacement, prompt_tokens, lengths[replacement], now)
    return group_ends

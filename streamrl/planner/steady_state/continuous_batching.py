"""Continuous batching of a replica's rollouts of a step, counted in decode steps.

Every running rollout gets a token in every decode step, so lengths and capacity alone determine
when a rollout starts and ends. `ReplicaSchedule.compute_group_ends_s` converts decode steps to
seconds.

On policy, a new group replaces each filtered group. A replacement may be filtered too, so groups
form chains whose last group is trained. The number of groups in a chain is geometrically
distributed.
"""

import heapq
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from streamrl.messages import Array
from streamrl.planner.problem.stage_timings import GeneratorTiming


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
    batch = _ContinuousBatch(groups, prompt_tokens, token_capacity, num_slots)
    batch.run()
    changes, change_indices = np.array(batch.edges), np.arange(len(batch.edges))
    # Keep some of the changes, and even points in between, where other work may overlap.
    kept_changes = changes[
        np.unique(
            np.append(change_indices[:: -(-len(change_indices) // MAX_CHANGES)], change_indices[-1])
        )
    ]
    edges = np.union1d(kept_changes, np.linspace(0.0, changes[-1], MIN_EDGES))
    running_counts, mean_tokens = np.array(batch.running_counts), np.array(batch.resident_tokens)
    durations = np.diff(changes)
    decoded = np.concatenate(([0.0], np.cumsum(running_counts * durations)))
    # Resident tokens grow linearly between changes, so their sum over steps grows quadratically.
    previous = np.clip(np.searchsorted(changes, edges, side="right") - 1, 0, len(durations) - 1)
    offset = edges - changes[previous]
    tokens_at_change = mean_tokens[previous] - running_counts[previous] * durations[previous] / 2
    token_steps = np.concatenate(([0.0], np.cumsum(mean_tokens * durations)))[previous]
    token_steps += tokens_at_change * offset + running_counts[previous] * offset**2 / 2
    prefilled = np.concatenate(([0.0], np.cumsum(batch.prefill_tokens)))
    # Prefill that starts at an edge belongs to the segment after it.
    prefilled_before = prefilled[np.searchsorted(changes, edges, side="left")]
    widths = np.diff(edges)
    group_ends = batch.rollout_ends.reshape(groups.lengths.shape).max(axis=1)
    done = np.searchsorted(np.sort(group_ends), edges, side="right")
    return ReplicaSchedule(
        group_ends[groups.last_groups],
        groups.num_refills,
        edges,
        np.diff(np.interp(edges, changes, decoded)) / widths * scale,
        np.diff(token_steps) / widths * scale,
        np.diff(prefilled_before) * scale,
        np.diff(done) * scale,
        slots,
        float(groups.chain_tokens.max()),
    )


@dataclass
class _ContinuousBatch:
    """Estimated schedule of a continuous batch that serves rollouts in order of arrival.

    A replacement arrives when the filtered group is complete. The first waiting rollout starts if a
    slot is free and the KV cache holds its tokens plus one more token per running rollout. If the
    KV cache runs out, the last rollout is preempted, and its tokens are prefilled again later, as
    in vLLM's recompute preemption.
    """

    groups: RefillChains
    prompt_tokens: float
    token_capacity: float
    slots: int

    def __post_init__(self) -> None:
        lengths = self.groups.lengths
        count, self._per_group = lengths.size, lengths.shape[1]
        self.rollout_ends = np.zeros(count)
        self.edges, self.prefill_tokens = [0.0], [0.0]
        self.running_counts: list[int] = []
        self.resident_tokens: list[float] = []
        self._remaining_tokens = [float(length) for length in lengths.ravel()]
        self._context_tokens = [self.prompt_tokens] * count
        self._start_steps = [0.0] * count
        self._num_unfinished = [self._per_group] * len(lengths)
        self._next_group = self.groups.next_group
        self._waiting = deque(range(self.groups.num_chains * self._per_group))
        self._in_slots: list[int] = []
        self._end_heap: list[tuple[float, int]] = []
        self._num_tokens = 0.0

    def run(self) -> None:
        now = 0.0
        while self._waiting or self._in_slots:
            self._fill_slots(now)
            count = len(self._in_slots)
            # Drop entries of rollouts that were preempted since.
            while self._end_heap[0][0] != self._find_end(self._end_heap[0][1]):
                heapq.heappop(self._end_heap)
            # Jump to the next event: a rollout ends, or the KV cache may run out.
            steps = min(
                self._end_heap[0][0] - now,
                max(1.0, (self.token_capacity - self._num_tokens) // count),
            )
            self.running_counts.append(count)
            self.resident_tokens.append(self._num_tokens + steps * count / 2)
            self.prefill_tokens.append(0.0)
            now += steps
            self.edges.append(now)
            self._num_tokens += steps * count
            self._finish_rollouts(now)
            while (
                len(self._in_slots) > 1
                and self._num_tokens + len(self._in_slots) > self.token_capacity
            ):
                self._preempt_last(now)

    def _find_end(self, rollout: int) -> float:
        """Return the decode step of a rollout's end, -1 if past; stale heap entries differ."""
        return (
            self._start_steps[rollout] + self._remaining_tokens[rollout]
            if self._remaining_tokens[rollout]
            else -1.0
        )

    def _fill_slots(self, now: float) -> None:
        while self._waiting and len(self._in_slots) < self.slots:
            rollout = self._waiting[0]
            if (
                self._in_slots
                and self._num_tokens + self._context_tokens[rollout] + len(self._in_slots) + 1
                > self.token_capacity
            ):
                break
            self._in_slots.append(self._waiting.popleft())
            self._start_steps[rollout] = now
            heapq.heappush(self._end_heap, (now + self._remaining_tokens[rollout], rollout))
            self._num_tokens += self._context_tokens[rollout]
            self.prefill_tokens[-1] += self._context_tokens[rollout]

    def _finish_rollouts(self, now: float) -> None:
        while self._end_heap and self._end_heap[0][0] <= now:
            due, rollout = heapq.heappop(self._end_heap)
            if due == self._find_end(rollout):
                self._num_tokens -= self._context_tokens[rollout] + self._remaining_tokens[rollout]
                self._remaining_tokens[rollout] = 0.0
                self.rollout_ends[rollout] = now
                self._in_slots.remove(rollout)
                self._finish_in_group(rollout // self._per_group)

    def _finish_in_group(self, group: int) -> None:
        """Count a finished rollout; the last of a filtered group lets its replacement arrive."""
        self._num_unfinished[group] -= 1
        if not self._num_unfinished[group] and group in self._next_group:
            first = self._next_group[group] * self._per_group
            self._waiting.extend(range(first, first + self._per_group))

    def _preempt_last(self, now: float) -> None:
        """Preempt the rollout that started last; it waits first in line to start again."""
        rollout = self._in_slots.pop()
        sampled = now - self._start_steps[rollout]
        self._remaining_tokens[rollout] -= sampled
        self._context_tokens[rollout] += sampled
        self._start_steps[rollout] = math.inf
        self._num_tokens -= self._context_tokens[rollout]
        self._waiting.appendleft(rollout)

"""How much longer a step's slowest replica takes than one that has its fair part and the longest.

Groups are dealt to replicas whatever they will be; the one with the most, and the longest, tokens
ends last. Steps are sampled, always the same ones; what a replica has is then summed up, so that
its time is a few products: every rollout has its tokens decoded, its keys and values read, and all
of them share the decode steps.
"""

from dataclasses import dataclass

import numpy as np

from streamrl.messages import Array
from streamrl.placement.stage_timings import GeneratorTiming
from streamrl.placement.steady_state.refill_chains import sample_chain_lengths
from streamrl.placement.workload import Workload

NUM_SAMPLED_ROLLOUTS = 32768
"""Rollouts, in whole steps."""
MIN_STEPS, MAX_STEPS = 4, 256
"""Steps that are sampled."""
MIN_CHAIN_STEPS = 256
"""At least, where some are filtered: chains differ more than rollouts do."""
MAX_CHAIN_ROLLOUTS = 1 << 21
"""Rollouts that are sampled for it."""


@dataclass(frozen=True)
class ReplicaLoads:
    """Of replicas: tokens of the longest rollout, of all, and those read while they are sampled.

    The longest are those that follow one another, where groups take the places of others.

    Any shape; the same for all three.
    """

    longest_tokens: Array
    total_tokens: Array
    read_tokens: Array

    def duration_s(self, timing: GeneratorTiming, steps: Array) -> Array:
        """What so many decode steps take."""
        return timing.memory_bound_s(steps, self.total_tokens, self.read_tokens)


def sample_loads(workload: Workload, per_group: int, replicas: int) -> ReplicaLoads:
    """Of whole steps, float64 [steps, replicas]; longest are those that follow one another."""
    groups, kept = workload.groups_per_step, 1 - workload.filtered_fraction
    rollouts = groups * per_group / kept
    count = int(np.clip(NUM_SAMPLED_ROLLOUTS // rollouts, MIN_STEPS, MAX_STEPS))
    if workload.filtered_fraction:
        count = max(count, min(MIN_CHAIN_STEPS, int(MAX_CHAIN_ROLLOUTS // rollouts)))
    rng = np.random.default_rng(0)
    counts = sample_chain_lengths(workload.filtered_fraction, count * groups, rng)
    lengths = workload.lengths.sample(int(counts.sum()) * per_group, rng).astype(np.float64)
    every = lengths.reshape(-1, per_group)
    read = every * workload.prompt_tokens + every**2 / 2
    firsts = np.cumsum(counts) - counts
    rounds = -(-groups // replicas)

    def dealt(of_groups: Array) -> Array:
        """Of chains, to replicas in turn: [steps, rounds, replicas]."""
        padded = np.zeros((count, rounds * replicas))
        padded[:, :groups] = np.add.reduceat(of_groups, firsts).reshape(count, groups)
        return padded.reshape(count, rounds, replicas)

    longest, tokens, taken = (
        dealt(every.max(axis=1)),
        dealt(every.sum(axis=1)),
        dealt(read.sum(axis=1)),
    )
    return ReplicaLoads(longest.max(axis=1), tokens.sum(axis=1), taken.sum(axis=1))


def slowest_replica_factor(
    timing: GeneratorTiming,
    every: ReplicaLoads,
    share: ReplicaLoads,
    *,
    steps: float,
    slots: float,
    rollouts: int,
) -> float:
    """By how much: the mean of the slowest of `every` replica, to one with `share`.

    That takes `steps` decode steps, with `slots` of its `rollouts` at a time.
    """
    if rollouts <= slots:
        taken = every.longest_tokens
    else:
        # What is left when no more rollouts wait grows with the longest of them.
        tail = (steps - share.total_tokens / slots) / share.longest_tokens
        taken = np.maximum(
            every.longest_tokens, every.total_tokens / slots + tail * every.longest_tokens
        )
    slowest = every.duration_s(timing, taken).max(axis=1).mean()
    return float(slowest / share.duration_s(timing, np.asarray(steps)).item())

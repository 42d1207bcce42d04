"""Straggler factor: the slowest replica of a step over a replica with a mean load.

Groups are assigned to replicas before their lengths are known; the replica with the most tokens, or
with the longest rollout, ends last. A fixed sample of steps estimates the effect. The time of a
replica is computed from its sums of tokens only: all tokens are decoded, all resident tokens read,
and rollouts share decode steps.
"""

from dataclasses import dataclass

import numpy as np

from streamrl.messages import Array
from streamrl.placement.stage_timings import GeneratorTiming
from streamrl.placement.steady_state.refill_chains import sample_chain_lengths
from streamrl.placement.workload import Workload

NUM_SAMPLED_ROLLOUTS = 32768
"""Rollouts to sample, approximately: steps are sampled as a whole."""
MIN_STEPS, MAX_STEPS = 4, 256
MIN_CHAIN_STEPS = 256
"""Fewest sampled steps with filtering: chains of replaced groups vary more than rollouts."""
MAX_CHAIN_ROLLOUTS = 1 << 21
"""Most sampled rollouts with filtering."""


@dataclass(frozen=True)
class ReplicaLoads:
    """Work of replicas in a step, as arrays of equal shape.

    longest_tokens: longest rollout, or longest chain of replaced groups.
    total_tokens: sampled tokens.
    read_tokens: resident tokens summed over decode steps.
    """

    longest_tokens: Array
    total_tokens: Array
    read_tokens: Array

    def duration_s(self, timing: GeneratorTiming, steps: Array) -> Array:
        """Return the seconds of `steps` decode steps with these loads if memory-bound."""
        return timing.compute_memory_bound_s(steps, self.total_tokens, self.read_tokens)


def sample_loads(workload: Workload, per_group: int, replicas: int) -> ReplicaLoads:
    """Return the loads of replicas in steps drawn at random, float64 [steps, replicas].

    per_group: rollouts per group.
    """
    groups, kept_fraction = workload.groups_per_step, 1 - workload.filtered_fraction
    rollouts = groups * per_group / kept_fraction
    count = int(np.clip(NUM_SAMPLED_ROLLOUTS // rollouts, MIN_STEPS, MAX_STEPS))
    if workload.filtered_fraction:
        count = max(count, min(MIN_CHAIN_STEPS, int(MAX_CHAIN_ROLLOUTS // rollouts)))
    rng = np.random.default_rng(0)
    counts = sample_chain_lengths(workload.filtered_fraction, count * groups, rng)
    lengths = workload.lengths.sample(int(counts.sum()) * per_group, rng).astype(np.float64)
    group_lengths = lengths.reshape(-1, per_group)
    read = group_lengths * workload.context_tokens + group_lengths**2 / 2
    firsts = np.cumsum(counts) - counts
    rounds = -(-groups // replicas)

    def assign_to_replicas(of_groups: Array) -> Array:
        """Assign chains to replicas round-robin: [steps, rounds, replicas]."""
        padded = np.zeros((count, rounds * replicas))
        padded[:, :groups] = np.add.reduceat(of_groups, firsts).reshape(count, groups)
        return padded.reshape(count, rounds, replicas)

    return ReplicaLoads(
        assign_to_replicas(group_lengths.max(axis=1)).max(axis=1),
        assign_to_replicas(group_lengths.sum(axis=1)).sum(axis=1),
        assign_to_replicas(read.sum(axis=1)).sum(axis=1),
    )


def estimate_slowest_replica_factor(
    timing: GeneratorTiming,
    loads: ReplicaLoads,
    mean_load: ReplicaLoads,
    *,
    steps: float,
    slots: float,
    rollouts: int,
) -> float:
    """Return the mean time of each step's slowest replica in `loads` over the time of `mean_load`.

    mean_load: loads of a single replica that takes `steps` decode steps, with `slots` of its
      `rollouts` at a time.
    """
    if rollouts <= slots:
        decode_steps = loads.longest_tokens
    else:
        # The tail after the last waiting rollout has started is proportional to the longest
        # rollout.
        tail = (steps - mean_load.total_tokens / slots) / mean_load.longest_tokens
        decode_steps = np.maximum(
            loads.longest_tokens, loads.total_tokens / slots + tail * loads.longest_tokens
        )
    slowest = loads.duration_s(timing, decode_steps).max(axis=1).mean()
    return float(slowest / mean_load.duration_s(timing, np.asarray(steps)).item())

"""Stragglers: the slowest replica of a step, and steps in flight that slow groups delay.

Groups are assigned to replicas before their lengths are known; the replica with the most tokens, or
with the longest rollout, ends last. A fixed sample of steps estimates the effect. The time of a
replica is computed from its sums of tokens only: all tokens are decoded, all resident tokens read,
and rollouts share decode steps.

Training steps in flight together: a slow step delays the steps behind it, and no other step makes
up for the delay.
"""

import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from streamrl.messages import Array
from streamrl.planner.problem.stage_timings import GeneratorTiming
from streamrl.planner.problem.workload import Workload

NUM_SAMPLED_ROLLOUTS = 32768
"""Rollouts to sample, approximately: steps are sampled as a whole."""
MIN_STEPS, MAX_STEPS = 4, 256
MAX_CHAIN_ROLLOUTS = 1 << 21
"""Most rollouts to sample under a filter, whose longest chains need MAX_STEPS steps."""
MAX_GROUPS = 8192
"""Most sampled groups of a step in flight that are simulated; larger steps count as this large."""
MAX_ROUNDS, MIN_ROUNDS = 500, 3
"""Most and fewest windows of steps that are simulated."""
MAX_EVENTS = 60_000
"""Step ends to simulate, approximately."""
WARMUP_ROUNDS = 2
"""Windows of steps at the beginning that do not count, as they are not in a steady state."""
DRAW_SIZE = 4096


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

    A filtered group and its replacements are sampled one after another, as a chain.
    per_group: rollouts per group.
    """
    groups, kept_fraction = workload.groups_per_step, 1 - workload.filtered_fraction
    sampled = groups * per_group / kept_fraction
    count = int(np.clip(NUM_SAMPLED_ROLLOUTS // sampled, MIN_STEPS, MAX_STEPS))
    if workload.filtered_fraction:
        count = max(count, min(MAX_STEPS, int(MAX_CHAIN_ROLLOUTS // sampled)))
    rng = np.random.default_rng(0)
    # Groups of each chain: all but the last are filtered.
    counts = np.ones(count * groups, np.int64)
    if workload.filtered_fraction:
        counts = rng.geometric(kept_fraction, count * groups)
    firsts = np.cumsum(counts) - counts
    lengths = workload.lengths.sample(int(counts.sum()) * per_group, rng).astype(np.float64)
    group_lengths = lengths.reshape(-1, per_group)
    read = group_lengths * workload.prompt_tokens + group_lengths**2 / 2
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


def compute_mean_time_in_flight(
    longest: Array, *, window: int, groups: int = 1, filtered: float = 0.0
) -> float:
    """Return the mean time that a training step is in flight, if all rollouts have slots.

    A step takes any groups that are ready, and waits only for those in flight that would exceed the
    staleness bound after it. A new group takes the place of each that a filter rejects.
    longest [n]: equally likely durations of a group, in any unit. window: steps in flight.
    groups: per step. filtered: fraction of finished groups that the filter rejects.
    """
    groups = max(1, min(groups, round(MAX_GROUPS * (1 - filtered))))
    rounds = int(np.clip(MAX_EVENTS * (1 - filtered) / groups / window, MIN_ROUNDS, MAX_ROUNDS))
    measured_steps, durations = rounds * window, _draw_values(longest)
    rng, ends, ready = np.random.default_rng(1), list[float](), 0
    in_flight, unfinished = list[tuple[float, int]](), Counter[int]()

    def admit_groups(count: int, now: float) -> None:
        for _ in range(count):
            heapq.heappush(in_flight, (now + next(durations), len(ends)))
        unfinished[len(ends)] += count

    admit_groups(window * groups, 0.0)
    while len(ends) < measured_steps + WARMUP_ROUNDS * window:
        now, version = heapq.heappop(in_flight)
        unfinished[version] -= 1
        if not unfinished[version]:
            del unfinished[version]
        if filtered and rng.random() < filtered:
            admit_groups(1, now)
        else:
            ready += 1
        while ready >= groups and all(v > len(ends) - window + 1 for v in unfinished):
            ready -= groups
            ends.append(now)
            admit_groups(groups, now)
    return (ends[-1] - ends[-1 - measured_steps]) / rounds


def _draw_values(values: Array) -> Iterator[float]:
    """Yield random elements of `values`, endlessly, with a fixed seed."""
    rng = np.random.default_rng(0)
    while True:
        yield from rng.choice(values, DRAW_SIZE).tolist()

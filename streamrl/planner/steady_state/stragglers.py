"""Stragglers: the slowest replica of a step, and steps in flight that slow groups delay.

Groups are assigned to replicas before their lengths are known; the replica with the most tokens, or
with the longest rollout, ends last. A fixed sample of steps estimates the effect. The time of a
replica is computed from its sums of tokens only: all tokens are decoded, all resident tokens read,
and rollouts share decode steps.

Training steps in flight together: a slow step delays the steps behind it, and no other step makes
up for the delay. With filtering, replacements start later and take longer; a step therefore takes
ready groups, earliest first, and waits only for groups at the staleness bound.
"""

import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from streamrl.messages import Array
from streamrl.planner.problem.stage_timings import GeneratorTiming
from streamrl.planner.problem.workload import Workload
from streamrl.planner.steady_state.continuous_batching import sample_chain_lengths

NUM_SAMPLED_ROLLOUTS = 32768
"""Rollouts to sample, approximately: steps are sampled as a whole."""
MIN_STEPS, MAX_STEPS = 4, 256
MIN_CHAIN_STEPS = 256
"""Fewest sampled steps with filtering: chains of replaced groups vary more than rollouts."""
MAX_CHAIN_ROLLOUTS = 1 << 21
"""Most sampled rollouts with filtering."""
MAX_ROUNDS, MIN_ROUNDS = 500, 3
"""Most and fewest windows of steps that are simulated."""
MAX_EVENTS = 60_000
"""Group ends to simulate, approximately."""
MAX_GROUPS = 8192
"""Groups per step; larger steps are simulated in part."""
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
    read = group_lengths * workload.prompt_tokens + group_lengths**2 / 2
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


def compute_mean_time_in_flight(
    longest: Array, *, window: int, groups: int = 1, filtered: float = 0.0
) -> float:
    """Return the mean time that a training step is in flight, if all rollouts have slots.

    longest [n]: equally likely durations of a group, in any unit.
    window: steps in flight.
    groups: groups per step.
    filtered: fraction of finished groups that a filter rejects and a new group replaces.
    """
    simulated_groups = max(1, min(groups, round(MAX_GROUPS * (1 - filtered))))
    rounds = int(
        np.clip(MAX_EVENTS * (1 - filtered) / simulated_groups / window, MIN_ROUNDS, MAX_ROUNDS)
    )
    measured_steps = rounds * window
    ends = _InFlightWindow(longest, window, simulated_groups, filtered).find_step_ends(
        measured_steps + WARMUP_ROUNDS * window
    )
    return (ends[-1] - ends[-1 - measured_steps]) / measured_steps * window


class _InFlightWindow:
    """Simulated window of training steps in flight.

    Counts groups in flight and ready groups by the version at which they were admitted.
    """

    def __init__(self, longest: Array, window: int, groups: int, filtered: float) -> None:
        self._lengths, self._filtered_fraction = _draw_values(longest), filtered
        self._window, self._groups_per_step = window, groups
        self._end_heap: list[tuple[float, int]] = []
        self._num_in_flight: Counter[int] = Counter()
        self._num_ready: Counter[int] = Counter()

    def find_step_ends(self, steps: int) -> list[float]:
        ends: list[float] = []
        chances, ready = _draw_values(None), 0
        self._admit_groups(self._window * self._groups_per_step, 0, 0.0)
        while len(ends) < steps:
            now, version = heapq.heappop(self._end_heap)
            self._num_in_flight[version] -= 1
            if self._filtered_fraction and next(chances) < self._filtered_fraction:
                self._admit_groups(1, len(ends), now)
            else:
                self._num_ready[version] += 1
                ready += 1
            while ready >= self._groups_per_step and not self._must_wait(len(ends)):
                self._take_earliest()
                ready -= self._groups_per_step
                ends.append(now)
                self._admit_groups(self._groups_per_step, len(ends), now)
        return ends

    def _admit_groups(self, groups: int, version: int, now: float) -> None:
        for _ in range(groups):
            heapq.heappush(self._end_heap, (now + next(self._lengths), version))
        self._num_in_flight[version] += groups

    def _must_wait(self, version: int) -> bool:
        """Return whether a group in flight would exceed the staleness bound after this step."""
        due = version - self._window + 1
        return any(count for admitted, count in self._num_in_flight.items() if admitted <= due)

    def _take_earliest(self) -> None:
        remaining = self._groups_per_step
        for version in sorted(self._num_ready):
            num_taken = min(remaining, self._num_ready[version])
            self._num_ready[version] -= num_taken
            remaining -= num_taken
        self._num_ready, self._num_in_flight = +self._num_ready, +self._num_in_flight


def _draw_values(values: Array | None) -> Iterator[float]:
    """Yield random elements of `values`, or of [0, 1), endlessly, with a fixed seed."""
    rng = np.random.default_rng(0)
    while True:
        drawn = rng.random(DRAW_SIZE) if values is None else rng.choice(values, DRAW_SIZE)
        yield from drawn.tolist()

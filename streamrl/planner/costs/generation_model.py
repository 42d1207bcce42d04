"""Generation of a step on equal replicas: when its groups are complete, and what runs meanwhile.

Generation is continuous batching. Every running rollout gets a token in every decode step, so
lengths and capacity alone determine when a rollout starts and ends; `ReplicaSchedule` converts
decode steps to seconds. Completion lengths are the quantiles of their distribution in a fixed
order, plus the expected longest rollout of a step.

Stragglers: groups are assigned to replicas before their lengths are known; the replica with the
most tokens, or with the longest rollout, ends last. A fixed sample of steps estimates the effect.
The time of a replica is computed from its sums of tokens only: all tokens are decoded, all resident
tokens read, and rollouts share decode steps. Of training steps in flight together, a slow step
delays the steps behind it, and no other step makes up for the delay.
"""

import heapq
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial

import numpy as np

from streamrl.messages import Array
from streamrl.planner.problem.stage_timings import GeneratorTiming
from streamrl.planner.problem.workload import Workload
from streamrl.planner.simulator.simulated_engine import SimulatedEngine

# Schedule of a replica.

MIN_EDGES = 33
MAX_CHANGES = 48
"""Sampling points of a schedule: evenly spaced, and at changes of the batch."""


@dataclass(frozen=True)
class ReplicaSchedule:
    """Rollouts of a step on a replica, in decode steps from the start.

    `edges` bound m segments of decode steps.
    group_ends [groups]: when each group is complete.
    edges [m + 1]: segment borders, from 0 on.
    running_rollouts [m]: mean running rollouts.
    resident_tokens [m]: mean tokens of running rollouts, prompts included.
    prefill_tokens [m]: tokens prefilled at the start of rollouts.
    num_groups_done [m]: completed groups.
    slots: approximate concurrent rollouts when more are waiting.
    longest_tokens: tokens of the longest rollout.
    """

    group_ends: Array
    edges: Array
    running_rollouts: Array
    resident_tokens: Array
    prefill_tokens: Array
    num_groups_done: Array
    slots: float
    longest_tokens: float

    def compute_group_ends_s(self, timing: GeneratorTiming) -> Array:
        """Return when each group is complete, s after the step starts, float64 [groups]."""
        return np.interp(self.group_ends, self.edges, self._compute_elapsed_s(timing))

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
    lengths: Array,
    *,
    prompt_tokens: float,
    token_capacity: float,
    num_slots: int,
    scale: float,
    slots: float,
) -> ReplicaSchedule:
    """Simulate the groups of a step on a replica; return their schedule.

    lengths: tokens of each rollout, float64 [groups, rollouts].
    token_capacity: tokens that fit into the KV cache, divided by `scale`.
    num_slots: most simulated rollouts that run together.
    scale: number of real rollouts that each simulated rollout stands for.
    slots: concurrent real rollouts, for the result.
    """
    rollouts: list[tuple[int, int, float]] = []
    group_ends = _play_groups(lengths, prompt_tokens, token_capacity, num_slots, rollouts)
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
        group_ends,
        edges,
        widths.sum(axis=1) * per_step,
        tokens.sum(axis=1) * per_step,
        np.bincount(segments, contexts, len(edges) - 1) * scale,
        np.diff(done) * scale,
        slots,
        float(lengths.max()),
    )


def _play_groups(
    lengths: Array,
    prompt_tokens: float,
    token_capacity: float,
    num_slots: int,
    log: list[tuple[int, int, float]],
) -> Array:
    """Return the decode step in which each group ends, in the simulator's engine, float64 [groups].

    log: as in `SimulatedEngine`.
    """
    longest = prompt_tokens + float(lengths.max()) + 1
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
    group_ends = np.zeros(len(lengths))
    for group, rollouts in enumerate(lengths.astype(int).tolist()):
        engine.add_group(group, prompt_tokens, rollouts, 0.0)
    while not engine.is_empty:
        now = engine.next_event_s
        for done in engine.advance_to(now):
            group_ends[done.key] = now
    return group_ends


# Stragglers.

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


# Generation of a step.

MAX_ROLLOUTS = 256
"""Most simulated rollouts that start together on a replica; each may stand for several."""
MIN_GROUPS = 24
"""Replicas are simulated until their schedules hold so many groups together."""
MAX_REPLICA_SCHEDULES = 6
CAPACITY_TOLERANCE = 0.02
"""Relative difference of KV cache sizes that count as equal, to reuse schedules."""
NUM_PROFILE_SEGMENTS = 20
"""Segments of a step's rollout profile, for generation ahead."""


@dataclass(frozen=True)
class RolloutProfile:
    """Rollouts of a training step on a replica, by decode steps since their start.

    bounds [n + 1]: borders of n segments of decode steps.
    running_rollouts [n], resident_tokens [n]: running rollouts and their tokens.
    overhead_s [n]: seconds per decode step for prefill and finished groups.
    result_steps: decode steps after which each cut of the groups is complete.
    slots: concurrent rollouts of the replica.
    """

    timing: GeneratorTiming
    bounds: Sequence[float]
    running_rollouts: Sequence[float]
    resident_tokens: Sequence[float]
    overhead_s: Sequence[float]
    result_steps: Sequence[float]
    slots: float


class GenerationModel:
    """Model of a step's generation on equal replicas; caches replica schedules.

    All groups that a step samples start together, those that a filter replaces included; with
    `replaces_in_turn` (on policy) a group starts once the filtered one before it is complete.
    extra: rollouts per group besides group_size, such as a greedy rollout.
    """

    def __init__(
        self, workload: Workload, extra: int = 0, *, replaces_in_turn: bool = False
    ) -> None:
        self.workload = workload.sampled_workload
        self._has_chains = replaces_in_turn and workload.filtered_fraction > 0
        self._filtered_fraction = workload.filtered_fraction
        self._kept_groups = workload.groups_per_step
        self.rollouts_per_group = workload.group_size + extra
        self.find_completions_s = cache(self._compute_completions_s)
        self._replica_schedules = cache(self._make_replica_schedules)
        self._find_in_flight_steps = cache(self._compute_in_flight_steps)
        self._sample_loads = cache(partial(sample_loads, self.workload, self.rollouts_per_group))
        self._sample_chains = cache(partial(sample_loads, workload, self.rollouts_per_group))
        self.find_rollout_profile = cache(self._build_rollout_profile)
        quantiles = workload.lengths.quantiles(np.linspace(0.0005, 0.9995, 1000))
        self._mean_length = float(np.mean(quantiles))
        square = float(np.mean(quantiles**2))
        # Sampling at a random time is length-biased; rollouts are half done on average.
        self._mean_age = square / (2 * self._mean_length)

    def count_max_replica_groups(self, replicas: int) -> int:
        return -(-self.workload.groups_per_step // replicas)

    def count_slots(self, timing: GeneratorTiming) -> float:
        """Return the mean number of rollouts that fit into a replica at a time, at least 1."""
        fitting = timing.kv_tokens / (self.workload.prompt_tokens + self._mean_age)
        return max(1.0, min(float(timing.max_running), fitting))

    def _compute_completions_s(
        self, timing: GeneratorTiming, cuts: tuple[float, ...]
    ) -> list[float]:
        """Return, for each cut, the seconds from the step's start until that cut is complete.

        cuts: fractions of the step's groups; the last is 1.0.
        """
        schedules = self.find_replica_schedules(timing)
        slowest = max(schedules, key=lambda schedule: float(schedule.edges[-1]))
        if cuts == (1.0,):
            schedules = [slowest]
        sorted_ends = np.sort(
            np.concatenate([schedule.compute_group_ends_s(timing) for schedule in schedules])
        )
        ends_s = [float(sorted_ends[math.ceil(cut * len(sorted_ends)) - 1]) for cut in cuts]
        ends_s[-1] = max(
            ends_s[-1] * self._estimate_slowest_replica_factor(timing, slowest), *ends_s
        )
        if self._has_chains:
            ends_s[-1] = max(ends_s[-1], self._estimate_chains_s(timing))
        return ends_s

    def _estimate_chains_s(self, timing: GeneratorTiming) -> float:
        """Return the seconds until the last group is kept, if a group follows each filtered one.

        The slowest replica takes as many decode steps as its longest chain has tokens.
        """
        loads = self._sample_chains(min(timing.replicas, self.workload.groups_per_step))
        steps = np.maximum(loads.longest_tokens, loads.total_tokens / self.count_slots(timing))
        return float(loads.duration_s(timing, steps).max(axis=1).mean())

    def _estimate_slowest_replica_factor(
        self, timing: GeneratorTiming, schedule: ReplicaSchedule
    ) -> float:
        """Return the mean time of a step's slowest replica over that of the slowest simulated."""
        if not self.workload.has_varied_lengths:
            return 1.0
        replicas = min(timing.replicas, self.workload.groups_per_step)
        widths = np.diff(schedule.edges)
        longest = np.asarray(schedule.longest_tokens)
        schedule_loads = ReplicaLoads(
            longest,
            np.dot(schedule.running_rollouts, widths),
            np.dot(schedule.resident_tokens, widths),
        )
        rollouts = self.count_max_replica_groups(replicas) * self.rollouts_per_group
        steps, slots = float(schedule.edges[-1]), schedule.slots
        loads = self._sample_loads(replicas)
        return estimate_slowest_replica_factor(
            timing, loads, schedule_loads, steps=steps, slots=slots, rollouts=rollouts
        )

    def _delay_in_window(self, last: float, window: int) -> float:
        """Return the decode steps, `last` if alone, of a step among `window` in flight."""
        if self._filtered_fraction:
            return max(last, self._find_in_flight_steps(window))
        if self.workload.has_varied_lengths:
            return last + self._find_in_flight_steps(window) - self._find_in_flight_steps(1)
        return last

    def _compute_in_flight_steps(self, window: int) -> float:
        """Return the mean decode steps that a step is in flight, without slot limits."""
        if self._filtered_fraction:
            lengths = self.workload.lengths.sample(
                4096 * self.rollouts_per_group, np.random.default_rng(0)
            )
            longest, groups = lengths.reshape(4096, -1).max(axis=1), self._kept_groups
        else:
            longest, groups = self._sample_loads(1).longest_tokens[:, 0], 1
        return compute_mean_time_in_flight(
            longest, window=window, groups=groups, filtered=self._filtered_fraction
        )

    def _build_rollout_profile(
        self, timing: GeneratorTiming, cuts: tuple[float, ...], window: int
    ) -> RolloutProfile:
        """Return the running rollouts and tokens of a step over time, on the slowest replica.

        cuts: fractions of the step's groups.
        window: training steps in flight together.
        """
        schedules = self.find_replica_schedules(timing)
        schedule = max(schedules, key=lambda item: float(item.edges[-1]))
        undelayed_end = float(schedule.edges[-1])
        bounds = undelayed_end * np.linspace(0.0, 1.0, NUM_PROFILE_SEGMENTS + 1) ** 1.5
        sorted_ends = np.sort(np.concatenate([item.group_ends for item in schedules]))
        result_ends = [float(sorted_ends[math.ceil(cut * len(sorted_ends)) - 1]) for cut in cuts]
        end = undelayed_end * max(1.0, self._estimate_slowest_replica_factor(timing, schedule))
        end = self._delay_in_window(end, window)
        profiles = [
            np.diff(np.interp(bounds, schedule.edges, np.append(0.0, item.cumsum())))
            / np.diff(bounds)
            for item in (
                schedule.running_rollouts * np.diff(schedule.edges),
                schedule.resident_tokens * np.diff(schedule.edges),
                schedule.compute_overhead_s(timing),
            )
        ]
        running, resident, overhead_s = (item.tolist() for item in profiles)
        edges = bounds.tolist()
        if end > undelayed_end:
            # On the slowest replica a single rollout continues at the end.
            edges, overhead_s = [*edges, end], [*overhead_s, 0.0]
            running = [*running, 1.0]
            resident = [*resident, self.workload.prompt_tokens + undelayed_end]
        rollouts = self.count_max_replica_groups(timing.replicas) * self.rollouts_per_group
        slots = self.count_slots(timing)
        if rollouts > slots:
            # While rollouts wait, as many run as the schedule shows; it includes preemptions.
            num_full_segments = int(np.flatnonzero(schedule.prefill_tokens)[-1]) + 1
            slots = float(
                np.average(
                    schedule.running_rollouts[:num_full_segments],
                    weights=np.diff(schedule.edges)[:num_full_segments],
                )
            )
        return RolloutProfile(
            timing, edges, running, resident, overhead_s, [*result_ends[:-1], edges[-1]], slots
        )

    def estimate_saturated_step_s(self, timing: GeneratorTiming, steps_ahead: int) -> float:
        """Return generation seconds per step if the rollouts of later steps fill all free slots.

        All slots are taken, unless the rollouts of `steps_ahead + 1` steps are fewer.
        """
        rollouts = self.workload.groups_per_step * self.rollouts_per_group
        replica_rollouts = rollouts / timing.replicas
        running = max(1.0, min(self.count_slots(timing), (steps_ahead + 1) * replica_rollouts))
        resident = running * (self.workload.prompt_tokens + self._mean_age)
        step_s = timing.decode_step_s(running, resident)
        overhead_s = self.workload.prompt_tokens * timing.prefill_token_s
        overhead_s += timing.group_s / self.rollouts_per_group
        return replica_rollouts * (self._mean_length * step_s / running + overhead_s)

    def find_replica_schedules(self, timing: GeneratorTiming) -> list[ReplicaSchedule]:
        """Return the schedules of a few simulated replicas, which stand for all replicas.

        The longest rollout of the step is among their rollouts.
        """
        unlimited = self._replica_schedules(timing.replicas, timing.max_running, math.inf)
        peak = max(float(schedule.resident_tokens.max()) for schedule in unlimited)
        if timing.kv_tokens > peak * (1 + CAPACITY_TOLERANCE):
            return unlimited
        # Round the KV cache size down, so that similar sizes share schedules.
        token_capacity = (1 + CAPACITY_TOLERANCE) ** math.floor(
            math.log(timing.kv_tokens) / math.log(1 + CAPACITY_TOLERANCE)
        )
        return self._replica_schedules(timing.replicas, timing.max_running, token_capacity)

    def _make_replica_schedules(
        self, replicas: int, max_running: int, token_capacity: float
    ) -> list[ReplicaSchedule]:
        """Simulate a few of `replicas` replicas.

        token_capacity: tokens that fit into a replica's KV cache.
        """
        groups = self.count_max_replica_groups(replicas)
        count = min(
            replicas,
            self.workload.groups_per_step,
            MAX_REPLICA_SCHEDULES,
            max(1, -(-MIN_GROUPS // groups)),
        )
        # Keep few rollouts, but whole groups.
        simulated_groups = max(1, min(groups, MAX_ROLLOUTS // self.rollouts_per_group))
        scale, prompt = groups / simulated_groups, self.workload.prompt_tokens
        slots = min(float(max_running), token_capacity / (prompt + self._mean_age))
        return [
            schedule_replica(
                lengths,
                prompt_tokens=prompt,
                token_capacity=token_capacity / scale,
                num_slots=max(1, round(max_running / scale)),
                scale=scale,
                slots=slots,
            )
            for lengths in np.split(self._make_lengths(count * simulated_groups), count)
        ]

    def _make_lengths(self, groups: int) -> Array:
        """Return the tokens of each rollout, float64 [groups, rollouts]; the longest is in the
        middle.

        They are quantiles in a fixed random order.
        """
        num_rollouts = self.workload.groups_per_step * self.rollouts_per_group
        total = groups * self.rollouts_per_group
        quantiles = self.workload.lengths.quantiles((np.arange(total) + 0.5) / total)
        others = np.random.default_rng(0).permutation(quantiles[:-1])
        longest = max(self.workload.lengths.expected_longest(num_rollouts), others.max(initial=1.0))
        lengths = np.insert(others, (len(others) + 1) // 2, longest)
        return np.asarray(np.rint(lengths).reshape(-1, self.rollouts_per_group))

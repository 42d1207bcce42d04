"""Duration of every call for a whole step, from stage timings and workload.

Generation is continuous batching (`continuous_batching.py`). Completion lengths are the quantiles
of their distribution in a fixed order, plus the expected longest rollout of a step.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial

import numpy as np

from streamrl.buffer.micro_batch_schedule import MicroBatchPacker
from streamrl.messages import Array
from streamrl.planner.problem.stage_timings import GeneratorTiming, ScoreTiming, TrainTiming
from streamrl.planner.problem.workload import Workload
from streamrl.planner.steady_state.continuous_batching import (
    ReplicaSchedule,
    schedule_replica,
)
from streamrl.planner.steady_state.overlapping_steps import RolloutProfile
from streamrl.planner.steady_state.stragglers import (
    ReplicaLoads,
    compute_mean_time_in_flight,
    estimate_slowest_replica_factor,
    sample_loads,
)

MAX_ROLLOUTS = 256
"""Most simulated rollouts that start together on a replica; each may stand for several."""
MIN_GROUPS = 24
"""Replicas are simulated until their schedules hold so many groups together."""
MAX_REPLICA_SCHEDULES = 6
CAPACITY_TOLERANCE = 0.02
"""Relative difference of KV cache sizes that count as equal, to reuse schedules."""
NUM_PROFILE_SEGMENTS = 20
"""Segments of a step's rollout profile, for generation ahead."""


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
        self._in_flight_steps: dict[int, float] = {}
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

    def _count_replica_rollouts(self, timing: GeneratorTiming) -> float:
        """Return the rollouts of a step on each replica."""
        rollouts = self.workload.num_rollouts / self.workload.group_size * self.rollouts_per_group
        return rollouts / timing.replicas

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

    def _delay_in_window(self, timing: GeneratorTiming, last: float, window: int) -> float:
        """Return the decode steps, `last` if alone, of a step among `window` in flight."""
        if self._filtered_fraction:
            return max(last, self._find_in_flight_steps(timing, window))
        if self.workload.has_varied_lengths:
            return (
                last
                + self._find_in_flight_steps(timing, window)
                - self._find_in_flight_steps(timing, 1)
            )
        return last

    def _find_in_flight_steps(self, timing: GeneratorTiming, window: int) -> float:
        """Return the mean decode steps that a step is in flight, without slot limits."""
        if window not in self._in_flight_steps:
            if self._filtered_fraction:
                lengths = self.workload.lengths.sample(
                    4096 * self.rollouts_per_group, np.random.default_rng(0)
                )
                longest, groups = lengths.reshape(4096, -1).max(axis=1), self._kept_groups
            else:
                replicas = min(timing.replicas, self.workload.groups_per_step)
                longest, groups = self._sample_loads(replicas).longest_tokens.max(axis=1), 1
            self._in_flight_steps[window] = compute_mean_time_in_flight(
                longest, window=window, groups=groups, filtered=self._filtered_fraction
            )
        return self._in_flight_steps[window]

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
        end = self._delay_in_window(timing, end, window)
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
            running, resident = (
                [*running, 1.0],
                [*resident, self.workload.prompt_tokens + undelayed_end],
            )
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
        replica_rollouts = self._count_replica_rollouts(timing)
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


def score_duration_s(
    timing: ScoreTiming, workload: Workload, per_group: int, *, singly: bool = False
) -> float:
    """Return seconds of scoring for a whole step, on the replica with the most groups.

    per_group: scored rollouts per group.
    singly: groups arrive one by one, and each group is a batch of its own.
    """
    groups = -(-workload.groups_per_step // timing.replicas)
    rollouts = groups * per_group
    batches = groups if singly else -(-groups // timing.batch)
    return (
        batches * timing.batch_s
        + timing.batch_duration_s(rollouts, rollouts * workload.rollout_tokens)
        - timing.batch_s
    )


@dataclass(frozen=True)
class TrainDuration:
    """Time to train a model in a step.

    passes_s: passes and updates that may overlap the arrival of groups.
    final_s: later epochs and the last update, which follow.
    micro_batches: per rank, in the first epoch.
    """

    passes_s: float
    final_s: float
    micro_batches: int

    @property
    def total_s(self) -> float:
        return self.passes_s + self.final_s


def train_duration(timing: TrainTiming, workload: Workload) -> TrainDuration:
    """Return the training time of a step.

    The first epoch may start before all groups have arrived; the last update ends the step. Ranks
    advance round by round, at the speed of the rank with the most tokens.
    """
    rounds, slowest = pack_mini_batch(workload, timing.dp_size)
    micro_batches, dp_size = rounds * workload.mini_batches, timing.dp_size
    tokens = slowest * workload.mini_batches
    epoch_s = timing.compute_passes_s(micro_batches * dp_size, tokens * dp_size)
    epoch_s += micro_batches * timing.round_s
    update_s = timing.round_s + timing.update_s
    first_s = epoch_s + (workload.mini_batches - 1) * update_s
    rest_s = (workload.epochs - 1) * epoch_s
    updates = workload.num_updates - workload.mini_batches + 1
    return TrainDuration(first_s, rest_s + updates * update_s, micro_batches)


def pack_mini_batch(workload: Workload, dp_size: int) -> tuple[int, float]:
    """Return the number of rounds of a mini-batch, and the tokens of their largest micro-batches.

    The rounds are those of a run, one micro-batch per data-parallel rank; the tokens are summed
    over rounds. Completion lengths are quantiles of the workload's length distribution; the
    workload caches results.

    Example: rollouts of 10, 6, 6, 3, 2 and 1 tokens with a budget of 12 and 2 ranks give the rounds
    ([10], [3, 2, 1]) and ([6], [6]); the result is (2, 10 + 6).
    """
    if dp_size not in workload.packing_cache:
        rollouts = math.ceil(workload.num_rollouts / workload.mini_batches)
        ranks = (np.arange(rollouts) + 0.5) / rollouts
        completions = workload.lengths.quantiles(ranks)
        lengths = np.rint(workload.prompt_tokens + completions).astype(int).tolist()
        budget = max(int(workload.micro_batch_tokens), *lengths)
        packer = MicroBatchPacker(dp_size=dp_size, micro_batch_tokens=budget)
        packer.add_group("", lengths)
        rounds = packer.take_rounds(final=True)
        tokens = sum(max(sum(lengths[i] for _, i in rows) for rows in batch) for batch in rounds)
        workload.packing_cache[dp_size] = len(rounds), tokens
    return workload.packing_cache[dp_size]


STEP_CUTS = {1: (1.0,), 2: (0.5, 1.0), 4: (0.125, 0.375, 0.625, 0.875, 1.0)}
"""Cuts of a step's work (fractions of the work), by the fewest pieces that they need.

The first and the last cut are small: they determine how fast the pipeline fills and drains.
"""


def choose_cuts(pieces: int) -> tuple[float, ...]:
    """Return the finest cuts of a step's work, as fractions, that the number of pieces allows.

    pieces: units that the work can be divided into, such as groups or micro-batches.
    """
    return STEP_CUTS[max(min_pieces for min_pieces in STEP_CUTS if min_pieces <= max(1, pieces))]


def split_seconds(total_s: float, cuts: Sequence[float]) -> Sequence[float]:
    """Divide `total_s` at `cuts`, ascending fractions; return the seconds between them."""
    return [total_s * (late - early) for early, late in itertools.pairwise((0.0, *cuts))]

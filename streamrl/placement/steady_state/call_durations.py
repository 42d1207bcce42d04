"""How long a whole step's work of each call takes, of coefficients and of what a step is made of.

Generation is continuous batching (`continuous_batching.py`). Lengths are the quantiles of their
distribution, in an order that is fixed, with the longest that is to be expected of a whole step.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from streamrl.messages import Array
from streamrl.placement.stage_timings import GeneratorTiming, ScoreTiming, TrainTiming
from streamrl.placement.steady_state.continuous_batching import ReplicaSchedule, schedule_replica
from streamrl.placement.steady_state.in_flight_window import mean_time_in_flight
from streamrl.placement.steady_state.micro_batch_rounds import pack_mini_batch
from streamrl.placement.steady_state.overlapping_steps import RolloutProfile
from streamrl.placement.steady_state.refill_chains import RefillChains, chain_length_quantiles
from streamrl.placement.steady_state.stragglers import (
    ReplicaLoads,
    sample_loads,
    slowest_replica_factor,
)
from streamrl.placement.workload import Workload

MAX_ROLLOUTS = 256
"""Of a share, at once; each then stands for several."""
MAX_CHAIN_ROLLOUTS = 16384
"""Of a share, with those that come in the place of others."""
MIN_GROUPS = 24
"""Shares are made until they have so many groups together, or there are no more replicas."""
MAX_REPLICA_SCHEDULES = 6
NUM_SAMPLED_GROUPS = 4096
"""That are sampled, where others take the places of some."""
CAPACITY_TOLERANCE = 0.02
"""Rooms for keys and values that differ by less, relatively, are the same."""
NUM_PROFILE_SEGMENTS = 20
"""Of a step's rollouts, where those of several steps go on together."""


class GenerationModel:
    """A step's generation on replicas that are alike; shares are remembered.

    extra: rollouts of each group besides group_size, as a greedy one. Where some are filtered the
    step's groups are asked for at once, and others in the places of those that are; ahead, all
    that are sampled for a step are, of which a part is `replaced`.
    """

    def __init__(self, workload: Workload, extra: int = 0, *, replaced: float = 0.0) -> None:
        self.workload = workload
        self._replaced_fraction = replaced
        self.rollouts_per_group = workload.group_size + extra
        self._completions_s: dict[
            tuple[GeneratorTiming, tuple[float, ...], float], list[float]
        ] = {}
        self._replica_schedules: dict[tuple[int, int, float], list[ReplicaSchedule]] = {}
        self._replica_loads: dict[int, ReplicaLoads] = {}
        self._in_flight_steps: dict[int, float] = {}
        self._rollout_profiles: dict[
            tuple[GeneratorTiming, tuple[float, ...], int], RolloutProfile
        ] = {}
        quantiles = workload.lengths.quantiles(np.linspace(0.0005, 0.9995, 1000))
        self._mean_length = float(np.mean(quantiles))
        square = float(np.mean(quantiles**2))
        # Of those that run at a moment, the long ones are more, and half-way on average.
        self._mean_age = square / (2 * self._mean_length)

    def max_replica_groups(self, replicas: int) -> int:
        """Of the replica that has the most."""
        return -(-self.workload.groups_per_step // replicas)

    def count_slots(self, timing: GeneratorTiming) -> float:
        """Rollouts that a replica has room for, at least 1."""
        room = timing.kv_tokens / (self.workload.prompt_tokens + self._mean_age)
        return max(1.0, min(float(timing.max_running), room))

    def find_completions_s(
        self, timing: GeneratorTiming, cuts: tuple[float, ...], link_s: float = 0.0
    ) -> list[float]:
        """When these parts of a step's groups are complete, s after they are asked for.

        The last is 1.0: when all are. link_s: from the end of a group that is filtered to where
        another is asked for.
        """
        key = (timing, cuts, link_s)
        if key not in self._completions_s:
            self._completions_s[key] = self._compute_completions_s(*key)
        return self._completions_s[key]

    def _compute_completions_s(
        self, timing: GeneratorTiming, cuts: tuple[float, ...], link_s: float
    ) -> list[float]:
        shares = self.find_replica_schedules(timing)
        slowest = max(shares, key=lambda share: float(share.edges[-1]))
        if cuts == (1.0,):
            shares = [slowest]
        ordered = np.sort(np.concatenate([share.group_ends_s(timing, link_s) for share in shares]))
        found = [float(ordered[math.ceil(cut * len(ordered)) - 1]) for cut in cuts]
        found[-1] = max(found[-1] * self._slowest_replica_factor(timing, slowest), *found)
        return found

    def _slowest_replica_factor(self, timing: GeneratorTiming, share: ReplicaSchedule) -> float:
        """By how much the slowest replica is, beyond one with the longest rollout."""
        if not (self.workload.has_varied_lengths or self.workload.filtered_fraction):
            return 1.0
        replicas = min(timing.replicas, self.workload.groups_per_step)
        widths = np.diff(share.edges)
        longest = np.asarray(share.longest_tokens)
        own = ReplicaLoads(
            longest, np.dot(share.running_rollouts, widths), np.dot(share.resident_tokens, widths)
        )
        rollouts = self.max_replica_groups(replicas) * self.rollouts_per_group
        steps, slots = float(share.edges[-1]), share.slots
        loads = self._sample_loads(replicas)
        return slowest_replica_factor(
            timing, loads, own, steps=steps, slots=slots, rollouts=rollouts
        )

    def _delay_in_window(self, timing: GeneratorTiming, last: float, window: int) -> float:
        """The decode steps of a step that would have `last` alone, beside others of the window."""
        if self._replaced_fraction:
            # Who comes in the place of others does so while the first still wait for theirs.
            return max(last, self._find_in_flight_steps(timing, window))
        if self.workload.has_varied_lengths:
            return (
                last
                + self._find_in_flight_steps(timing, window)
                - self._find_in_flight_steps(timing, 1)
            )
        return last

    def _find_in_flight_steps(self, timing: GeneratorTiming, window: int) -> float:
        """For how many decode steps, where there are places for all."""
        if window not in self._in_flight_steps:
            workload, replaced = self.workload, self._replaced_fraction
            groups = round(workload.groups_per_step * (1 - replaced)) if replaced else 1
            if replaced:
                every = workload.lengths.sample(
                    NUM_SAMPLED_GROUPS * self.rollouts_per_group, np.random.default_rng(0)
                )
                longest = every.reshape(NUM_SAMPLED_GROUPS, self.rollouts_per_group).max(axis=1)
            else:
                replicas = min(timing.replicas, workload.groups_per_step)
                longest = self._sample_loads(replicas).longest_tokens.max(axis=1)
            self._in_flight_steps[window] = mean_time_in_flight(
                longest, window=window, groups=groups, filtered=replaced
            )
        return self._in_flight_steps[window]

    def _sample_loads(self, replicas: int) -> ReplicaLoads:
        if replicas not in self._replica_loads:
            self._replica_loads[replicas] = sample_loads(
                self.workload, self.rollouts_per_group, replicas
            )
        return self._replica_loads[replicas]

    def find_rollout_profile(
        self, timing: GeneratorTiming, cuts: tuple[float, ...], window: int
    ) -> RolloutProfile:
        """The slowest replica's part of a step, to go on beside others: so many are under way."""
        key = (timing, cuts, window)
        if key not in self._rollout_profiles:
            self._rollout_profiles[key] = self._build_rollout_profile(*key)
        return self._rollout_profiles[key]

    def _build_rollout_profile(
        self, timing: GeneratorTiming, cuts: tuple[float, ...], window: int
    ) -> RolloutProfile:
        shares = self.find_replica_schedules(timing)
        share = max(shares, key=lambda each: float(each.edges[-1]))
        last = float(share.edges[-1])
        bounds = last * np.linspace(0.0, 1.0, NUM_PROFILE_SEGMENTS + 1) ** 1.5
        ordered = np.sort(np.concatenate([each.group_ends for each in shares]))
        ends = [float(ordered[math.ceil(cut * len(ordered)) - 1]) for cut in cuts]
        longer = last * max(1.0, self._slowest_replica_factor(timing, share))
        longer = self._delay_in_window(timing, longer, window)
        found = [
            np.diff(np.interp(bounds, share.edges, np.append(0.0, each.cumsum()))) / np.diff(bounds)
            for each in (
                share.running_rollouts * np.diff(share.edges),
                share.resident_tokens * np.diff(share.edges),
                share.overhead_s(timing),
            )
        ]
        running, resident, besides_s = (each.tolist() for each in found)
        edges = bounds.tolist()
        if longer > last:
            # On the slowest of all one rollout goes on alone.
            edges, besides_s = [*edges, longer], [*besides_s, 0.0]
            running, resident = [*running, 1.0], [*resident, self.workload.prompt_tokens + last]
        rollouts = self.max_replica_groups(timing.replicas) * self.rollouts_per_group
        places = self.count_slots(timing)
        if rollouts > places:
            # As many as run while some wait: what is given up and taken in again is in the share.
            full = int(np.flatnonzero(share.prefill_tokens)[-1]) + 1
            places = float(
                np.average(share.running_rollouts[:full], weights=np.diff(share.edges)[:full])
            )
        return RolloutProfile(
            timing, edges, running, resident, besides_s, [*ends[:-1], edges[-1]], places
        )

    def saturated_step_s(self, timing: GeneratorTiming, steps_ahead: int) -> float:
        """Per step, where the next steps' rollouts fill the places of those that are done.

        As many run as there is room for, of the rollouts of `steps_ahead` and one more.
        """
        rollouts = self.workload.num_rollouts / self.workload.group_size * self.rollouts_per_group
        each = rollouts / timing.replicas
        running = max(1.0, min(self.count_slots(timing), (steps_ahead + 1) * each))
        resident = running * (self.workload.prompt_tokens + self._mean_age)
        step_s = timing.decode_step_s(running, resident)
        besides_s = self.workload.prompt_tokens * timing.prefill_token_s
        besides_s += timing.group_s / self.rollouts_per_group
        return each * (self._mean_length * step_s / running + besides_s)

    def find_replica_schedules(self, timing: GeneratorTiming) -> list[ReplicaSchedule]:
        """Those of some replicas, the longest rollout of the step among them."""
        roomy = (timing.replicas, timing.max_running, math.inf)
        if roomy not in self._replica_schedules:
            self._replica_schedules[roomy] = self._make_replica_schedules(*roomy)
        peak = max(float(share.resident_tokens.max()) for share in self._replica_schedules[roomy])
        if timing.kv_tokens > peak * (1 + CAPACITY_TOLERANCE):
            return self._replica_schedules[roomy]
        # Rooms that differ by little are the same.
        room = (1 + CAPACITY_TOLERANCE) ** math.floor(
            math.log(timing.kv_tokens) / math.log(1 + CAPACITY_TOLERANCE)
        )
        key = (timing.replicas, timing.max_running, room)
        if key not in self._replica_schedules:
            self._replica_schedules[key] = self._make_replica_schedules(*key)
        return self._replica_schedules[key]

    def _make_replica_schedules(
        self, replicas: int, places: int, room: float
    ) -> list[ReplicaSchedule]:
        groups = self.max_replica_groups(replicas)
        used = min(replicas, self.workload.groups_per_step)
        count = min(used, MAX_REPLICA_SCHEDULES, max(1, -(-MIN_GROUPS // groups)))
        # Few enough rollouts, groups as they are.
        chained = math.ceil(MAX_CHAIN_ROLLOUTS * (1 - self.workload.filtered_fraction))
        kept = max(1, min(groups, min(MAX_ROLLOUTS, chained) // self.rollouts_per_group))
        scale, prompt = groups / kept, self.workload.prompt_tokens
        slots = min(float(places), room / (prompt + self._mean_age))
        return [
            schedule_replica(
                drawn,
                prompt_tokens=prompt,
                room=room / scale,
                places=max(1, round(places / scale)),
                scale=scale,
                slots=slots,
            )
            for drawn in self._draw_chains(used, count, kept)
        ]

    def _draw_chains(self, replicas: int, shares: int, chains: int) -> Iterator[RefillChains]:
        """Groups of so many shares, with so many chains each; the longest of a step among them."""
        if self.workload.filtered_fraction:
            longest = float(self._sample_loads(replicas).longest_tokens.max(axis=1).mean())
            whole = self._make_refill_chains(shares * chains).stretch_longest(longest)
        else:
            whole = self._make_unfiltered_chains(shares * chains)
        return whole.split_chains(shares)

    def _make_refill_chains(self, chains: int) -> RefillChains:
        """Groups of which some take the place of a filtered one, in an order that is fixed."""
        rng = np.random.default_rng(0)
        counts = rng.permutation(chain_length_quantiles(self.workload.filtered_fraction, chains))
        lengths = rng.permutation(self._length_quantiles(int(counts.sum())))
        return self._to_chains(lengths, counts)

    def _make_unfiltered_chains(self, groups: int) -> RefillChains:
        """Groups that all stay, likewise; half-way is the longest rollout of a whole step."""
        everyone = self.workload.groups_per_step * self.rollouts_per_group
        others = np.random.default_rng(0).permutation(self._length_quantiles(groups)[:-1])
        longest = max(self.workload.lengths.expected_longest(everyone), others.max(initial=1.0))
        lengths = np.insert(others, (len(others) + 1) // 2, longest)
        return self._to_chains(lengths, np.ones(groups, np.int64))

    def _length_quantiles(self, groups: int) -> Array:
        """Of the lengths of so many groups' rollouts, ascending."""
        total = groups * self.rollouts_per_group
        return self.workload.lengths.quantiles((np.arange(total) + 0.5) / total)

    def _to_chains(self, lengths: Array, counts: Array) -> RefillChains:
        return RefillChains.from_counts(
            np.rint(lengths).reshape(-1, self.rollouts_per_group), counts
        )


def score_duration_s(
    timing: ScoreTiming, workload: Workload, per_group: int, *, singly: bool = False
) -> float:
    """Scoring so many rollouts of every group of a step, of the replica that has the most.

    singly: groups come one by one, and each is a batch of its own: there is room for it.
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
    """A step's training of one model: `passes_s` may go on as groups come, then comes `final_s`.

    micro_batches: of a share, in the first epoch.
    """

    passes_s: float
    final_s: float
    micro_batches: int

    @property
    def total_s(self) -> float:
        """All of it."""
        return self.passes_s + self.final_s


def train_duration(timing: TrainTiming, workload: Workload) -> TrainDuration:
    """The first epoch can begin before all groups are there; the last update ends the step.

    Ranks go from round to round together, as long as the one that has most takes.
    """
    rounds, slowest = pack_mini_batch(workload, timing.dp_size)
    micro_batches, shares = rounds * workload.mini_batches, timing.dp_size
    tokens = slowest * workload.mini_batches
    epoch_s = timing.passes_s(micro_batches * shares, tokens * shares)
    epoch_s += micro_batches * timing.round_s
    update_s = timing.round_s + timing.update_s
    first_s = epoch_s + (workload.mini_batches - 1) * update_s
    rest_s = (workload.epochs - 1) * epoch_s
    updates = workload.num_updates - workload.mini_batches + 1
    return TrainDuration(first_s, rest_s + updates * update_s, micro_batches)


STEP_CUTS = {1: (1.0,), 2: (0.5, 1.0), 4: (0.125, 0.375, 0.625, 0.875, 1.0)}
"""How a step's work is cut, by the least number of pieces there must be: up to where each goes.

The first and the last are small: with them a pipeline fills, and runs dry.
"""


def choose_cuts(pieces: int) -> tuple[float, ...]:
    """The finest that so many pieces allow."""
    return STEP_CUTS[max(least for least in STEP_CUTS if least <= max(1, pieces))]


def split_seconds(total_s: float, cuts: Sequence[float]) -> Sequence[float]:
    """The seconds of each part."""
    return [total_s * (late - early) for early, late in itertools.pairwise((0.0, *cuts))]

"""How long a whole step's work of each call takes, of coefficients and of what a step is made of.

Generation is continuous batching. Counted in decode steps, when a rollout begins and ends depends
on lengths and room alone: each running one gets a token in every step. `Share` is that schedule;
what a decode step takes turns it into seconds (`Share.ends_s`). Lengths are the quantiles of their
distribution, in an order that is fixed, with the longest that is to be expected of a whole step.
"""

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from streamrl.messages import Array
from streamrl.placement.timings import GeneratorTiming, ScoreTiming, TrainTiming
from streamrl.placement.workload import Workload

MOST_ROLLOUTS = 256
"""Of a share, each then stands for several."""
FEWEST_GROUPS = 24
"""Shares are made until they have so many groups together, or there are no more replicas."""
MOST_SHARES = 6
ROUNDS = 4
"""Of finding out how much steps that overlap slow one another down."""


@dataclass(frozen=True)
class Share:
    """One replica's rollouts of a step, all asked for at once, in decode steps.

    group_ends [groups]: at which one each group is complete. edges [m + 1]: at which ones the
    number of running rollouts changes, from 0 on; running [m]: how many run between them; resident
    [m]: the tokens they have together halfway, prompts included; begun [m]: groups' prompts that
    have begun. scale: rollouts that each of them stands for; it is in `running` and `resident`.
    """

    group_ends: Array
    edges: Array
    running: Array
    resident: Array
    begun: Array
    slots: float

    @cached_property
    def middles(self) -> Array:
        """Halfway between the edges."""
        return (self.edges[1:] + self.edges[:-1]) / 2

    def ends_s(self, timing: GeneratorTiming, prompt_s: float, period_s: float = math.inf) -> Array:
        """When each group is complete, s after they are asked for, float64 [groups].

        prompt_s: to take in one group's prompt. With a period, other steps' shares come before and
        after this one, period_s apart, and run beside it.
        """
        return np.interp(self.group_ends, self.edges, self._clock(timing, prompt_s, period_s))

    def _clock(self, timing: GeneratorTiming, prompt_s: float, period_s: float) -> Array:
        prompts = np.concatenate(([0.0], np.cumsum(self.begun))) * prompt_s
        running, resident = self.running, self.resident
        clock = self._clock_of(timing, running, resident) + prompts
        for _ in range(ROUNDS if period_s < clock[-1] else 0):
            running, resident = self._beside_others(clock, period_s)
            # Each period takes in one share's prompts.
            slower = 1 + prompts[-1] / period_s
            clock = self._clock_of(timing, running, resident) * slower
        return timing.begin_s + clock

    def _clock_of(self, timing: GeneratorTiming, running: Array, resident: Array) -> Array:
        spent = np.diff(self.edges) * decode_steps_s(timing, running, resident)
        return np.concatenate(([0.0], np.cumsum(spent)))

    def _beside_others(self, clock: Array, period_s: float) -> tuple[Array, Array]:
        """What runs at `middles` when shares come period_s apart."""
        at = (clock[1:] + clock[:-1]) / 2
        others = np.arange(1, math.ceil(clock[-1] / period_s) + 1) * period_s
        moments = (at[:, None] + np.concatenate((-others, others))).ravel()
        shape = (len(at), 2 * len(others))
        sums = []
        for own in (self.running, self.resident):
            beside = np.interp(moments, at, own, left=0.0, right=0.0).reshape(shape)
            sums.append(own + beside.sum(axis=1))
        # More than the room there is wait.
        held = np.minimum(1.0, self.slots / np.maximum(sums[0], 1e-9))
        return sums[0] * held, sums[1] * held


def decode_steps_s(timing: GeneratorTiming, running: Array, resident: Array) -> Array:
    """GeneratorTiming.decode_step_s of arrays."""
    memory = timing.weights_s + timing.kv_token_s * resident
    compute = timing.compute_rollout_s * running
    return np.maximum(memory, compute) + timing.step_s + timing.rollout_s * running


class Generation:
    """A step's generation on replicas that are alike; shares are remembered.

    extra: rollouts of each group besides group_size, as a greedy one.
    """

    def __init__(self, workload: Workload, extra: int = 0) -> None:
        self.workload = workload
        self.per_group = workload.group_size + extra
        self._shares: dict[tuple[int, float], list[Share]] = {}
        quantiles = workload.lengths.quantiles(np.linspace(0.0005, 0.9995, 1000))
        self._mean = float(np.mean(quantiles))
        square = float(np.mean(quantiles**2))
        # Who begins together is of one age until different lengths have mixed them: a spread of
        # one mean is enough for that, with none all reach their end at once.
        spread = square / self._mean**2 - 1
        self._age = square / (2 * self._mean) * (1 + max(0.0, 1 - spread))

    def groups(self, replicas: int) -> int:
        """Of the replica that has the most."""
        return -(-self.workload.groups_per_step // replicas)

    def slots(self, timing: GeneratorTiming) -> float:
        """Rollouts that a replica has room for, at least 1."""
        room = timing.kv_tokens / (self.workload.prompt_tokens + self._age)
        return max(1.0, min(float(timing.max_running), room))

    def completion(
        self, timing: GeneratorTiming, cuts: Sequence[float], period_s: float = math.inf
    ) -> list[float]:
        """When these parts of a step's groups are complete, s after they are asked for.

        1.0 is when all are. With a period, as in Share.ends_s.
        """
        prompt_s = timing.prefill_token_s * self.workload.prompt_tokens
        ends = [
            share.ends_s(timing, prompt_s, period_s)
            for share in self.shares(timing.replicas, self.slots(timing))
        ]
        ordered = np.sort(np.concatenate(ends))
        return [float(ordered[math.ceil(cut * len(ordered)) - 1]) for cut in cuts]

    def saturated_s(self, timing: GeneratorTiming, steps_ahead: int) -> float:
        """Per step, where the next steps' rollouts fill the places of those that are done.

        As many run as there is room for, of the rollouts of `steps_ahead` and one more.
        """
        rollouts = self.workload.rollouts / self.workload.group_size * self.per_group
        each = rollouts / timing.replicas
        running = max(1.0, min(self.slots(timing), (steps_ahead + 1) * each))
        resident = running * (self.workload.prompt_tokens + self._age)
        step_s = timing.decode_step_s(running, resident)
        prompts = self.workload.groups_per_step / timing.replicas * self.workload.prompt_tokens
        return each * self._mean * step_s / running + prompts * timing.prefill_token_s

    def shares(self, replicas: int, slots: float) -> list[Share]:
        """Those of some replicas, the longest rollout of the step among them."""
        key = (replicas, slots)
        if key not in self._shares:
            self._shares[key] = self._make(replicas, slots)
        return self._shares[key]

    def _make(self, replicas: int, slots: float) -> list[Share]:
        groups = self.groups(replicas)
        used = min(replicas, self.workload.groups_per_step)
        count = min(used, MOST_SHARES, max(1, -(-FEWEST_GROUPS // groups)))
        # Few enough rollouts, groups as they are.
        kept = max(1, min(groups, MOST_ROLLOUTS // self.per_group))
        total = count * kept * self.per_group
        lengths = self.workload.lengths.quantiles((np.arange(total) + 0.5) / total)
        everyone = self.workload.groups_per_step * self.per_group
        longest = self.workload.lengths.expected_longest(everyone)
        lengths = np.random.default_rng(0).permutation(np.sort(lengths)[:-1])
        lengths = np.insert(lengths, total // 2, max(longest, float(lengths.max(initial=1.0))))
        grid = lengths.reshape(count, kept, self.per_group)
        prompt = self.workload.prompt_tokens
        return [_share(part, slots, groups / kept, prompt) for part in grid]


def _share(lengths: Array, slots: float, scale: float, prompt_tokens: float) -> Share:
    """lengths [groups, rollouts]: in the order in which they are begun."""
    flat = lengths.ravel()
    begins = _begins(flat, max(1, round(slots / scale)))
    ends = begins + flat
    at = np.concatenate((begins, ends))
    change = np.repeat([1.0, -1.0], len(flat))
    order = np.argsort(at, kind="stable")
    edges, first = np.unique(at[order], return_index=True)
    running = np.cumsum(np.add.reduceat(change[order], first))[:-1]
    begun_at = np.concatenate((begins, -begins))
    sums = np.cumsum(np.add.reduceat(begun_at[order], first))[:-1]
    middles = (edges[1:] + edges[:-1]) / 2
    resident = running * (prompt_tokens + middles) - sums
    firsts = begins.reshape(lengths.shape).min(axis=1)
    begun = np.bincount(np.searchsorted(edges, firsts), minlength=len(edges))[: len(running)]
    return Share(
        ends.reshape(lengths.shape).max(axis=1),
        edges,
        running * scale,
        resident * scale,
        begun * scale,
        slots,
    )


def _begins(lengths: Array, slots: int) -> Array:
    """When each begins, in this order, where so many run at once."""
    begins = np.zeros(len(lengths))
    if len(lengths) <= slots:
        return begins
    free = sorted(float(length) for length in lengths[:slots])
    for i in range(slots, len(lengths)):
        begins[i] = free[0]
        heapq.heapreplace(free, free[0] + float(lengths[i]))
    return begins


def score_s(timing: ScoreTiming, workload: Workload, per_group: int) -> float:
    """Scoring so many rollouts of every group of a step, of the replica that has the most."""
    groups = -(-workload.groups_per_step // timing.replicas)
    rollouts = groups * per_group
    batches = -(-groups // timing.batch)
    return (
        batches * timing.batch_s
        + timing.batch_of(rollouts, rollouts * workload.rollout_tokens)
        - timing.batch_s
    )


@dataclass(frozen=True)
class Training:
    """A step's training of one model: `passes_s` may go on as groups come, then comes `last_s`.

    micro_batches: of a share, in the first epoch.
    """

    passes_s: float
    last_s: float
    micro_batches: int

    @property
    def total_s(self) -> float:
        """All of it."""
        return self.passes_s + self.last_s


def training(timing: TrainTiming, workload: Workload) -> Training:
    """The first epoch can begin before all groups are there; the last update ends the step."""
    share = workload.tokens / workload.mini_batches / timing.shares
    micro_batches = workload.mini_batches * math.ceil(share / workload.micro_batch_tokens)
    epoch_s = timing.passes_s(micro_batches * timing.shares, workload.tokens)
    first_s = epoch_s + (workload.mini_batches - 1) * timing.update_s
    rest_s = (workload.epochs - 1) * epoch_s
    updates = workload.updates - workload.mini_batches + 1
    return Training(first_s, rest_s + updates * timing.update_s, micro_batches)


PARTS = {1: (1.0,), 2: (0.5, 1.0), 4: (0.125, 0.375, 0.625, 0.875, 1.0)}
"""How a step's work is cut, by the least number of pieces there must be: up to where each goes.

The first and the last are small: with them a pipeline fills, and runs dry.
"""


def cuts_of(pieces: int) -> Sequence[float]:
    """The finest that so many pieces allow."""
    return PARTS[max(least for least in PARTS if least <= max(1, pieces))]


def spread(total_s: float, cuts: Sequence[float]) -> Sequence[float]:
    """The seconds of each part."""
    return [total_s * (late - early) for early, late in itertools.pairwise((0.0, *cuts))]

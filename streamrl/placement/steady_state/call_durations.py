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
from streamrl.placement.steady_state.continuous_batching import Share, share_of
from streamrl.placement.steady_state.in_flight_window import under_way
from streamrl.placement.steady_state.micro_batch_rounds import of_mini_batch
from streamrl.placement.steady_state.overlapping_steps import Stream
from streamrl.placement.steady_state.refill_chains import Chained, counts_of
from streamrl.placement.steady_state.stragglers import Loads, sampled, slower
from streamrl.placement.workload import Workload

MOST_ROLLOUTS = 256
"""Of a share, at once; each then stands for several."""
MOST_CHAINED = 16384
"""Of a share, with those that come in the place of others."""
FEWEST_GROUPS = 24
"""Shares are made until they have so many groups together, or there are no more replicas."""
MOST_SHARES = 6
GROUPS = 4096
"""That are sampled, where others take the places of some."""
FINE = 0.02
"""Rooms for keys and values that differ by less, relatively, are the same."""
STRETCHES = 20
"""Of a step's rollouts, where those of several steps go on together."""


class Generation:
    """A step's generation on replicas that are alike; shares are remembered.

    extra: rollouts of each group besides group_size, as a greedy one. Where some are filtered the
    step's groups are asked for at once, and others in the places of those that are; ahead, all
    that are sampled for a step are, of which a part is `replaced`.
    """

    def __init__(self, workload: Workload, extra: int = 0, *, replaced: float = 0.0) -> None:
        self.workload = workload
        self._replaced = replaced
        self.per_group = workload.group_size + extra
        self._found: dict[tuple[GeneratorTiming, tuple[float, ...], float], list[float]] = {}
        self._shares: dict[tuple[int, int, float], list[Share]] = {}
        self._loads: dict[int, Loads] = {}
        self._windows: dict[int, float] = {}
        self._streams: dict[tuple[GeneratorTiming, tuple[float, ...], int], Stream] = {}
        quantiles = workload.lengths.quantiles(np.linspace(0.0005, 0.9995, 1000))
        self._mean = float(np.mean(quantiles))
        square = float(np.mean(quantiles**2))
        # Of those that run at a moment, the long ones are more, and half-way on average.
        self._age = square / (2 * self._mean)

    def groups(self, replicas: int) -> int:
        """Of the replica that has the most."""
        return -(-self.workload.groups_per_step // replicas)

    def slots(self, timing: GeneratorTiming) -> float:
        """Rollouts that a replica has room for, at least 1."""
        room = timing.kv_tokens / (self.workload.prompt_tokens + self._age)
        return max(1.0, min(float(timing.max_running), room))

    def completion(
        self, timing: GeneratorTiming, cuts: tuple[float, ...], link_s: float = 0.0
    ) -> list[float]:
        """When these parts of a step's groups are complete, s after they are asked for.

        The last is 1.0: when all are. link_s: from the end of a group that is filtered to where
        another is asked for.
        """
        key = (timing, cuts, link_s)
        if key not in self._found:
            self._found[key] = self._completion(*key)
        return self._found[key]

    def _completion(
        self, timing: GeneratorTiming, cuts: tuple[float, ...], link_s: float
    ) -> list[float]:
        shares = self.shares(timing)
        slowest = max(shares, key=lambda share: float(share.edges[-1]))
        if cuts == (1.0,):
            shares = [slowest]
        ordered = np.sort(np.concatenate([share.ends_s(timing, link_s) for share in shares]))
        found = [float(ordered[math.ceil(cut * len(ordered)) - 1]) for cut in cuts]
        found[-1] = max(found[-1] * self._slower(timing, slowest), *found)
        return found

    def _slower(self, timing: GeneratorTiming, share: Share) -> float:
        """By how much the slowest replica is, beyond one with the longest rollout."""
        if not (self.workload.varied or self.workload.filtered):
            return 1.0
        replicas = min(timing.replicas, self.workload.groups_per_step)
        widths = np.diff(share.edges)
        longest = np.asarray(share.longest)
        own = Loads(longest, np.dot(share.running, widths), np.dot(share.resident, widths))
        rollouts = self.groups(replicas) * self.per_group
        steps, slots = float(share.edges[-1]), share.slots
        loads = self._sampled(replicas)
        return slower(timing, loads, own, steps=steps, slots=slots, rollouts=rollouts)

    def _held_up(self, timing: GeneratorTiming, last: float, window: int) -> float:
        """The decode steps of a step that would have `last` alone, beside others of the window."""
        if self._replaced:
            # Who comes in the place of others does so while the first still wait for theirs.
            return max(last, self._under_way(timing, window))
        if self.workload.varied:
            return last + self._under_way(timing, window) - self._under_way(timing, 1)
        return last

    def _under_way(self, timing: GeneratorTiming, window: int) -> float:
        """For how many decode steps, where there are places for all."""
        if window not in self._windows:
            workload, replaced = self.workload, self._replaced
            groups = round(workload.groups_per_step * (1 - replaced)) if replaced else 1
            if replaced:
                every = workload.lengths.sample(GROUPS * self.per_group, np.random.default_rng(0))
                longest = every.reshape(GROUPS, self.per_group).max(axis=1)
            else:
                replicas = min(timing.replicas, workload.groups_per_step)
                longest = self._sampled(replicas).longest.max(axis=1)
            self._windows[window] = under_way(
                longest, window=window, groups=groups, filtered=replaced
            )
        return self._windows[window]

    def _sampled(self, replicas: int) -> Loads:
        if replicas not in self._loads:
            self._loads[replicas] = sampled(self.workload, self.per_group, replicas)
        return self._loads[replicas]

    def stream(self, timing: GeneratorTiming, cuts: tuple[float, ...], window: int) -> Stream:
        """The slowest replica's part of a step, to go on beside others: so many are under way."""
        key = (timing, cuts, window)
        if key not in self._streams:
            self._streams[key] = self._stream(*key)
        return self._streams[key]

    def _stream(self, timing: GeneratorTiming, cuts: tuple[float, ...], window: int) -> Stream:
        shares = self.shares(timing)
        share = max(shares, key=lambda each: float(each.edges[-1]))
        last = float(share.edges[-1])
        bounds = last * np.linspace(0.0, 1.0, STRETCHES + 1) ** 1.5
        ordered = np.sort(np.concatenate([each.group_ends for each in shares]))
        ends = [float(ordered[math.ceil(cut * len(ordered)) - 1]) for cut in cuts]
        longer = last * max(1.0, self._slower(timing, share))
        longer = self._held_up(timing, longer, window)
        found = [
            np.diff(np.interp(bounds, share.edges, np.append(0.0, each.cumsum()))) / np.diff(bounds)
            for each in (
                share.running * np.diff(share.edges),
                share.resident * np.diff(share.edges),
                share.besides_s(timing),
            )
        ]
        running, resident, besides_s = (each.tolist() for each in found)
        edges = bounds.tolist()
        if longer > last:
            # On the slowest of all one rollout goes on alone.
            edges, besides_s = [*edges, longer], [*besides_s, 0.0]
            running, resident = [*running, 1.0], [*resident, self.workload.prompt_tokens + last]
        rollouts = self.groups(timing.replicas) * self.per_group
        places = self.slots(timing)
        if rollouts > places:
            # As many as run while some wait: what is given up and taken in again is in the share.
            full = int(np.flatnonzero(share.computed)[-1]) + 1
            places = float(np.average(share.running[:full], weights=np.diff(share.edges)[:full]))
        return Stream(timing, edges, running, resident, besides_s, [*ends[:-1], edges[-1]], places)

    def saturated_s(self, timing: GeneratorTiming, steps_ahead: int) -> float:
        """Per step, where the next steps' rollouts fill the places of those that are done.

        As many run as there is room for, of the rollouts of `steps_ahead` and one more.
        """
        rollouts = self.workload.rollouts / self.workload.group_size * self.per_group
        each = rollouts / timing.replicas
        running = max(1.0, min(self.slots(timing), (steps_ahead + 1) * each))
        resident = running * (self.workload.prompt_tokens + self._age)
        step_s = timing.decode_step_s(running, resident)
        besides_s = self.workload.prompt_tokens * timing.prefill_token_s
        besides_s += timing.group_s / self.per_group
        return each * (self._mean * step_s / running + besides_s)

    def shares(self, timing: GeneratorTiming) -> list[Share]:
        """Those of some replicas, the longest rollout of the step among them."""
        roomy = (timing.replicas, timing.max_running, math.inf)
        if roomy not in self._shares:
            self._shares[roomy] = self._make(*roomy)
        peak = max(float(share.resident.max()) for share in self._shares[roomy])
        if timing.kv_tokens > peak * (1 + FINE):
            return self._shares[roomy]
        # Rooms that differ by little are the same.
        room = (1 + FINE) ** math.floor(math.log(timing.kv_tokens) / math.log(1 + FINE))
        key = (timing.replicas, timing.max_running, room)
        if key not in self._shares:
            self._shares[key] = self._make(*key)
        return self._shares[key]

    def _make(self, replicas: int, places: int, room: float) -> list[Share]:
        groups = self.groups(replicas)
        used = min(replicas, self.workload.groups_per_step)
        count = min(used, MOST_SHARES, max(1, -(-FEWEST_GROUPS // groups)))
        # Few enough rollouts, groups as they are.
        chained = math.ceil(MOST_CHAINED * (1 - self.workload.filtered))
        kept = max(1, min(groups, min(MOST_ROLLOUTS, chained) // self.per_group))
        scale, prompt = groups / kept, self.workload.prompt_tokens
        slots = min(float(places), room / (prompt + self._age))
        return [
            share_of(
                drawn,
                prompt_tokens=prompt,
                room=room / scale,
                places=max(1, round(places / scale)),
                scale=scale,
                slots=slots,
            )
            for drawn in self._drawn(used, count, kept)
        ]

    def _drawn(self, replicas: int, shares: int, chains: int) -> Iterator[Chained]:
        """Groups of so many shares, with so many chains each; the longest of a step among them."""
        if self.workload.filtered:
            longest = float(self._sampled(replicas).longest.max(axis=1).mean())
            whole = self._replacing(shares * chains).stretched(longest)
        else:
            whole = self._lasting(shares * chains)
        return whole.split(shares)

    def _replacing(self, chains: int) -> Chained:
        """Groups of which some take the place of a filtered one, in an order that is fixed."""
        rng = np.random.default_rng(0)
        counts = rng.permutation(counts_of(self.workload.filtered, chains))
        lengths = rng.permutation(self._quantiles(int(counts.sum())))
        return self._chained(lengths, counts)

    def _lasting(self, groups: int) -> Chained:
        """Groups that all stay, likewise; half-way is the longest rollout of a whole step."""
        everyone = self.workload.groups_per_step * self.per_group
        others = np.random.default_rng(0).permutation(self._quantiles(groups)[:-1])
        longest = max(self.workload.lengths.expected_longest(everyone), others.max(initial=1.0))
        lengths = np.insert(others, (len(others) + 1) // 2, longest)
        return self._chained(lengths, np.ones(groups, np.int64))

    def _quantiles(self, groups: int) -> Array:
        """Of the lengths of so many groups' rollouts, ascending."""
        total = groups * self.per_group
        return self.workload.lengths.quantiles((np.arange(total) + 0.5) / total)

    def _chained(self, lengths: Array, counts: Array) -> Chained:
        return Chained.of(np.rint(lengths).reshape(-1, self.per_group), counts)


def score_s(
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
    """The first epoch can begin before all groups are there; the last update ends the step.

    Ranks go from round to round together, as long as the one that has most takes.
    """
    rounds, slowest = of_mini_batch(workload, timing.shares)
    micro_batches, shares = rounds * workload.mini_batches, timing.shares
    tokens = slowest * workload.mini_batches
    epoch_s = timing.passes_s(micro_batches * shares, tokens * shares)
    epoch_s += micro_batches * timing.round_s
    update_s = timing.round_s + timing.update_s
    first_s = epoch_s + (workload.mini_batches - 1) * update_s
    rest_s = (workload.epochs - 1) * epoch_s
    updates = workload.updates - workload.mini_batches + 1
    return Training(first_s, rest_s + updates * update_s, micro_batches)


PARTS = {1: (1.0,), 2: (0.5, 1.0), 4: (0.125, 0.375, 0.625, 0.875, 1.0)}
"""How a step's work is cut, by the least number of pieces there must be: up to where each goes.

The first and the last are small: with them a pipeline fills, and runs dry.
"""


def cuts_of(pieces: int) -> tuple[float, ...]:
    """The finest that so many pieces allow."""
    return PARTS[max(least for least in PARTS if least <= max(1, pieces))]


def spread(total_s: float, cuts: Sequence[float]) -> Sequence[float]:
    """The seconds of each part."""
    return [total_s * (late - early) for early, late in itertools.pairwise((0.0, *cuts))]

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
from streamrl.placement.flowing import Stream
from streamrl.placement.rounds import of_mini_batch
from streamrl.placement.slowest import Loads, sampled, slower
from streamrl.placement.timings import GeneratorTiming, ScoreTiming, TrainTiming
from streamrl.placement.workload import Workload

MOST_ROLLOUTS = 256
"""Of a share, each then stands for several."""
FEWEST_GROUPS = 24
"""Shares are made until they have so many groups together, or there are no more replicas."""
MOST_SHARES = 6
FINE = 0.02
"""Rooms for keys and values that differ by less, relatively, are the same."""
FEWEST_EDGES = 33
MOST_CHANGES = 48
"""Of a share's decode steps: edges of the stretches that are looked at, evenly and by events."""
STRETCHES = 20
"""Of a step's rollouts, where those of several steps go on together."""


@dataclass(frozen=True)
class Share:
    """One replica's rollouts of a step, all asked for at once, in decode steps.

    group_ends [groups]: at which one each group is complete. edges [m + 1]: at which ones the
    number of running rollouts may change, from 0 on; running [m]: how many run between them;
    resident [m]: the tokens they have together halfway, prompts included; computed [m]: of
    those that begin there, what has to be taken in; done [m]: groups that are complete there.
    slots: about as many run at once where more are asked for. longest: tokens of a rollout.
    """

    group_ends: Array
    edges: Array
    running: Array
    resident: Array
    computed: Array
    done: Array
    slots: float
    longest: float

    @cached_property
    def middles(self) -> Array:
        """Halfway between the edges."""
        return (self.edges[1:] + self.edges[:-1]) / 2

    def ends_s(self, timing: GeneratorTiming) -> Array:
        """When each group is complete, s after they are asked for, float64 [groups]."""
        return np.interp(self.group_ends, self.edges, self._clock(timing))

    def _clock(self, timing: GeneratorTiming) -> Array:
        spent = np.diff(self.edges) * timing.decode_steps_s(self.running, self.resident)
        spent += self.computed * timing.prefill_token_s
        # Groups are complete before they are handed on.
        spent[1:] += self.done[:-1] * timing.group_s
        return timing.begin_s + np.concatenate(([0.0], np.cumsum(spent)))

    def besides_s(self, timing: GeneratorTiming) -> Array:
        """What prompts that begin and groups that are done take beside the decode steps, [m]."""
        return self.computed * timing.prefill_token_s + self.done * timing.group_s


class Generation:
    """A step's generation on replicas that are alike; shares are remembered.

    extra: rollouts of each group besides group_size, as a greedy one.
    """

    def __init__(self, workload: Workload, extra: int = 0) -> None:
        self.workload = workload
        self.per_group = workload.group_size + extra
        self._found: dict[tuple[GeneratorTiming, tuple[float, ...]], list[float]] = {}
        self._shares: dict[tuple[int, int, float], list[Share]] = {}
        self._loads: dict[int, Loads] = {}
        self._streams: dict[tuple[GeneratorTiming, tuple[float, ...]], Stream] = {}
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

    def completion(self, timing: GeneratorTiming, cuts: tuple[float, ...]) -> list[float]:
        """When these parts of a step's groups are complete, s after they are asked for.

        The last is 1.0: when all are.
        """
        key = (timing, cuts)
        if key not in self._found:
            self._found[key] = self._completion(timing, cuts)
        return self._found[key]

    def _completion(self, timing: GeneratorTiming, cuts: tuple[float, ...]) -> list[float]:
        shares = self.shares(timing)
        slowest = max(shares, key=lambda share: float(share.edges[-1]))
        if cuts == (1.0,):
            shares = [slowest]
        ordered = np.sort(np.concatenate([share.ends_s(timing) for share in shares]))
        found = [float(ordered[math.ceil(cut * len(ordered)) - 1]) for cut in cuts]
        found[-1] = max(found[-1] * self._slower(timing, slowest), *found)
        return found

    def _slower(self, timing: GeneratorTiming, share: Share) -> float:
        """By how much the slowest replica is, beyond one with the longest rollout."""
        if not self.workload.varied:
            return 1.0
        replicas = min(timing.replicas, self.workload.groups_per_step)
        if replicas not in self._loads:
            self._loads[replicas] = sampled(self.workload, self.per_group, replicas)
        widths = np.diff(share.edges)
        longest = np.asarray(share.longest)
        own = Loads(longest, np.dot(share.running, widths), np.dot(share.resident, widths))
        rollouts = self.groups(replicas) * self.per_group
        steps, slots = float(share.edges[-1]), share.slots
        return slower(
            timing, self._loads[replicas], own, steps=steps, slots=slots, rollouts=rollouts
        )

    def stream(self, timing: GeneratorTiming, cuts: tuple[float, ...]) -> Stream:
        """The slowest replica's part of a step, to go on beside those of other steps."""
        key = (timing, cuts)
        if key not in self._streams:
            self._streams[key] = self._stream(timing, cuts)
        return self._streams[key]

    def _stream(self, timing: GeneratorTiming, cuts: tuple[float, ...]) -> Stream:
        shares = self.shares(timing)
        share = max(shares, key=lambda each: float(each.edges[-1]))
        last = float(share.edges[-1])
        bounds = last * np.linspace(0.0, 1.0, STRETCHES + 1) ** 1.5
        ordered = np.sort(np.concatenate([each.group_ends for each in shares]))
        ends = [float(ordered[math.ceil(cut * len(ordered)) - 1]) for cut in cuts]
        longer = last * max(1.0, self._slower(timing, share))
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
            # What is given up and taken in again is in the share.
            half = share.middles < last / 2
            places = float(np.average(share.running[half], weights=np.diff(share.edges)[half]))
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
        kept = max(1, min(groups, MOST_ROLLOUTS // self.per_group))
        total = count * kept * self.per_group
        lengths = self.workload.lengths.quantiles((np.arange(total) + 0.5) / total)
        everyone = self.workload.groups_per_step * self.per_group
        longest = self.workload.lengths.expected_longest(everyone)
        lengths = np.random.default_rng(0).permutation(np.sort(lengths)[:-1])
        lengths = np.insert(lengths, total // 2, max(longest, float(lengths.max(initial=1.0))))
        grid = np.rint(lengths).reshape(count, kept, self.per_group)
        scale, prompt = groups / kept, self.workload.prompt_tokens
        slots = min(float(places), room / (prompt + self._age))
        places = max(1, round(places / scale))
        return [
            _share(part, _Batch(part.ravel(), prompt, room / scale, places), scale, slots)
            for part in grid
        ]


@dataclass
class _Batch:
    """Rollouts sampled in continuous batches, in the order in which they come.

    Whose turn it was first has a place, while there is one of `places` and room for its tokens so
    far and one more of everybody. Where room runs out the last of them stands back, and has its
    tokens computed anew when there is room again.
    """

    lengths: Array
    prompt_tokens: float
    room: float
    places: int

    def __post_init__(self) -> None:
        count = len(self.lengths)
        self.ends = np.zeros(count)
        self.edges, self.computed = [0.0], [0.0]
        self.running: list[int] = []
        self.resident: list[float] = []
        self._left = [float(length) for length in self.lengths]
        self._had = [self.prompt_tokens] * count
        self._since = [0.0] * count
        self._waiting = list(range(count - 1, -1, -1))
        self._placed: list[int] = []
        self._ends: list[tuple[float, int]] = []
        self._tokens = 0.0

    def run(self) -> None:
        """Until all are sampled."""
        now = 0.0
        while self._waiting or self._placed:
            self._fill(now)
            count = len(self._placed)
            while self._ends[0][0] != self._due(self._ends[0][1]):
                heapq.heappop(self._ends)
            steps = min(self._ends[0][0] - now, max(1.0, (self.room - self._tokens) // count))
            self.running.append(count)
            self.resident.append(self._tokens + steps * count / 2)
            self.computed.append(0.0)
            now += steps
            self.edges.append(now)
            self._tokens += steps * count
            self._end(now)
            while len(self._placed) > 1 and self._tokens + len(self._placed) > self.room:
                self._stand_back(now)

    def _due(self, one: int) -> float:
        """When one ends that has a place; what was planned before it stood back is void."""
        return self._since[one] + self._left[one] if self._left[one] else -1.0

    def _fill(self, now: float) -> None:
        while self._waiting and len(self._placed) < self.places:
            one = self._waiting[-1]
            if self._placed and self._tokens + self._had[one] + len(self._placed) + 1 > self.room:
                break
            self._placed.append(self._waiting.pop())
            self._since[one] = now
            heapq.heappush(self._ends, (now + self._left[one], one))
            self._tokens += self._had[one]
            self.computed[-1] += self._had[one]

    def _end(self, now: float) -> None:
        while self._ends and self._ends[0][0] <= now:
            due, one = heapq.heappop(self._ends)
            if due == self._due(one):
                self._tokens -= self._had[one] + self._left[one]
                self._left[one] = 0.0
                self.ends[one] = now
                self._placed.remove(one)

    def _stand_back(self, now: float) -> None:
        one = self._placed.pop()
        made = now - self._since[one]
        self._left[one] -= made
        self._had[one] += made
        self._since[one] = math.inf
        self._tokens -= self._had[one]
        self._waiting.append(one)


def _share(lengths: Array, batch: _Batch, scale: float, slots: float) -> Share:
    """lengths [groups, rollouts] of a batch, whose rollouts stand for `scale` of them each."""
    batch.run()
    changes, at = np.array(batch.edges), np.arange(len(batch.edges))
    # Some of the changes, and moments between them: what runs beside them does not stand still.
    some = changes[np.unique(np.append(at[:: -(-len(at) // MOST_CHANGES)], at[-1]))]
    edges = np.union1d(some, np.linspace(0.0, changes[-1], FEWEST_EDGES))
    running, tokens = np.array(batch.running), np.array(batch.resident)
    took = np.diff(changes)
    decoded = np.concatenate(([0.0], np.cumsum(running * took)))
    # Tokens in memory grow between changes; so does their sum over steps, and faster.
    since = np.clip(np.searchsorted(changes, edges, side="right") - 1, 0, len(took) - 1)
    into = edges - changes[since]
    first = tokens[since] - running[since] * took[since] / 2
    held = np.concatenate(([0.0], np.cumsum(tokens * took)))[since]
    held += first * into + running[since] * into**2 / 2
    computed = np.concatenate(([0.0], np.cumsum(batch.computed)))
    # What begins with an edge is computed behind it.
    begun = computed[np.searchsorted(changes, edges, side="left")]
    widths = np.diff(edges)
    group_ends = batch.ends.reshape(lengths.shape).max(axis=1)
    done = np.searchsorted(np.sort(group_ends), edges, side="right")
    return Share(
        group_ends,
        edges,
        np.diff(np.interp(edges, changes, decoded)) / widths * scale,
        np.diff(held) / widths * scale,
        np.diff(begun) * scale,
        np.diff(done) * scale,
        slots,
        float(lengths.max()),
    )


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

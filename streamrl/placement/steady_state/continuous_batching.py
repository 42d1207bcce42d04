"""One replica's rollouts of a step in continuous batches, counted in decode steps.

When a rollout begins and ends depends on lengths and room alone, as each running one gets a token
in every decode step. What one takes turns that into seconds (`Share.ends_s`).
"""

import heapq
import math
from collections import deque
from dataclasses import dataclass

import numpy as np

from streamrl.messages import Array
from streamrl.placement.stage_timings import GeneratorTiming
from streamrl.placement.steady_state.refill_chains import Chained

FEWEST_EDGES = 33
MOST_CHANGES = 48
"""Of a share's decode steps: edges of the stretches that are looked at, evenly and by events."""


@dataclass(frozen=True)
class Share:
    """One replica's rollouts of a step, asked for at once or in others' places, in decode steps.

    group_ends [groups]: at which one each group that is trained is complete; links [groups]: how
    many were filtered before it, each in its place. edges [m + 1]: at which ones the number of
    running rollouts may change, from 0 on; running [m]: how many run between them; resident [m]:
    the tokens they have together halfway, prompts included; computed [m]: of those that begin
    there, what has to be taken in; done [m]: groups that are complete there, filtered ones
    included. slots: about as many run at once where more are asked for. longest: tokens of a
    rollout, or of those that follow one another.
    """

    group_ends: Array
    links: Array
    edges: Array
    running: Array
    resident: Array
    computed: Array
    done: Array
    slots: float
    longest: float

    def ends_s(self, timing: GeneratorTiming, link_s: float = 0.0) -> Array:
        """When each group is complete, s after they are asked for, float64 [groups].

        link_s: from the end of a group that is filtered to where another is asked for.
        """
        ends = np.interp(self.group_ends, self.edges, self._clock(timing))
        return np.asarray(ends + self.links * (link_s + timing.begin_s))

    def _clock(self, timing: GeneratorTiming) -> Array:
        spent = np.diff(self.edges) * timing.decode_steps_s(self.running, self.resident)
        spent += self.computed * timing.prefill_token_s
        # Groups are complete before they are handed on.
        spent[1:] += self.done[:-1] * timing.group_s
        return timing.begin_s + np.concatenate(([0.0], np.cumsum(spent)))

    def besides_s(self, timing: GeneratorTiming) -> Array:
        """What prompts that begin and groups that are done take beside the decode steps, [m]."""
        return self.computed * timing.prefill_token_s + self.done * timing.group_s


def share_of(
    groups: Chained, *, prompt_tokens: float, room: float, places: int, scale: float, slots: float
) -> Share:
    """What a replica with room for so many tokens and rollouts makes of these groups.

    Each rollout stands for `scale` of them, tokens and places for as many.
    """
    batch = _Batch(groups, prompt_tokens, room, places)
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
    group_ends = batch.ends.reshape(groups.lengths.shape).max(axis=1)
    done = np.searchsorted(np.sort(group_ends), edges, side="right")
    return Share(
        group_ends[groups.last],
        groups.links,
        edges,
        np.diff(np.interp(edges, changes, decoded)) / widths * scale,
        np.diff(held) / widths * scale,
        np.diff(begun) * scale,
        np.diff(done) * scale,
        slots,
        float(groups.paths.max()),
    )


@dataclass
class _Batch:
    """Rollouts of groups sampled in continuous batches, in the order in which they come.

    A group that takes another's place comes when that one is done.

    Whose turn it was first has a place, while there is one of `places` and room for its tokens so
    far and one more of everybody. Where room runs out the last of them stands back, and has its
    tokens computed anew when there is room again.
    """

    groups: Chained
    prompt_tokens: float
    room: float
    places: int

    def __post_init__(self) -> None:
        lengths = self.groups.lengths
        count, self._per_group = lengths.size, lengths.shape[1]
        self.ends = np.zeros(count)
        self.edges, self.computed = [0.0], [0.0]
        self.running: list[int] = []
        self.resident: list[float] = []
        self._left = [float(length) for length in lengths.ravel()]
        self._had = [self.prompt_tokens] * count
        self._since = [0.0] * count
        self._missing = [self._per_group] * len(lengths)
        self._next = self.groups.next
        self._waiting = deque(range(self.groups.first * self._per_group))
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
            one = self._waiting[0]
            if self._placed and self._tokens + self._had[one] + len(self._placed) + 1 > self.room:
                break
            self._placed.append(self._waiting.popleft())
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
                self._ended(one // self._per_group)

    def _ended(self, group: int) -> None:
        """One of a group's rollouts; with the last of them another group may come."""
        self._missing[group] -= 1
        if not self._missing[group] and group in self._next:
            first = self._next[group] * self._per_group
            self._waiting.extend(range(first, first + self._per_group))

    def _stand_back(self, now: float) -> None:
        one = self._placed.pop()
        made = now - self._since[one]
        self._left[one] -= made
        self._had[one] += made
        self._since[one] = math.inf
        self._tokens -= self._had[one]
        self._waiting.appendleft(one)

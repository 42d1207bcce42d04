"""One replica's rollouts of a step in continuous batches, counted in decode steps.

When a rollout begins and ends depends on lengths and room alone, as each running one gets a token
in every decode step. What one takes turns that into seconds (`ReplicaSchedule.ends_s`).
"""

import heapq
import math
from collections import deque
from dataclasses import dataclass

import numpy as np

from streamrl.messages import Array
from streamrl.placement.stage_timings import GeneratorTiming
from streamrl.placement.steady_state.refill_chains import RefillChains

MIN_EDGES = 33
MAX_CHANGES = 48
"""Of a share's decode steps: edges of the stretches that are looked at, evenly and by events."""


@dataclass(frozen=True)
class ReplicaSchedule:
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
    num_refills: Array
    edges: Array
    running_rollouts: Array
    resident_tokens: Array
    prefill_tokens: Array
    num_groups_done: Array
    slots: float
    longest_tokens: float

    def group_ends_s(self, timing: GeneratorTiming, link_s: float = 0.0) -> Array:
        """When each group is complete, s after they are asked for, float64 [groups].

        link_s: from the end of a group that is filtered to where another is asked for.
        """
        ends = np.interp(self.group_ends, self.edges, self._elapsed_s(timing))
        return np.asarray(ends + self.num_refills * (link_s + timing.begin_s))

    def _elapsed_s(self, timing: GeneratorTiming) -> Array:
        spent = np.diff(self.edges) * timing.decode_steps_s(
            self.running_rollouts, self.resident_tokens
        )
        spent += self.prefill_tokens * timing.prefill_token_s
        # Groups are complete before they are handed on.
        spent[1:] += self.num_groups_done[:-1] * timing.group_s
        return timing.begin_s + np.concatenate(([0.0], np.cumsum(spent)))

    def overhead_s(self, timing: GeneratorTiming) -> Array:
        """What prompts that begin and groups that are done take beside the decode steps, [m]."""
        return self.prefill_tokens * timing.prefill_token_s + self.num_groups_done * timing.group_s


def schedule_replica(
    groups: RefillChains,
    *,
    prompt_tokens: float,
    room: float,
    places: int,
    scale: float,
    slots: float,
) -> ReplicaSchedule:
    """What a replica with room for so many tokens and rollouts makes of these groups.

    Each rollout stands for `scale` of them, tokens and places for as many.
    """
    batch = _ContinuousBatch(groups, prompt_tokens, room, places)
    batch.run()
    changes, at = np.array(batch.edges), np.arange(len(batch.edges))
    # Some of the changes, and moments between them: what runs beside them does not stand still.
    some = changes[np.unique(np.append(at[:: -(-len(at) // MAX_CHANGES)], at[-1]))]
    edges = np.union1d(some, np.linspace(0.0, changes[-1], MIN_EDGES))
    running, tokens = np.array(batch.running_counts), np.array(batch.resident_tokens)
    took = np.diff(changes)
    decoded = np.concatenate(([0.0], np.cumsum(running * took)))
    # Tokens in memory grow between changes; so does their sum over steps, and faster.
    since = np.clip(np.searchsorted(changes, edges, side="right") - 1, 0, len(took) - 1)
    into = edges - changes[since]
    first = tokens[since] - running[since] * took[since] / 2
    held = np.concatenate(([0.0], np.cumsum(tokens * took)))[since]
    held += first * into + running[since] * into**2 / 2
    computed = np.concatenate(([0.0], np.cumsum(batch.prefill_tokens)))
    # What begins with an edge is computed behind it.
    begun = computed[np.searchsorted(changes, edges, side="left")]
    widths = np.diff(edges)
    group_ends = batch.rollout_ends.reshape(groups.lengths.shape).max(axis=1)
    done = np.searchsorted(np.sort(group_ends), edges, side="right")
    return ReplicaSchedule(
        group_ends[groups.last_groups],
        groups.num_refills,
        edges,
        np.diff(np.interp(edges, changes, decoded)) / widths * scale,
        np.diff(held) / widths * scale,
        np.diff(begun) * scale,
        np.diff(done) * scale,
        slots,
        float(groups.chain_tokens.max()),
    )


@dataclass
class _ContinuousBatch:
    """Rollouts of groups sampled in continuous batches, in the order in which they come.

    A group that takes another's place comes when that one is done.

    Whose turn it was first has a place, while there is one of `places` and room for its tokens so
    far and one more of everybody. Where room runs out the last of them stands back, and has its
    tokens computed anew when there is room again.
    """

    groups: RefillChains
    prompt_tokens: float
    token_capacity: float
    slots: int

    def __post_init__(self) -> None:
        lengths = self.groups.lengths
        count, self._per_group = lengths.size, lengths.shape[1]
        self.rollout_ends = np.zeros(count)
        self.edges, self.prefill_tokens = [0.0], [0.0]
        self.running_counts: list[int] = []
        self.resident_tokens: list[float] = []
        self._remaining_tokens = [float(length) for length in lengths.ravel()]
        self._context_tokens = [self.prompt_tokens] * count
        self._start_steps = [0.0] * count
        self._num_unfinished = [self._per_group] * len(lengths)
        self._next_group = self.groups.next_group
        self._waiting = deque(range(self.groups.num_chains * self._per_group))
        self._in_slots: list[int] = []
        self._end_heap: list[tuple[float, int]] = []
        self._num_tokens = 0.0

    def run(self) -> None:
        """Until all are sampled."""
        now = 0.0
        while self._waiting or self._in_slots:
            self._fill_slots(now)
            count = len(self._in_slots)
            while self._end_heap[0][0] != self._find_end(self._end_heap[0][1]):
                heapq.heappop(self._end_heap)
            steps = min(
                self._end_heap[0][0] - now,
                max(1.0, (self.token_capacity - self._num_tokens) // count),
            )
            self.running_counts.append(count)
            self.resident_tokens.append(self._num_tokens + steps * count / 2)
            self.prefill_tokens.append(0.0)
            now += steps
            self.edges.append(now)
            self._num_tokens += steps * count
            self._finish_rollouts(now)
            while (
                len(self._in_slots) > 1
                and self._num_tokens + len(self._in_slots) > self.token_capacity
            ):
                self._preempt_last(now)

    def _find_end(self, one: int) -> float:
        """When one ends that has a place; what was planned before it stood back is void."""
        return (
            self._start_steps[one] + self._remaining_tokens[one]
            if self._remaining_tokens[one]
            else -1.0
        )

    def _fill_slots(self, now: float) -> None:
        while self._waiting and len(self._in_slots) < self.slots:
            one = self._waiting[0]
            if (
                self._in_slots
                and self._num_tokens + self._context_tokens[one] + len(self._in_slots) + 1
                > self.token_capacity
            ):
                break
            self._in_slots.append(self._waiting.popleft())
            self._start_steps[one] = now
            heapq.heappush(self._end_heap, (now + self._remaining_tokens[one], one))
            self._num_tokens += self._context_tokens[one]
            self.prefill_tokens[-1] += self._context_tokens[one]

    def _finish_rollouts(self, now: float) -> None:
        while self._end_heap and self._end_heap[0][0] <= now:
            due, one = heapq.heappop(self._end_heap)
            if due == self._find_end(one):
                self._num_tokens -= self._context_tokens[one] + self._remaining_tokens[one]
                self._remaining_tokens[one] = 0.0
                self.rollout_ends[one] = now
                self._in_slots.remove(one)
                self._finish_in_group(one // self._per_group)

    def _finish_in_group(self, group: int) -> None:
        """One of a group's rollouts; with the last of them another group may come."""
        self._num_unfinished[group] -= 1
        if not self._num_unfinished[group] and group in self._next_group:
            first = self._next_group[group] * self._per_group
            self._waiting.extend(range(first, first + self._per_group))

    def _preempt_last(self, now: float) -> None:
        one = self._in_slots.pop()
        made = now - self._start_steps[one]
        self._remaining_tokens[one] -= made
        self._context_tokens[one] += made
        self._start_steps[one] = math.inf
        self._num_tokens -= self._context_tokens[one]
        self._waiting.appendleft(one)

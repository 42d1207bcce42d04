"""Training steps in flight together: how slow groups delay later steps.

A slow step delays the steps behind it, and no other step makes up for the delay. With filtering,
replacements start later and take longer; a step therefore takes ready groups, earliest first, and
waits only for groups at the staleness bound.
"""

import heapq
from collections import Counter
from collections.abc import Iterator

import numpy as np

from streamrl.messages import Array

MAX_ROUNDS, MIN_ROUNDS = 500, 3
"""Most and fewest windows of steps that are simulated."""
MAX_EVENTS = 60_000
"""Group ends to simulate, approximately."""
MAX_GROUPS = 8192
"""Groups per step; larger steps are simulated in part."""
WARMUP_ROUNDS = 2
"""Windows of steps at the beginning that do not count, as they are not in a steady state."""
DRAW_SIZE = 4096


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

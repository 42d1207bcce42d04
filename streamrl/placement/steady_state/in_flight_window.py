"""Steps that are under way together: how they hold one another up.

A step that takes long holds up those behind it, and no other makes up for that. Where groups are
filtered, those that take their places come later, and have longer to go: a step takes what is
ready, the earliest first, and waits only for what must be in it.
"""

import heapq
from collections import Counter
from collections.abc import Iterator

import numpy as np

from streamrl.messages import Array

MAX_ROUNDS, MIN_ROUNDS = 500, 3
"""Of the steps under way, at most and at least."""
MAX_EVENTS = 60_000
"""Ends of groups, if that is between the two."""
MAX_GROUPS = 8192
"""Of a step. Of one with more groups a part is looked at: places are what it waits for."""
WARMUP_ROUNDS = 2
"""Rounds at the beginning that are unlike all others."""
DRAW_SIZE = 4096
"""At a time."""


def mean_time_in_flight(
    longest: Array, *, window: int, groups: int = 1, filtered: float = 0.0
) -> float:
    """For how long a step is under way, on average, where so many are and nobody waits for a place.

    longest [n]: how long a group takes, each of them as likely, in any unit; so many `groups` make
    a step. A part of all that end is `filtered`, and another is begun for each.
    """
    some = max(1, min(groups, round(MAX_GROUPS * (1 - filtered))))
    rounds = int(np.clip(MAX_EVENTS * (1 - filtered) / some / window, MIN_ROUNDS, MAX_ROUNDS))
    counted = rounds * window
    ends = _InFlightWindow(longest, window, some, filtered).find_step_ends(
        counted + WARMUP_ROUNDS * window
    )
    return (ends[-1] - ends[-1 - counted]) / counted * window


class _InFlightWindow:
    """Groups by the version they were admitted at: those that go on, and those that are ready."""

    def __init__(self, longest: Array, window: int, groups: int, filtered: float) -> None:
        self._lengths, self._filtered_fraction = _draw_values(longest), filtered
        self._window, self._groups_per_step = window, groups
        self._end_heap: list[tuple[float, int]] = []
        self._num_in_flight: Counter[int] = Counter()
        self._num_ready: Counter[int] = Counter()

    def find_step_ends(self, steps: int) -> list[float]:
        """When so many steps are complete."""
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
        """Whether a group goes on that must be in the step of this version."""
        due = version - self._window + 1
        return any(count for admitted, count in self._num_in_flight.items() if admitted <= due)

    def _take_earliest(self) -> None:
        """The earliest."""
        left = self._groups_per_step
        for version in sorted(self._num_ready):
            taken = min(left, self._num_ready[version])
            self._num_ready[version] -= taken
            left -= taken
        self._num_ready, self._num_in_flight = +self._num_ready, +self._num_in_flight


def _draw_values(values: Array | None) -> Iterator[float]:
    """Some of the values, or of what is between 0 and 1, without end; always the same."""
    rng = np.random.default_rng(0)
    while True:
        found = rng.random(DRAW_SIZE) if values is None else rng.choice(values, DRAW_SIZE)
        yield from found.tolist()

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

ROUNDS, FEWEST = 500, 3
"""Of the steps under way, at most and at least."""
EVENTS = 60_000
"""Ends of groups, if that is between the two."""
MOST = 8192
"""Of a step. Of one with more groups a part is looked at: places are what it waits for."""
UNLIKE = 2
"""Rounds at the beginning that are unlike all others."""
DRAWN = 4096
"""At a time."""


def under_way(longest: Array, *, window: int, groups: int = 1, filtered: float = 0.0) -> float:
    """For how long a step is under way, on average, where so many are and nobody waits for a place.

    longest [n]: how long a group takes, each of them as likely, in any unit; so many `groups` make
    a step. A part of all that end is `filtered`, and another is begun for each.
    """
    some = max(1, min(groups, round(MOST * (1 - filtered))))
    rounds = int(np.clip(EVENTS * (1 - filtered) / some / window, FEWEST, ROUNDS))
    counted = rounds * window
    ends = _Window(longest, window, some, filtered).ends(counted + UNLIKE * window)
    return (ends[-1] - ends[-1 - counted]) / counted * window


class _Window:
    """Groups by the version they were admitted at: those that go on, and those that are ready."""

    def __init__(self, longest: Array, window: int, groups: int, filtered: float) -> None:
        self._lengths, self._filtered = _drawn(longest), filtered
        self._window, self._groups = window, groups
        self._under_way: list[tuple[float, int]] = []
        self._going: Counter[int] = Counter()
        self._ready: Counter[int] = Counter()

    def ends(self, steps: int) -> list[float]:
        """When so many steps are complete."""
        ends: list[float] = []
        chances, ready = _drawn(None), 0
        self._admit(self._window * self._groups, 0, 0.0)
        while len(ends) < steps:
            now, version = heapq.heappop(self._under_way)
            self._going[version] -= 1
            if self._filtered and next(chances) < self._filtered:
                self._admit(1, len(ends), now)
            else:
                self._ready[version] += 1
                ready += 1
            while ready >= self._groups and not self._waits(len(ends)):
                self._take()
                ready -= self._groups
                ends.append(now)
                self._admit(self._groups, len(ends), now)
        return ends

    def _admit(self, groups: int, version: int, now: float) -> None:
        for _ in range(groups):
            heapq.heappush(self._under_way, (now + next(self._lengths), version))
        self._going[version] += groups

    def _waits(self, version: int) -> bool:
        """Whether a group goes on that must be in the step of this version."""
        due = version - self._window + 1
        return any(count for admitted, count in self._going.items() if admitted <= due)

    def _take(self) -> None:
        """The earliest."""
        left = self._groups
        for version in sorted(self._ready):
            taken = min(left, self._ready[version])
            self._ready[version] -= taken
            left -= taken
        self._ready, self._going = +self._ready, +self._going


def _drawn(values: Array | None) -> Iterator[float]:
    """Some of the values, or of what is between 0 and 1, without end; always the same."""
    rng = np.random.default_rng(0)
    while True:
        found = rng.random(DRAWN) if values is None else rng.choice(values, DRAWN)
        yield from found.tolist()

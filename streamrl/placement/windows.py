"""Steps that are under way together: how they hold one another up.

A step that takes long holds up those behind it, and no other makes up for that. Where groups are
filtered, those that take their places come later, and have longer to go: a step takes what is
ready, the earliest first, and waits only for what must be in it.
"""

import heapq
from collections import Counter

import numpy as np

from streamrl.messages import Array

ROUNDS = 500
"""Of the steps under way."""
GROUPS = 8192
"""In fewer rounds, where a step has many groups, but not in fewer than FEWEST steps."""
FEWEST = 60
UNLIKE = 2
"""Rounds at the beginning that are unlike all others."""


def under_way(longest: Array, *, window: int, groups: int = 1, filtered: float = 0.0) -> float:
    """For how long a step is under way, on average, where so many are and nobody waits for a place.

    longest [n]: how long a group takes, each of them as likely, in any unit; so many `groups` make
    a step, and every other that is sampled is `filtered`, a part of all, and another begun.
    """
    steps = min(ROUNDS * window, max(FEWEST, GROUPS // groups)) + UNLIKE * window
    ends = _Window(longest, window, groups, filtered).ends(steps)
    counted = steps - UNLIKE * window
    return (ends[-1] - ends[-1 - counted]) / counted * window


class _Window:
    """Groups by the version they were admitted at: those that go on, and those that are ready."""

    def __init__(self, longest: Array, window: int, groups: int, filtered: float) -> None:
        self._rng = np.random.default_rng(0)
        self._longest, self._filtered = longest, filtered
        self._window, self._groups = window, groups
        self._under_way: list[tuple[float, int]] = []
        self._going: Counter[int] = Counter()
        self._ready: Counter[int] = Counter()

    def ends(self, steps: int) -> list[float]:
        """When so many steps are complete."""
        ends: list[float] = []
        self._admit(self._window * self._groups, 0, 0.0)
        while len(ends) < steps:
            now, version = heapq.heappop(self._under_way)
            self._going[version] -= 1
            if self._filtered and self._rng.random() < self._filtered:
                self._admit(1, len(ends), now)
                continue
            self._ready[version] += 1
            while self._is_complete(len(ends)):
                self._take()
                ends.append(now)
                self._admit(self._groups, len(ends), now)
        return ends

    def _admit(self, groups: int, version: int, now: float) -> None:
        for seconds in self._rng.choice(self._longest, groups).tolist():
            heapq.heappush(self._under_way, (now + seconds, version))
        self._going[version] += groups

    def _is_complete(self, version: int) -> bool:
        """Whether there is a step's worth, and all that must be in it."""
        due = version - self._window + 1
        return self._ready.total() >= self._groups and not any(
            count for admitted, count in self._going.items() if admitted <= due
        )

    def _take(self) -> None:
        """The earliest."""
        left = self._groups
        for version in sorted(self._ready):
            taken = min(left, self._ready[version])
            self._ready[version] -= taken
            left -= taken
        self._ready = +self._ready
        self._going = +self._going

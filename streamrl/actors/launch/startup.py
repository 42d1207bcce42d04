"""Actors on their way up: for the first time, or again after a death."""

import time
from collections.abc import Callable, Iterator
from typing import Any

from streamrl.errors import DeadlineError


class PendingStarts:
    """The replies of actors that were told to start, and by when each must have come.

    Each has `timeout_s` from when it was told; times are s of `clock`. Iterates over the replies.
    """

    def __init__(self, timeout_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.timeout_s = timeout_s
        self._clock = clock
        self._deadlines: dict[Any, tuple[str, float]] = {}

    def __len__(self) -> int:
        return len(self._deadlines)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._deadlines)

    @property
    def actor_names(self) -> str:
        """The actors, in one phrase."""
        return ", ".join(sorted(name for name, _ in self._deadlines.values()))

    def add_actor(self, reply: Any, name: str) -> None:
        """An actor was told to start."""
        self._deadlines[reply] = name, self._clock() + self.timeout_s

    def pop_actor(self, reply: Any) -> str:
        """A reply has come; returns whose it is."""
        return self._deadlines.pop(reply)[0]

    def drop_actor(self, name: str) -> bool:
        """Wait for this actor no longer; whether it was waited for."""
        found = [reply for reply, (own, _) in self._deadlines.items() if own == name]
        for reply in found:
            del self._deadlines[reply]
        return bool(found)

    def raise_if_late(self) -> None:
        """Raise DeadlineError naming the actors whose time is up."""
        now = self._clock()
        late = sorted(name for name, deadline in self._deadlines.values() if now > deadline)
        if late:
            raise DeadlineError(f"{', '.join(late)}: not ready within {self.timeout_s:g} s")

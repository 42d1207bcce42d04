"""Actors that are starting, for the first time or again."""

import time
from collections.abc import Callable, Iterator
from typing import Any

from streamrl.errors import DeadlineError


class PendingStarts:
    """Pending replies of actors' `start` calls, each with a deadline `timeout_s` after the call.

    Iteration yields the replies. Times are seconds of `clock`.
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
        """Names of the actors that are starting, as text."""
        return ", ".join(sorted(name for name, _ in self._deadlines.values()))

    def add_actor(self, reply: Any, name: str) -> None:
        self._deadlines[reply] = name, self._clock() + self.timeout_s

    def pop_actor(self, reply: Any) -> str:
        """Remove a finished reply and return the name of its actor."""
        return self._deadlines.pop(reply)[0]

    def drop_actor(self, name: str) -> bool:
        """Stop waiting for an actor; return whether the actor was starting."""
        replies = [
            reply for reply, (pending_name, _) in self._deadlines.items() if pending_name == name
        ]
        for reply in replies:
            del self._deadlines[reply]
        return bool(replies)

    def raise_if_late(self) -> None:
        """Raise DeadlineError if an actor has not started by its deadline."""
        now = self._clock()
        late = sorted(name for name, deadline in self._deadlines.values() if now > deadline)
        if late:
            raise DeadlineError(f"{', '.join(late)}: not ready within {self.timeout_s:g} s")

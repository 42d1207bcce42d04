"""Pause state of a generation engine: reasons to pause, and timeouts that exclude paused time."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class PauseState:
    """Reasons for which an engine is paused, and the request timeouts suspended meanwhile.

    The engine resumes once the last reason is removed. An instance belongs to one event loop.
    """

    def __init__(self) -> None:
        self._reasons: set[str] = set()
        #: Running timeouts and, while paused, the seconds that remain of each.
        self._remaining_s: dict[asyncio.Timeout, float] = {}

    def add_reason(self, reason: str) -> bool:
        """Add a reason to pause the engine; return whether no other reason existed.

        The first reason suspends all timeouts of `pausable_timeout`.
        """
        is_first = not self._reasons
        self._reasons.add(reason)
        if is_first:
            now = asyncio.get_running_loop().time()
            for deadline in self._remaining_s:
                self._remaining_s[deadline] = (deadline.when() or now) - now
                deadline.reschedule(None)
        return is_first

    def remove_reason(self, reason: str) -> bool:
        """Remove a reason to pause the engine; return whether no reason is left.

        Removing the last reason resumes all timeouts of `pausable_timeout`.
        """
        was_last = self._reasons == {reason}
        self._reasons.discard(reason)
        if was_last:
            now = asyncio.get_running_loop().time()
            for deadline, remaining_s in self._remaining_s.items():
                deadline.reschedule(now + remaining_s)
        return was_last

    @asynccontextmanager
    async def pausable_timeout(self, timeout_s: float) -> AsyncIterator[None]:
        """Raise TimeoutError if the `async with` body takes over `timeout_s` without the pauses."""
        loop = asyncio.get_running_loop()
        deadline = asyncio.timeout_at(None if self._reasons else loop.time() + timeout_s)
        async with deadline:
            self._remaining_s[deadline] = timeout_s
            try:
                yield
            finally:
                del self._remaining_s[deadline]

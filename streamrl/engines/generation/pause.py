"""Pause of an engine, by reference-counted reasons; timeouts of its requests pause with it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class PauseState:
    """Set of reasons to pause and the timeouts they suspend; belongs to one event loop.

    The engine resumes once the last reason is removed.
    """

    def __init__(self) -> None:
        self._reasons: set[str] = set()
        #: Running timeouts and, while paused, the seconds that remain of each.
        self._remaining_s: dict[asyncio.Timeout, float] = {}

    def add_reason(self, reason: str) -> bool:
        """Add a reason and return whether it is the first, which suspends all timeouts."""
        is_first = not self._reasons
        self._reasons.add(reason)
        if is_first:
            now = asyncio.get_running_loop().time()
            for deadline in self._remaining_s:
                self._remaining_s[deadline] = (deadline.when() or now) - now
                deadline.reschedule(None)
        return is_first

    def remove_reason(self, reason: str) -> bool:
        """Remove a reason and return whether it was the last, which resumes all timeouts."""
        was_last = self._reasons == {reason}
        self._reasons.discard(reason)
        if was_last:
            now = asyncio.get_running_loop().time()
            for deadline, remaining_s in self._remaining_s.items():
                deadline.reschedule(now + remaining_s)
        return was_last

    @asynccontextmanager
    async def pausable_timeout(self, timeout_s: float) -> AsyncIterator[None]:
        """Raise TimeoutError if the body takes longer than `timeout_s`, excluding paused time."""
        loop = asyncio.get_running_loop()
        deadline = asyncio.timeout_at(None if self._reasons else loop.time() + timeout_s)
        async with deadline:
            self._remaining_s[deadline] = timeout_s
            try:
                yield
            finally:
                del self._remaining_s[deadline]

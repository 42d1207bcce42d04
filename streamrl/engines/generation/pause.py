"""An engine that stands still: why, and the deadlines of its work, which stand still with it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class PauseState:
    """Reasons to stand still; it moves on once none is left. Belongs to one event loop."""

    def __init__(self) -> None:
        self._reasons: set[str] = set()
        #: Deadlines under way, and what is left of each while it stands still.
        self._remaining_s: dict[asyncio.Timeout, float] = {}

    def add_reason(self, reason: str) -> bool:
        """One more reason; whether it is the first."""
        first = not self._reasons
        self._reasons.add(reason)
        if first:
            now = asyncio.get_running_loop().time()
            for deadline in self._remaining_s:
                self._remaining_s[deadline] = (deadline.when() or now) - now
                deadline.reschedule(None)
        return first

    def remove_reason(self, reason: str) -> bool:
        """A reason less; whether it was the last."""
        was_last = self._reasons == {reason}
        self._reasons.discard(reason)
        if was_last:
            now = asyncio.get_running_loop().time()
            for deadline, left_s in self._remaining_s.items():
                deadline.reschedule(now + left_s)
        return was_last

    @asynccontextmanager
    async def pausable_timeout(self, timeout_s: float) -> AsyncIterator[None]:
        """Raise TimeoutError if what is inside takes longer, but for the time it stands still."""
        loop = asyncio.get_running_loop()
        limit = asyncio.timeout_at(None if self._reasons else loop.time() + timeout_s)
        async with limit:
            self._remaining_s[limit] = timeout_s
            try:
                yield
            finally:
                del self._remaining_s[limit]

"""Groups of a shard that have ended, for whoever waits to hear of them."""

import asyncio
from collections.abc import Collection
from contextlib import suppress

from streamrl.buffer.group import GroupState
from streamrl.buffer.wire_types import FinishedGroup

MIN_WAIT_S = 0.001
"""Less is nothing to a clock."""


class FinishedGroupNotifier:
    """Lets some wait until a group has ended."""

    def __init__(self) -> None:
        self._wake_event = asyncio.Event()

    def notify_waiters(self) -> None:
        """A group has ended, or had already."""
        self._wake_event.set()

    async def wait_for_finished(
        self, groups: Collection[GroupState], wait_s: float
    ) -> list[FinishedGroup]:
        """Those of `groups`, which may change, that have ended; none if none has in `wait_s`."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + wait_s
        while True:
            self._wake_event.clear()
            found = [
                FinishedGroup(g.uid, g.outcome, g.info) for g in groups if g.outcome is not None
            ]
            left_s = deadline - clock()
            if found or left_s <= 0:
                return found
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wake_event.wait(), max(left_s, MIN_WAIT_S))

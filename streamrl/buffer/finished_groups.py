"""Wait for filtered or dropped groups of a shard."""

import asyncio
from collections.abc import Collection
from contextlib import suppress

from streamrl.buffer.group import GroupState
from streamrl.buffer.wire_types import FinishedGroup

MIN_WAIT_S = 0.001
"""Shortest timeout passed to asyncio; a shorter timeout may not advance a coarse clock."""


class FinishedGroupNotifier:
    """Wakes up callers that wait for filtered or dropped groups of a shard."""

    def __init__(self) -> None:
        self._wake_event = asyncio.Event()

    def notify_waiters(self) -> None:
        self._wake_event.set()

    async def wait_for_finished(
        self, groups: Collection[GroupState], wait_s: float
    ) -> list[FinishedGroup]:
        """Wait for filtered or dropped groups among `groups` and return them; [] after `wait_s`.

        `groups` is a live view of the shard and may change during the wait.
        """
        clock = asyncio.get_running_loop().time
        deadline = clock() + wait_s
        while True:
            self._wake_event.clear()
            finished = [
                FinishedGroup(g.uid, g.outcome, g.info) for g in groups if g.outcome is not None
            ]
            remaining_s = deadline - clock()
            if finished or remaining_s <= 0:
                return finished
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wake_event.wait(), max(remaining_s, MIN_WAIT_S))

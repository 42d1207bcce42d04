"""Groups of a shard that have ended, for whoever waits to hear of them."""

import asyncio
from collections.abc import Collection
from contextlib import suppress

from streamrl.buffer.group import Group
from streamrl.buffer.wire_types import Farewell

LEAST_WAIT_S = 0.001
"""Less is nothing to a clock."""


class Farewells:
    """Lets some wait until a group has ended."""

    def __init__(self) -> None:
        self._wake = asyncio.Event()

    def notice(self) -> None:
        """A group has ended, or had already."""
        self._wake.set()

    async def wait(self, groups: Collection[Group], wait_s: float) -> list[Farewell]:
        """Those of `groups`, which may change, that have ended; none if none has in `wait_s`."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + wait_s
        while True:
            self._wake.clear()
            found = [Farewell(g.uid, g.ended, g.info) for g in groups if g.ended is not None]
            left_s = deadline - clock()
            if found or left_s <= 0:
                return found
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), max(left_s, LEAST_WAIT_S))

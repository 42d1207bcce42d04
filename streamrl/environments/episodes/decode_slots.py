"""Decode slots: how many turns an engine samples at the same time, earliest groups first."""

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class DecodeSlots:
    """Grants at most `count` slots; a free slot goes to the waiting turn of the lowest priority.

    An episode holds a slot while the engine samples its turn, and none while its environment works.
    """

    def __init__(self, count: int) -> None:
        self._num_free = count
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._order = itertools.count()

    @asynccontextmanager
    async def hold(self, priority: int) -> AsyncIterator[None]:
        """Wait for a slot and hold it within the context.

        priority: number of the group, ascending by admission; equal numbers are served in order.
            The wait has no deadline of its own: deadlines bound the turns that hold the slots.
        """
        await self._acquire(priority)
        try:
            yield
        finally:
            self._release()

    async def _acquire(self, priority: int) -> None:
        if self._num_free:
            self._num_free -= 1
            return
        granted = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (priority, next(self._order), granted))
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                self._release()
            raise

    def _release(self) -> None:
        while self._waiting:
            _, _, granted = heapq.heappop(self._waiting)
            if not granted.done():
                granted.set_result(None)
                return
        self._num_free += 1

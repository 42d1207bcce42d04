"""Nodes that wait for their turn to pull a version of the weights."""

import asyncio
from collections import OrderedDict
from contextlib import suppress


class PullTurns:
    """Queue of nodes, each with its waiting readers; the readers of a node wake together."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, set[asyncio.Future[None]]] = OrderedDict()

    async def wait_for_turn(self, node: str, *, until_s: float) -> None:
        """Wait until the node is woken, or until `until_s` (event loop time)."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(node, set()).add(future)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(until_s):
                    await future
        finally:
            readers = self._waiting.get(node, set())
            readers.discard(future)
            if node in self._waiting and not readers:
                del self._waiting[node]

    def wake_nodes(self, count: int) -> None:
        """Wake the readers of the first `count` nodes."""
        for _ in range(min(count, len(self._waiting))):
            _, readers = self._waiting.popitem(last=False)
            for future in readers:
                if not future.done():
                    future.set_result(None)

    def wake_all(self) -> None:
        self.wake_nodes(len(self._waiting))

"""Nodes that wait for their turn to pull a version of the weights."""

import asyncio
from collections import OrderedDict
from contextlib import suppress


class PullTurns:
    """Queue of nodes, each with its waiting readers; the readers of a node wake together."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, set[asyncio.Future[None]]] = OrderedDict()
        self._woken_nodes: set[str] = set()
        """Woken nodes of which no reader has run yet: each is about to use a free turn."""

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
            self._woken_nodes.discard(node)
            if node in self._waiting and not readers:
                del self._waiting[node]

    def wake_nodes(self, num_turns: int) -> None:
        """Wake the first nodes, one for each free turn; nodes that are awake already count."""
        while self._waiting and len(self._woken_nodes) < num_turns:
            self._wake_first_node()

    def wake_all(self) -> None:
        while self._waiting:
            self._wake_first_node()

    def _wake_first_node(self) -> None:
        node, readers = self._waiting.popitem(last=False)
        self._woken_nodes.add(node)
        for future in readers:
            if not future.done():
                future.set_result(None)

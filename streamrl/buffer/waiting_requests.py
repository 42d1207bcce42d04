"""Lease requests that wait at a shard for groups of a stage."""

import asyncio
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager


class WaitingRequests:
    """Lease requests of a stage, in the order in which they began to wait.

    For n ready groups at most n requests wake, not all: with hundreds of idle generators, a group
    would otherwise cost a look by each. A woken request that takes nothing must pass the wake on by
    `wake_requests`.

    num_requests: requests that wait or are about to take groups.
    """

    def __init__(self) -> None:
        self._futures: OrderedDict[asyncio.Future[None], None] = OrderedDict()
        self._num_woken = 0
        self.num_requests = 0

    @contextmanager
    def count_request(self) -> Iterator[None]:
        self.num_requests += 1
        try:
            yield
        finally:
            self.num_requests -= 1

    async def wait_for_wake(self, timeout_s: float) -> None:
        """Wait until woken, or for `timeout_s`."""
        future = asyncio.get_running_loop().create_future()
        self._futures[future] = None
        try:
            await asyncio.wait([future], timeout=timeout_s)
        finally:
            self._futures.pop(future, None)
            self._num_woken -= future.done()

    def wake_requests(self, num_groups: int) -> None:
        """Wake a request for each ready group; requests that are awake already count."""
        while self._futures and self._num_woken < num_groups:
            self._wake_first()

    def wake_all(self) -> None:
        while self._futures:
            self._wake_first()

    def _wake_first(self) -> None:
        future, _ = self._futures.popitem(last=False)
        future.set_result(None)
        self._num_woken += 1

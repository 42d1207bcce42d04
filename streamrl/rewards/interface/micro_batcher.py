"""Rows of tokens that arrive side by side, computed together under a bound on a batch's size."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

Row = Sequence[int]
Numbers = Sequence[float]


def plan_batches(lengths: Sequence[int], max_tokens: int, max_rows: int) -> list[list[int]]:
    """Places of rows, each once, in batches: those of like length together, the longest first.

    A batch is padded to its longest row, and with that has at most `max_tokens`. None of `lengths`
    is above it.
    """
    order = sorted(range(len(lengths)), key=lambda place: -lengths[place])
    batches = []
    while order:
        size = min(max_rows, max_tokens // lengths[order[0]])
        batches.append(order[:size])
        order = order[size:]
    return batches


class Batcher:
    """Computes what is waiting in rounds: what comes while a round is computed is the next one.

    `compute` gives the numbers of each row of a batch; one batch at a time.
    """

    def __init__(
        self,
        compute: Callable[[Sequence[Row]], Awaitable[Sequence[Numbers]]],
        *,
        max_tokens: int,
        max_rows: int,
    ) -> None:
        self._compute = compute
        self._max_tokens = max_tokens
        self._max_rows = max_rows
        self._waiting: list[tuple[Row, asyncio.Future[Numbers]]] = []
        self._round: asyncio.Task[None] | None = None
        self._promised: set[asyncio.Future[Numbers]] = set()

    async def numbers(self, rows: Sequence[Row]) -> list[Numbers]:
        """The numbers of each row, none of which is empty. Raises what `compute` raises."""
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in rows]
        self._waiting += zip(rows, futures, strict=True)
        self._promised.update(futures)
        if self._round is None or self._round.done():
            self._round = asyncio.create_task(self._work())
        try:
            return await asyncio.gather(*futures)
        finally:
            self._promised.difference_update(futures)
            for future in futures:
                future.cancel()

    async def _work(self) -> None:
        while self._waiting:
            waiting, self._waiting = self._waiting, []
            lengths = [len(row) for row, _ in waiting]
            for places in plan_batches(lengths, self._max_tokens, self._max_rows):
                # Nobody waits any more for what has failed elsewhere, or was given up.
                batch = [waiting[i] for i in places if not waiting[i][1].done()]
                if batch:
                    await self._settle(batch)

    async def _settle(self, batch: Sequence[tuple[Row, "asyncio.Future[Numbers]"]]) -> None:
        # What it raises is for those who wait, whatever it is.
        (found,) = await asyncio.gather(
            self._compute([row for row, _ in batch]), return_exceptions=True
        )
        for i, (_, future) in enumerate(batch):
            if future.done():
                continue
            if isinstance(found, BaseException):
                future.set_exception(found)
            else:
                future.set_result(found[i])

    def close(self) -> None:
        """Whoever still waits is told so by cancellation."""
        if self._round is not None:
            self._round.cancel()
        for future in self._promised:
            future.cancel()

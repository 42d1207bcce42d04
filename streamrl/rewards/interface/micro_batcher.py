"""Rows of tokens that arrive side by side, computed together under a bound on a batch's size."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

TokenRow = Sequence[int]
RowLogits = Sequence[float]


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


class MicroBatcher:
    """Computes what is waiting in rounds: what comes while a round is computed is the next one.

    `compute` gives the numbers of each row of a batch; one batch at a time.
    """

    def __init__(
        self,
        compute: Callable[[Sequence[TokenRow]], Awaitable[Sequence[RowLogits]]],
        *,
        max_tokens: int,
        max_rows: int,
    ) -> None:
        self._compute = compute
        self._max_tokens = max_tokens
        self._max_rows = max_rows
        self._pending_rows: list[tuple[TokenRow, asyncio.Future[RowLogits]]] = []
        self._batch_task: asyncio.Task[None] | None = None
        self._open_futures: set[asyncio.Future[RowLogits]] = set()

    async def compute_rows(self, rows: Sequence[TokenRow]) -> list[RowLogits]:
        """The numbers of each row, none of which is empty. Raises what `compute` raises."""
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in rows]
        self._pending_rows += zip(rows, futures, strict=True)
        self._open_futures.update(futures)
        if self._batch_task is None or self._batch_task.done():
            self._batch_task = asyncio.create_task(self._run_batches())
        try:
            return await asyncio.gather(*futures)
        finally:
            self._open_futures.difference_update(futures)
            for future in futures:
                future.cancel()

    async def _run_batches(self) -> None:
        while self._pending_rows:
            waiting, self._pending_rows = self._pending_rows, []
            lengths = [len(row) for row, _ in waiting]
            for places in plan_batches(lengths, self._max_tokens, self._max_rows):
                # Nobody waits any more for what has failed elsewhere, or was given up.
                batch = [waiting[i] for i in places if not waiting[i][1].done()]
                if batch:
                    await self._run_batch(batch)

    async def _run_batch(
        self, batch: Sequence[tuple[TokenRow, "asyncio.Future[RowLogits]"]]
    ) -> None:
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
        if self._batch_task is not None:
            self._batch_task.cancel()
        for future in self._open_futures:
            future.cancel()

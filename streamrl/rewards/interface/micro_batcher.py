"""Batching of concurrent requests to a reward model, bounded by padded tokens per batch."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

TokenRow = Sequence[int]
RowLogits = Sequence[float]


def plan_batches(lengths: Sequence[int], max_tokens: int, max_rows: int) -> list[list[int]]:
    """Sort rows by length, longest first, and cut them into batches; return row indices per batch.

    A batch padded to its longest row has at most `max_tokens` tokens, as has every row. Example:
    lengths [2, 5, 4], max_tokens 10 gives [[1, 2], [0]].
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    batches = []
    while order:
        size = min(max_rows, max_tokens // lengths[order[0]])
        batches.append(order[:size])
        order = order[size:]
    return batches


class MicroBatcher:
    """Batches the token rows of concurrent callers for forward passes of a reward model.

    Batches run in sequence; rows that arrive meanwhile wait and are batched together next.
    compute: returns the logits of each row of a batch.
    max_tokens, max_rows: limits of a batch; tokens include padding.
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
        """Return the logits of each nonempty row of token ids. Raises the errors of `compute`."""
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
            for indices in plan_batches(lengths, self._max_tokens, self._max_rows):
                # Skip rows whose caller was cancelled or failed with an earlier batch.
                batch = [waiting[i] for i in indices if not waiting[i][1].done()]
                if batch:
                    await self._run_batch(batch)

    async def _run_batch(
        self, batch: Sequence[tuple[TokenRow, "asyncio.Future[RowLogits]"]]
    ) -> None:
        # return_exceptions: any error, CancelledError included, goes to the waiting callers.
        (logits,) = await asyncio.gather(
            self._compute([row for row, _ in batch]), return_exceptions=True
        )
        for i, (_, future) in enumerate(batch):
            if future.done():
                continue
            if isinstance(logits, BaseException):
                future.set_exception(logits)
            else:
                future.set_result(logits[i])

    def close(self) -> None:
        if self._batch_task is not None:
            self._batch_task.cancel()
        for future in self._open_futures:
            future.cancel()

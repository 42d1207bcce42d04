"""Concurrent calls of one function for many items, such as the groups of a batch."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


async def map_concurrently(
    function: Callable[[ItemT], Awaitable[ResultT]], items: Sequence[ItemT], *, most: int
) -> list[ResultT]:
    """Await the function for every item, at most `most` at a time; return the results in order.

    Raises the first error; the other calls are cancelled.
    """
    slots = asyncio.Semaphore(most)

    async def run(item: ItemT) -> ResultT:
        async with slots:
            return await function(item)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(run(item)) for item in items]
    except ExceptionGroup as errors:
        first = errors.exceptions[0]
    else:
        return [task.result() for task in tasks]
    raise first  # outside of the handler, which would replace its context

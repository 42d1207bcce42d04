"""Concurrent calls: their bound, and the end of all at the first error."""

import asyncio

import pytest

from streamrl.user_code.concurrent_calls import map_concurrently


async def test_the_number_of_concurrent_calls_is_bounded():
    concurrency = [0]
    scored: list[int] = []

    async def judge(number):
        concurrency.append(concurrency[-1] + 1)
        await asyncio.sleep(0.001 * (number % 3))
        concurrency.append(concurrency[-1] - 1)
        scored.append(number)

    await map_concurrently(judge, range(20), most=4)
    assert max(concurrency) == 4
    assert sorted(scored) == list(range(20))


async def test_the_first_error_ends_all_calls():
    ended = []

    async def score(group: str) -> None:
        try:
            await asyncio.sleep(0.0 if group == "broken" else 60.0)
            try:
                raise KeyError(group)
            except KeyError:
                raise OSError(group)  # noqa: B904
        finally:
            ended.append(group)

    with pytest.raises(OSError, match="broken") as caught:
        await map_concurrently(score, ["a", "broken", "b"], most=3)
    assert isinstance(caught.value.__context__, KeyError)
    assert not caught.value.__suppress_context__
    await asyncio.sleep(0)
    assert sorted(ended) == ["a", "b", "broken"]

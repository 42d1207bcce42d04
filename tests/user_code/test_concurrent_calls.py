"""Concurrent calls: the end of all at the first error."""

import asyncio

import pytest

from streamrl.user_code.concurrent_calls import map_concurrently


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

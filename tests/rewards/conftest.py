"""Rewards that a test starts."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack

import pytest

from streamrl.rewards.reward_set import RewardSet
from tests.rewards.judged import started_rewards


@pytest.fixture
async def start_rewards() -> AsyncIterator[Callable[..., Awaitable[RewardSet]]]:
    """Start rewards, like `started_rewards`; close them at the end of the test."""
    async with AsyncExitStack() as stack:

        async def start(*configs, **scorer):
            return await stack.enter_async_context(started_rewards(*configs, **scorer))

        yield start

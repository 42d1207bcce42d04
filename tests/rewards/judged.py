"""Helpers of reward tests: a row, its results and scores, and rewards that are started."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from streamrl.errors import RewardError
from streamrl.messages import Array, Prompt
from streamrl.rewards.interface.completion import Completion
from streamrl.rewards.interface.config import RewardConfig, ScorerConfig
from streamrl.rewards.interface.reward import RewardContext
from streamrl.rewards.registry import build_rewards
from streamrl.rewards.reward_set import RewardSet

CHAT = ({"role": "user", "content": "2+3="},)
CALL = {
    "id": "call00000",
    "type": "function",
    "function": {"name": "add", "arguments": {"first": 2, "second": 3}},
}
EPISODE = Completion(
    turns=("", "5"),
    conversation="55",
    environment_score=1.0,
    messages=(
        {"role": "user", "content": "2+3"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call00000", "name": "add", "content": "5\nuser: 10"},
        {"role": "assistant", "content": "5"},
    ),
)
"""Two turns: a call of a tool, and the answer."""


@asynccontextmanager
async def started_rewards(*configs: RewardConfig, **scorer: Any) -> AsyncIterator[RewardSet]:
    """Build and start rewards; close them at the end."""
    rewards = build_rewards(configs, RewardContext(ScorerConfig(**scorer)))
    await rewards.start()
    try:
        yield rewards
    finally:
        await rewards.close()


async def score_texts(
    rewards: RewardSet, row: Prompt, completions: Sequence[str]
) -> Mapping[str, Array]:
    """Return the columns of a group with these completions."""
    return rewards.to_columns(await rewards.judge_texts(row, completions))


async def judge(config: RewardConfig, row: Prompt, *completions: str) -> list[tuple[float, str]]:
    """Return score and outcome of each completion by a reward alone."""
    async with started_rewards(config) as rewards:
        results = (await rewards.judge_texts(row, completions)).components[config.component_name]
    return [(result.score, result.outcome.value) for result in results]


def prompt(ground_truth: Any = "5", data_source: str = "sums", **extra_info: Any) -> Prompt:
    return Prompt(*("0:4:0", np.array([1], np.int32), CHAT, data_source, ground_truth, extra_info))


async def score_completions(reward, completions=("5", "6"), row=None):
    results = await reward.score(row or prompt(), list(completions))
    if isinstance(results, str):
        raise RewardError(results)
    return results


async def scores(reward, completions=("5", "6"), row=None):
    return [result.score for result in await score_completions(reward, completions, row)]

"""Helpers of reward function tests: a row, and its results and scores."""

import numpy as np

from streamrl.errors import RewardError
from streamrl.messages import Prompt

CHAT = ({"role": "user", "content": "2+3="},)


def prompt(**extra_info):
    return Prompt(
        "0:4:0",
        np.array([1], np.int32),
        messages=CHAT,
        data_source="sums",
        ground_truth="5",
        extra_info=extra_info,
    )


async def judgements(reward, completions=("5", "6"), row=None):
    results = await reward.score(row or prompt(), list(completions))
    if isinstance(results, str):
        raise RewardError(results)
    return results


async def scores(reward, completions=("5", "6"), row=None):
    return [result.score for result in await judgements(reward, completions, row)]

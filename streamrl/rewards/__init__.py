"""Rewards: from the text of a completion to a number, or to an error that says why not."""

from streamrl.rewards.config import RewardConfig, ScorerConfig
from streamrl.rewards.registry import KINDS, Kind, build_rewards
from streamrl.rewards.reward_set import COSTS, REWARDS, Component, Judged, Reward, RewardSet
from streamrl.rewards.text import decode_completions

__all__ = [
    "COSTS",
    "KINDS",
    "REWARDS",
    "Component",
    "Judged",
    "Kind",
    "Reward",
    "RewardConfig",
    "RewardSet",
    "ScorerConfig",
    "build_rewards",
    "decode_completions",
]

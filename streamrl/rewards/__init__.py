"""Rewards: from the text of a completion to a number, or to an error that says why not."""

from streamrl.rewards.combine import Component
from streamrl.rewards.interface.config import RewardConfig, SandboxConfig, ScorerConfig
from streamrl.rewards.interface.extract import decode_completions
from streamrl.rewards.interface.reward import Given, Reward, Surroundings
from streamrl.rewards.interface.verdict import Judgement, Verdict
from streamrl.rewards.registry import (
    KINDS,
    Kind,
    build_rewards,
    check_options,
    may_use_devices,
)
from streamrl.rewards.reward_set import COSTS, REWARDS, GroupJudgement, Judged, RewardSet
from streamrl.rewards.user_code.plugins import reward

__all__ = [
    "COSTS",
    "KINDS",
    "REWARDS",
    "Component",
    "Given",
    "GroupJudgement",
    "Judged",
    "Judgement",
    "Kind",
    "Reward",
    "RewardConfig",
    "RewardSet",
    "SandboxConfig",
    "ScorerConfig",
    "Surroundings",
    "Verdict",
    "build_rewards",
    "check_options",
    "decode_completions",
    "may_use_devices",
    "reward",
]

"""Rewards: functions from the text of a completion to a score or a RewardError."""

from streamrl.rewards.combine import RewardComponent
from streamrl.rewards.interface.config import RewardConfig, SandboxConfig, ScorerConfig
from streamrl.rewards.interface.extract import decode_completions
from streamrl.rewards.interface.reward import Reward, RewardContext, RewardSpec
from streamrl.rewards.interface.verdict import RewardOutcome, RewardResult
from streamrl.rewards.registry import (
    REWARD_KINDS,
    RewardKind,
    build_rewards,
    check_options,
    may_use_devices,
)
from streamrl.rewards.reward_set import COSTS, REWARDS, GroupRewardResult, RewardSet, ScoreSpec
from streamrl.rewards.user_code.plugins import reward

__all__ = [
    "COSTS",
    "REWARDS",
    "REWARD_KINDS",
    "GroupRewardResult",
    "Reward",
    "RewardComponent",
    "RewardConfig",
    "RewardContext",
    "RewardKind",
    "RewardOutcome",
    "RewardResult",
    "RewardSet",
    "RewardSpec",
    "SandboxConfig",
    "ScoreSpec",
    "ScorerConfig",
    "build_rewards",
    "check_options",
    "decode_completions",
    "may_use_devices",
    "reward",
]

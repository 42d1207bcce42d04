"""Rewards: functions from the text of a completion to a score or a RewardError."""

from streamrl.rewards.user_code.plugins import reward

__all__ = ["reward"]

"""Rewards: functions from the text of a completion to a score or a RewardError."""

from streamrl.user_code.reward_function import reward

__all__ = ["reward"]

"""Rewards: functions from the text of a completion to a score or a RewardError."""

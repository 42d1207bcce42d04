"""Rules for answers in text: pure functions of a completion and a ground truth."""

from streamrl.rewards.matchers.matcher import Rule
from streamrl.rewards.matchers.registry import BY_SOURCE, RULES, judge_for

__all__ = ["BY_SOURCE", "RULES", "Rule", "judge_for"]

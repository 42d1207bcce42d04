"""Rules for answers in text: pure functions of a completion and a ground truth."""

from streamrl.rewards.answers.rule import Rule
from streamrl.rewards.answers.table import BY_SOURCE, RULES, judge_for

__all__ = ["BY_SOURCE", "RULES", "Rule", "judge_for"]

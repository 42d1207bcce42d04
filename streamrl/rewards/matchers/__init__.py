"""Answer matchers: pure functions of a completion and a ground truth."""

from streamrl.rewards.matchers.matcher import AnswerMatcher
from streamrl.rewards.matchers.registry import MATCHER_BY_SOURCE, MATCHERS, find_matcher

__all__ = ["MATCHERS", "MATCHER_BY_SOURCE", "AnswerMatcher", "find_matcher"]

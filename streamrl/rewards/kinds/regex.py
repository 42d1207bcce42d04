"""Kind `regex`: 1 if a pattern matches the completion, else 0."""

from dataclasses import dataclass
from typing import Any

from omegaconf import MISSING

from streamrl.rewards.interface.extract import AnswerPattern
from streamrl.rewards.interface.reward import RuleReward
from streamrl.rewards.interface.verdict import RewardResult


@dataclass
class RegexOptions:
    """Options of kind regex.

    pattern: regular expression, searched anywhere in the completion.
    """

    pattern: str = MISSING


def build_regex_reward(options: RegexOptions) -> RuleReward:
    r"""Build a reward that scores 1 if `pattern` matches anywhere in the completion.

    \A and \Z in the pattern anchor it at both ends.
    """
    pattern = AnswerPattern(options.pattern)

    def judge(completion: str, truth: Any) -> RewardResult:
        return RewardResult.from_correctness(pattern.has_match(completion))

    return RuleReward(judge)

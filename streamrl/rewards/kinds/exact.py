"""Kind `exact`: 1 if the answer equals the ground truth as text, else 0."""

from typing import Any

from streamrl.rewards.interface.extract import PatternOptions, extract_answer
from streamrl.rewards.interface.reward import RuleReward
from streamrl.rewards.interface.verdict import RewardResult
from streamrl.rewards.matchers.matcher import parse_truth_text


def build_exact_reward(options: PatternOptions) -> RuleReward:
    """Build a reward that compares answer and ground truth as stripped texts.

    The answer is the match of `pattern`, or the whole completion without a pattern. A completion
    without a match is wrong. The ground truth is nonempty text or an int.
    """
    pattern = options.compile_pattern()

    def judge(completion: str, truth: Any) -> RewardResult:
        answer = extract_answer(completion, pattern)
        return RewardResult.from_correctness(answer == parse_truth_text(truth), answer)

    return RuleReward(judge, parse_truth_text)

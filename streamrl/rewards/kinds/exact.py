"""Kind `exact_estimator`: 1 where the answer is the ground truth to the letter, else 0."""

from typing import Any

from streamrl.rewards.interface.extract import PatternOptions, extract_answer
from streamrl.rewards.interface.reward import RuleReward
from streamrl.rewards.interface.verdict import RewardResult
from streamrl.rewards.matchers.matcher import parse_truth_text


def build_exact_reward(options: PatternOptions) -> RuleReward:
    """Compares text, both sides trimmed; ground_truth is text, not empty, or an int.

    The answer is the whole completion, or what `pattern` finds in it; found nowhere, it is wrong.
    """
    pattern = options.compile_pattern()

    def judge(completion: str, truth: Any) -> RewardResult:
        answer = extract_answer(completion, pattern)
        return RewardResult.from_correctness(answer == parse_truth_text(truth), answer)

    return RuleReward(judge, parse_truth_text)

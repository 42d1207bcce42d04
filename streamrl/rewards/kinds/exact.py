"""Kind `exact`: 1 where the answer is the ground truth to the letter, else 0."""

from typing import Any

from streamrl.rewards.interface.extract import PatternOptions, answer_in
from streamrl.rewards.interface.reward import RuleReward
from streamrl.rewards.interface.verdict import Judgement
from streamrl.rewards.matchers.matcher import truth_text


def exact_reward(options: PatternOptions) -> RuleReward:
    """Compares text, both sides trimmed; ground_truth is text, not empty, or an int.

    The answer is the whole completion, or what `pattern` finds in it; found nowhere, it is wrong.
    """
    pattern = options.compiled()

    def judge(completion: str, truth: Any) -> Judgement:
        answer = answer_in(completion, pattern)
        return Judgement.of(answer == truth_text(truth), answer)

    return RuleReward(judge, truth_text)

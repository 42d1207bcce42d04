"""Reward kind `environment`: the score that a rollout's environment gave."""

from collections.abc import Sequence

from streamrl.errors import RewardError
from streamrl.messages import Prompt
from streamrl.rewards.interface.completion import Completion
from streamrl.rewards.interface.reward import Reward
from streamrl.rewards.interface.reward_result import RewardResult

ENVIRONMENT_KIND = "environment"


class EnvironmentReward(Reward):
    """Takes the environment's score; PASS if it is above 0. The answer is the part's text."""

    async def score_completions(
        self, prompt: Prompt, completions: Sequence[Completion], part: str
    ) -> Sequence[RewardResult]:
        results = []
        for completion in completions:
            score = completion.environment_score
            if score is None:
                raise RewardError("no environment has scored the rollout: set environment.path")
            answer = completion.get_part(part).strip() or None
            results.append(RewardResult.from_correctness(score > 0, answer, score=score))
        return results

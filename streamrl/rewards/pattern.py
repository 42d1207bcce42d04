"""Kind `regex`: 1 where the completion has the form that was asked for, else 0."""

from collections.abc import Sequence

from streamrl.messages import Prompt
from streamrl.rewards.config import RewardConfig
from streamrl.rewards.text import AnswerPattern


class PatternReward:
    r"""1 where `pattern` is found anywhere in the completion; \A and \Z demand all of it."""

    def __init__(self, config: RewardConfig) -> None:
        self._pattern = AnswerPattern(config.pattern)

    def check(self, prompt: Prompt) -> None:
        """Any prompt will do: the ground truth is not looked at."""

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> list[float]:
        """1.0 or 0.0 for each completion."""
        return [float(self._pattern.occurs(text)) for text in completions]

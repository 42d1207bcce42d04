"""Kind `exact`: 1 where the answer is the ground truth to the letter, else 0."""

from collections.abc import Sequence

from streamrl.errors import RewardError
from streamrl.messages import Prompt
from streamrl.rewards.config import RewardConfig
from streamrl.rewards.text import AnswerPattern, answer_in


class ExactReward:
    """Compares text, both sides trimmed; ground_truth is text or an int.

    The answer is the whole completion, or what `pattern` finds in it; found nowhere, it is wrong.
    """

    def __init__(self, config: RewardConfig) -> None:
        self._pattern = AnswerPattern(config.pattern) if config.pattern else None

    def check(self, prompt: Prompt) -> None:
        """Raise RewardError if the ground truth is neither text nor an int."""
        _truth(prompt)

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> list[float]:
        """1.0 or 0.0 for each completion."""
        truth = _truth(prompt)
        return [float(answer_in(text, self._pattern) == truth) for text in completions]


def _truth(prompt: Prompt) -> str:
    truth = prompt.ground_truth
    if isinstance(truth, bool) or not isinstance(truth, str | int):
        raise RewardError(f"ground_truth must be text or an int, is {truth!r}")
    return str(truth).strip()

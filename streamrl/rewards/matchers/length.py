"""Length matcher: scores whether the length of a completion lies within bounds."""

import math

from streamrl.errors import ConfigError
from streamrl.rewards.interface.reward_result import RewardResult
from streamrl.rewards.matchers.matcher import GroundTruth, accept_any_truth

UNITS = ("words", "characters")

validate_truth = accept_any_truth


def judge_completion(
    completion: str,
    truth: GroundTruth = None,
    *,
    unit: str = "words",
    least: int = 0,
    most: float = math.inf,
    tolerance: int = 0,
) -> RewardResult:
    """Score 1 for a length within [least, most]; outside, the score falls linearly to 0.

    Lengths are in `unit`; whitespace separates words. A length outside by n scores max(0, 1 - n /
    tolerance), or 0 without tolerance. Ignores the ground truth. Raises ConfigError for an unknown
    unit, or for least, most and tolerance that contradict each other.
    """
    if unit not in UNITS:
        raise ConfigError(f"rewards.unit={unit}: must be one of {', '.join(UNITS)}")
    if not 0 <= least <= most or tolerance < 0:
        raise ConfigError(
            f"rewards.least={least}, most={most}, tolerance={tolerance}: must be 0 or more, "
            "and least not above most"
        )
    length = len(completion.split()) if unit == "words" else len(completion)
    beyond = max(least - length, length - most, 0)
    score = 1.0 if beyond == 0 else max(0.0, 1 - beyond / tolerance) if tolerance else 0.0
    return RewardResult.from_correctness(beyond == 0, score=score, detail=f"{length} {unit}")

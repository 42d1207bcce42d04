"""Length: a completion is neither shorter nor longer than it should be."""

import math

from streamrl.errors import ConfigError
from streamrl.rewards.interface.verdict import RewardResult
from streamrl.rewards.matchers.matcher import GroundTruth, accept_any_truth, make_result

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
    """1 from `least` to `most`, both included; outside, falling in a line to 0 over `tolerance`.

    All are counted in `unit`: words are what spaces separate. One beyond the limit scores
    1 - 1 / tolerance, `tolerance` or more beyond it 0. The ground truth is not looked at. Raises
    ConfigError for another unit, or limits that nothing can keep.
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
    return make_result(beyond == 0, score=score, detail=f"{length} {unit}")

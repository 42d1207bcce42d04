"""What is said of one completion: a number, and what kind of right or wrong it stands for."""

import math
from dataclasses import dataclass
from enum import Enum


class RewardOutcome(Enum):
    """How judging one completion ended; the value is its name in metrics and files.

    All but INFRA_ERROR are of the completion and final. INFRA_ERROR says that there was no
    judging: nothing is known of the completion, it is tried again, and never given a score.
    NOT_JUDGED says that the reward has nothing to say of it: the score is NaN, and left out.
    """

    PASS = "pass"
    WRONG = "wrong"
    RUNTIME_ERROR = "runtime_error"
    COMPILE_ERROR = "compile_error"
    TIMEOUT = "timeout"
    MEMORY = "memory"
    OUTPUT_LIMIT = "output_limit"
    NOT_JUDGED = "not_judged"
    INFRA_ERROR = "infra_error"


@dataclass(frozen=True)
class RewardResult:
    """One completion judged.

    answer: what was compared with the ground truth, in one form for all that are equal (maj@k
        counts them); None where the completion gives none, or the reward looks for none.
    detail: what a person should know besides, such as the last line of a traceback.
    numbers: what the reward measured besides, by name.
    """

    score: float
    outcome: RewardOutcome
    answer: str | None = None
    detail: str = ""
    extra_metrics: tuple[tuple[str, float], ...] = ()

    @classmethod
    def make_not_judged(cls) -> "RewardResult":
        """Nothing is said of the completion."""
        return cls(math.nan, RewardOutcome.NOT_JUDGED)

    @property
    def is_not_judged(self) -> bool:
        """Whether nothing is said of the completion."""
        return self.outcome is RewardOutcome.NOT_JUDGED

    @classmethod
    def from_correctness(cls, passes: bool, answer: str | None = None) -> "RewardResult":
        """1 and PASS, or 0 and WRONG."""
        return cls(float(passes), RewardOutcome.PASS if passes else RewardOutcome.WRONG, answer)

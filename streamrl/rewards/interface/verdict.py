"""What is said of one completion: a number, and what kind of right or wrong it stands for."""

import math
from dataclasses import dataclass
from enum import Enum


class Verdict(Enum):
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
class Judgement:
    """One completion judged.

    answer: what was compared with the ground truth, in one form for all that are equal (maj@k
        counts them); None where the completion gives none, or the reward looks for none.
    detail: what a person should know besides, such as the last line of a traceback.
    numbers: what the reward measured besides, by name.
    """

    score: float
    verdict: Verdict
    answer: str | None = None
    detail: str = ""
    numbers: tuple[tuple[str, float], ...] = ()

    @classmethod
    def absent(cls) -> "Judgement":
        """Nothing is said of the completion."""
        return cls(math.nan, Verdict.NOT_JUDGED)

    @property
    def is_absent(self) -> bool:
        """Whether nothing is said of the completion."""
        return self.verdict is Verdict.NOT_JUDGED

    @classmethod
    def of(cls, passes: bool, answer: str | None = None) -> "Judgement":
        """1 and PASS, or 0 and WRONG."""
        return cls(float(passes), Verdict.PASS if passes else Verdict.WRONG, answer)

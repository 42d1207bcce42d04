"""Result of scoring a completion: a score and an outcome."""

import math
from dataclasses import dataclass
from enum import Enum


class RewardOutcome(Enum):
    """Outcome of scoring a completion; the value is the name in metrics and files.

    Every outcome except INFRA_ERROR describes the completion and is final. INFRA_ERROR means that
    scoring failed: the completion is scored again and never gets a score of 0 for the failure.
    NOT_JUDGED means that the reward abstains: the score is NaN and does not count.
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
    """Score and outcome of a completion.

    answer: extracted answer in normal form, so that equal answers have equal text (for maj@k);
        None if the completion has no answer or the reward extracts none.
    detail: explanation for people, such as the last line of a traceback.
    extra_metrics: further numbers by name.
    turn_scores: parts of the score, one per turn of the policy; () for none.
    token_scores: the same per sampled token of the text that was scored.
    span_scores: parts of the score as (start, end, score), offsets of characters in that text. The
        rest of the score falls on the last token.
    """

    score: float
    outcome: RewardOutcome
    answer: str | None = None
    detail: str = ""
    extra_metrics: tuple[tuple[str, float], ...] = ()
    turn_scores: tuple[float, ...] = ()
    token_scores: tuple[float, ...] = ()
    span_scores: tuple[tuple[int, int, float], ...] = ()

    @classmethod
    def make_not_judged(cls) -> "RewardResult":
        """Return the result of a reward that abstains: score NaN."""
        return cls(math.nan, RewardOutcome.NOT_JUDGED)

    @property
    def is_not_judged(self) -> bool:
        return self.outcome is RewardOutcome.NOT_JUDGED

    @property
    def has_places(self) -> bool:
        """True if a part of the score falls elsewhere than on the last token."""
        return bool(self.turn_scores or self.token_scores or self.span_scores)

    @classmethod
    def from_correctness(
        cls,
        passes: bool,
        answer: str | None = None,
        *,
        score: float | None = None,
        detail: str = "",
    ) -> "RewardResult":
        """Return outcome PASS or WRONG; the score is 1 or 0 by default."""
        outcome = RewardOutcome.PASS if passes else RewardOutcome.WRONG
        return cls(float(passes) if score is None else score, outcome, answer, detail)

"""Interface and helpers of answer matchers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from streamrl.errors import RewardError
from streamrl.user_code.reward_result import RewardOutcome, RewardResult

GroundTruth = Any


@dataclass(frozen=True)
class AnswerMatcher:
    """Scores a completion against a ground truth.

    judge_completion: (completion, truth, **options) -> RewardResult. Raises RewardError for an
        unusable truth and ConfigError for a wrong option; never raises because of the completion.
    validate_truth: raises RewardError for an unusable truth; by default, every truth is usable.
    may_hang: some completions take unbounded time, so the matcher must run in a process that can be
        killed. Other matchers take time linear in the length of the completion.
    """

    judge_completion: Callable[..., RewardResult]
    validate_truth: Callable[..., object] = lambda truth: None
    may_hang: bool = False


def parse_truth_text(truth: GroundTruth) -> str:
    """Return a str or int as stripped text. Raises RewardError for other types and empty text."""
    if isinstance(truth, bool) or not isinstance(truth, str | int) or not str(truth).strip():
        raise RewardError(f"ground_truth must be an answer as text or an int, is {truth!r}")
    return str(truth).strip()


def require_nonempty(normal_form: str, truth: GroundTruth) -> str:
    """Return the normal form. Raises RewardError if empty: every empty answer would match."""
    if not normal_form:
        raise RewardError(f"ground_truth is empty in normal form: {truth!r}")
    return normal_form


def make_missing_answer_result(missing: str, *, score: float = 0.0) -> RewardResult:
    """Return outcome WRONG with detail "no `missing`" for a completion without an answer."""
    return RewardResult(score, RewardOutcome.WRONG, None, f"no {missing}")

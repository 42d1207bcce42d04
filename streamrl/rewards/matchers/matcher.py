"""What all rules share: the ground truth as text, and the judgement of an answer that was found."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from streamrl.errors import RewardError
from streamrl.rewards.interface.verdict import RewardOutcome, RewardResult

GroundTruth = Any


@dataclass(frozen=True)
class AnswerMatcher:
    """A way to judge the text of a completion by a ground truth.

    judge: (completion, truth, *, options) -> Judgement; raises RewardError for a truth it cannot
        use and ConfigError for a wrong option, and nothing whatever the completion is.
    check_truth: raises RewardError for a truth that `judge` could not use.
    may_hang: whether a completion can make `judge` take forever, so that it needs a process that
        can be killed; the others take time in proportion to the completion.
    """

    judge_completion: Callable[..., RewardResult]
    validate_truth: Callable[[GroundTruth], object]
    may_hang: bool = False


def parse_truth_text(truth: GroundTruth) -> str:
    """A ground truth that is text or an int, trimmed. Raises RewardError if it is not, or empty."""
    if isinstance(truth, bool) or not isinstance(truth, str | int) or not str(truth).strip():
        raise RewardError(f"ground_truth must be an answer as text or an int, is {truth!r}")
    return str(truth).strip()


def require_nonempty(normal_form: str, truth: GroundTruth) -> str:
    """The normal form. Raises RewardError if it is empty: then any empty answer would be right."""
    if not normal_form:
        raise RewardError(f"ground_truth says nothing once it is in normal form: {truth!r}")
    return normal_form


def accept_any_truth(truth: GroundTruth) -> None:
    """The check of a rule that looks at the completion alone: any ground truth will do."""


def make_result(
    right: bool, *, score: float, answer: str | None = None, detail: str = ""
) -> RewardResult:
    """PASS or WRONG with this score."""
    return RewardResult(score, RewardOutcome.PASS if right else RewardOutcome.WRONG, answer, detail)


def make_missing_answer_result(missing: str, *, score: float = 0.0) -> RewardResult:
    """WRONG, because the completion gives no answer: it has no `missing`."""
    return RewardResult(score, RewardOutcome.WRONG, None, f"no {missing}")

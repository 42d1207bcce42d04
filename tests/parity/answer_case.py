"""A comparison of scores: our rule and a peer's own, over the answers of a table."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from streamrl.errors import RewardError

Answer = tuple[str, str]
"""Completion and ground truth."""
SHOWN_CHARACTERS = 40


@dataclass(frozen=True)
class OnPurpose:
    """An answer that we score otherwise, and why."""

    answer: Answer
    ours: float
    theirs: float
    reason: str

    def __str__(self) -> str:
        return f"{_difference(self.answer, self.ours, self.theirs)}: {self.reason}"


@dataclass(frozen=True)
class AnswerCase:
    """What is compared, and where the two are known to differ.

    `ours` raises RewardError for a ground truth it refuses: there is nothing to compare then.
    """

    function: str
    peer: str
    ours: Callable[[str, str], float]
    theirs: Callable[[str, str], float]
    on_purpose: Sequence[OnPurpose] = ()


@dataclass(frozen=True)
class Agreement:
    """How many answers are scored alike, and what of those that are not is not as it was listed."""

    num_compared: int
    num_agreeing: int
    num_refused: int
    unlisted: Sequence[str]

    @property
    def as_listed(self) -> bool:
        """Whether all differences are on the list, and all of the list differs."""
        return not self.unlisted


def score_all(case: AnswerCase, answers: Sequence[Answer]) -> Agreement:
    """Run both rules on all answers."""
    scores = {}
    for answer in answers:
        with suppress(RewardError):
            scores[answer] = (case.ours(*answer), case.theirs(*answer))
    differing = {answer: pair for answer, pair in scores.items() if pair[0] != pair[1]}
    listed = {entry.answer: (entry.ours, entry.theirs) for entry in case.on_purpose}
    unlisted = [
        _difference(answer, *scores[answer])
        for answer in {**differing, **listed}
        if differing.get(answer) != listed.get(answer)
    ]
    refused = len(answers) - len(scores)
    return Agreement(len(scores), len(scores) - len(differing), refused, unlisted)


def _difference(answer: Answer, ours: float, theirs: float) -> str:
    completion, truth = (repr(text) for text in answer)
    if len(completion) > SHOWN_CHARACTERS:
        completion = f"{completion[:SHOWN_CHARACTERS]}..."
    return f"{completion} for {truth}: ours {ours:g}, theirs {theirs:g}"

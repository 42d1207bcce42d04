"""A comparison of our matcher with a peer's on a table of answers."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from streamrl.errors import RewardError

Answer = tuple[str, str]
"""Completion and ground truth."""
SHOWN_CHARACTERS = 40


@dataclass(frozen=True)
class OnPurpose:
    """An intended difference of scores, and its reason."""

    answer: Answer
    ours: float
    theirs: float
    reason: str

    def __str__(self) -> str:
        return f"{_difference(self.answer, self.ours, self.theirs)}: {self.reason}"


@dataclass(frozen=True)
class AnswerCase:
    """Two matchers to compare, and their intended differences.

    `ours` raises RewardError for a ground truth it refuses, which is not compared.
    """

    function: str
    peer: str
    ours: Callable[[str, str], float]
    theirs: Callable[[str, str], float]
    on_purpose: Sequence[OnPurpose] = ()


@dataclass(frozen=True)
class Agreement:
    """Numbers of answers, and the differences that are not as listed."""

    num_compared: int
    num_agreeing: int
    num_refused: int
    unlisted: Sequence[str]

    @property
    def as_listed(self) -> bool:
        """Whether the differences are exactly the listed ones."""
        return not self.unlisted


def score_all(case: AnswerCase, answers: Sequence[Answer]) -> Agreement:
    """Run both matchers on all answers."""
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

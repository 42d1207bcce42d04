import pytest

from streamrl.errors import RewardError
from streamrl.rewards.kinds import form

NAMED = [
    *("B", "b", "(B)", "**B**", " B. ", "$B$", "B. Paris", "(b) Paris", "B: it is warm", "A\nB"),
    *("The answer is B", "The answer is B.", "The answer is (B), because A is wrong."),
    *("the correct answer is: **B**", "Answer: B", "ANSWER: (B) Paris", "**Answer:** B"),
    *("The answer is option B", "The answer is $\\boxed{B}$.", "\\boxed{B}", "\\boxed{b}"),
    *("\\boxed{(B)}", "\\boxed{\\text{B}}", "\\boxed{\\textbf{(B)}}", "\\boxed{\\text{(B) }7}"),
    *("\\boxed{B. Paris}", "The answer is A. No, wait: the answer is B."),
    *("\\boxed{A} and then \\boxed{B}", "\\boxed{A}, so the answer is B"),
    *("The answer is A, so \\boxed{B}", "A\n\nThe answer is B", "The answer is B\n\nA"),
    "Let me think.\n\nB",
]
UNNAMED = [
    *("A dog barks.", "I think so.", "The answer is a matter of taste", "The answer is not B"),
    *("The answer is Bob", "The answers are B", "A. London\nB. Paris", "Paris", "Z"),
    *("\\boxed{7}", ""),
]


@pytest.mark.parametrize("completion", [*NAMED, *UNNAMED])
def test_the_last_letter_named_as_the_answer_counts(completion):
    result = form.judge_choice(completion, "B")
    assert result.answer == (None if completion in UNNAMED else "B")
    assert result.score == (completion in NAMED)


def test_only_the_configured_letters_count():
    assert form.judge_choice("The answer is E", "A", letters="ABCD").answer is None
    assert form.judge_choice("The answer is A\nE", "A", letters="ABCD").score == 1


@pytest.mark.parametrize("truth", ["B", "b", "(B)", " B "])
def test_a_ground_truth_is_a_letter(truth):
    assert form.validate_choice_truth(truth) == "B"
    assert form.judge_choice("B", truth).score == 1


@pytest.mark.parametrize("truth", ["", "Paris", "E", "AB", 1, None, True])
def test_a_ground_truth_outside_the_letters_is_refused(truth):
    with pytest.raises(RewardError, match="ground_truth must be"):
        form.validate_choice_truth(truth, letters="ABCD")

import pytest

from streamrl.errors import ConfigError, RewardError
from streamrl.rewards.matchers import choice


@pytest.mark.parametrize(
    ("completion", "letter"),
    [
        ("B", "B"),
        ("b", "B"),
        ("(B)", "B"),
        ("**B**", "B"),
        (" B. ", "B"),
        ("$B$", "B"),
        ("The answer is B", "B"),
        ("The answer is B.", "B"),
        ("The answer is (B), because A is wrong.", "B"),
        ("the correct answer is: **B**", "B"),
        ("Answer: B", "B"),
        ("ANSWER: (B) Paris", "B"),
        ("**Answer:** B", "B"),
        ("The answer is option B", "B"),
        ("The answer is $\\boxed{B}$.", "B"),
        ("\\boxed{B}", "B"),
        ("\\boxed{b}", "B"),
        ("\\boxed{(B)}", "B"),
        ("\\boxed{\\text{B}}", "B"),
        ("\\boxed{\\textbf{(B)}}", "B"),
        ("\\boxed{\\text{(B) }7}", "B"),
        ("\\boxed{B. Paris}", "B"),
        ("The answer is A. No, wait: the answer is B.", "B"),
        ("\\boxed{A} and then \\boxed{B}", "B"),
        ("\\boxed{A}, so the answer is B", "B"),
        ("The answer is A, so \\boxed{B}", "B"),
        ("A\n\nThe answer is B", "B"),
        ("The answer is B\n\nA", "B"),
        ("Let me think.\n\nB", "B"),
        ("A\nB", "B"),
        ("B. Paris", "B"),
        ("(b) Paris", "B"),
        ("B: it is warm", "B"),
        ("A dog barks.", None),
        ("I think so.", None),
        ("The answer is a matter of taste", None),
        ("The answer is not B", None),
        ("The answer is Bob", None),
        ("The answers are B", None),
        ("A. London\nB. Paris", None),
        ("Paris", None),
        ("Z", None),
        ("\\boxed{7}", None),
        ("", None),
    ],
)
def test_the_last_letter_named_as_the_answer_counts(completion, letter):
    judgement = choice.judge_completion(completion, "B")
    assert judgement.answer == letter
    assert judgement.score == (letter == "B")


def test_only_the_configured_letters_count():
    assert choice.judge_completion("The answer is E", "A", letters="ABCD").answer is None
    assert choice.judge_completion("The answer is A\nE", "A", letters="ABCD").score == 1


@pytest.mark.parametrize("truth", ["B", "b", "(B)", " B "])
def test_a_ground_truth_is_a_letter(truth):
    assert choice.validate_truth(truth) == "B"
    assert choice.judge_completion("B", truth).score == 1


@pytest.mark.parametrize("truth", ["", "Paris", "E", "AB", 1, None, True])
def test_a_ground_truth_outside_the_letters_is_refused(truth):
    with pytest.raises(RewardError, match="ground_truth must be"):
        choice.validate_truth(truth, letters="ABCD")


@pytest.mark.parametrize("letters", ["", "abc", "AAB", "A-C", "A]"])
def test_letters_must_be_distinct_capitals(letters):
    with pytest.raises(ConfigError, match="must be distinct capitals from A to Z"):
        choice.judge_completion("A", "A", letters=letters)

import pytest

from streamrl.errors import RewardError
from streamrl.rewards.kinds import math_answers


@pytest.mark.parametrize(
    ("completion", "truth", "score"),
    [
        (r"\boxed{1+x}", "x+1", 1),
        (r"\boxed{1+x}", "$x+1$", 1),
        (r"\boxed{1+x}", r"\boxed{x+1}", 1),
        (r"So it is $\frac{2}{4}$.", "0.5", 1),
        (r"\boxed{2^{1/2}}", r"\sqrt{2}", 1),
        (r"\boxed{1,234}", "1234", 1),
        ("The answer is 34.", 34, 1),
        (r"\boxed{\{2,1\}}", r"\{1,2\}", 1),
        (r"\boxed{x+2}", "x+1", 0),
        (r"\boxed{0.33}", r"\frac{1}{3}", 0),
        ("no idea", "7", 0),
        ("", "7", 0),
    ],
)
def test_answers_are_compared_as_mathematics(completion, truth, score):
    assert math_answers.judge_symbolic(completion, truth).score == score


def test_an_integer_too_long_to_print_is_scored():
    assert math_answers.judge_symbolic(r"\boxed{10^{5000}}", "7").score == 0
    assert math_answers.judge_symbolic(r"\boxed{10^{5000}}", r"10^{5000}").score == 1


def test_a_ground_truth_that_cannot_be_parsed_is_an_error():
    with pytest.raises(RewardError, match="cannot be parsed by math-verify: "):
        math_answers.judge_symbolic("7", r"\boxed{}")
    with pytest.raises(RewardError, match="must be an answer as text or an int"):
        math_answers.validate_symbolic_truth(None)
    for prose in ("the cat sat", r"\boxed{\text{The set of all even numbers}}"):
        with pytest.raises(RewardError, match="ground_truth is prose"):
            math_answers.judge_symbolic(prose, prose)
    for mathematics in (r"\frac{\sin x}{\cos x}+\sqrt{2}", r"3 \text{ cm}", "12 dollars", "x or y"):
        assert math_answers.validate_symbolic_truth(mathematics) == mathematics

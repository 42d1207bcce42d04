import pytest

from streamrl.errors import RewardError
from streamrl.rewards.kinds import math_answers
from streamrl.rewards.kinds.rules import MATCHERS
from streamrl.user_code.reward_result import RewardOutcome
from tests.rewards.matchers.answers_table import ANSWERS, RULES


@pytest.mark.parametrize("letter", RULES)
def test_matchers_agree_with_the_answers_table(letter):
    for completion, truth, right_by in ANSWERS:
        try:
            result = RULES[letter](completion, truth)
        except RewardError:
            assert letter in "sf"  # only GSM8K requires a number
            continue
        assert (result.score == 1) == (letter in right_by), (completion, truth)
        assert (result.outcome is RewardOutcome.PASS) == (result.score == 1)


def test_equal_answers_have_equal_normal_forms():
    assert math_answers.judge_gsm8k("#### 1,234", "5").answer == "1234"
    assert math_answers.judge_gsm8k("It is 1,234.", "5", method="flexible").answer == "1234"
    halves = (r"\boxed{0.5}", r"\boxed{1/2}", r"\boxed{\dfrac12}", r"\boxed{x = \frac{1}{2}}")
    assert {math_answers.judge_math(half, "5").answer for half in halves} == {r"\frac{1}{2}"}
    lines = (
        "Answer: $34$",
        "answer: x = 34",
        r"Answer: \boxed{34}",
        r"\boxed{34}",
        "Answer: 34 cm",
    )
    assert {math_answers.judge_dapo_math(line, "5").answer for line in lines} == {"34"}


def test_the_detail_of_a_missing_answer_names_the_missing_marker():
    result = math_answers.judge_gsm8k("9", "9")
    assert result.answer is None
    assert result.detail == "no #### and a number in the last 300 characters"
    expected = "no number in the last 300 characters"
    assert math_answers.judge_gsm8k("", "9", method="flexible").detail == expected
    assert math_answers.judge_math(r"\boxed{9", "9").detail == r"no \boxed{} that is closed"
    assert math_answers.judge_dapo_math("9", "9").detail == r"no Answer: and no \boxed{} at the end"


@pytest.mark.parametrize("rule", ["gsm8k", "math", "dapo_math"])
@pytest.mark.parametrize("truth", [None, "", "  ", True, 1.5, ["9"], {"target": "9"}])
def test_a_ground_truth_of_another_type_is_refused(rule, truth):
    with pytest.raises(RewardError, match="ground_truth must be an answer as text or an int, is"):
        MATCHERS[rule].validate_truth(truth)
    with pytest.raises(RewardError, match="ground_truth must be an answer as text or an int, is"):
        MATCHERS[rule].judge_completion("9", truth)


@pytest.mark.parametrize("truth", ["nine", "16 - 7 = 9\n#### 9", "1/2", ",", "9 eggs"])
def test_gsm8k_refuses_a_ground_truth_without_a_number(truth):
    with pytest.raises(RewardError, match="must be a number in decimal digits, is"):
        math_answers.validate_gsm8k_truth(truth)


@pytest.mark.parametrize(
    ("rule", "truth"), [("math", r"\%"), ("math", "x="), ("dapo_math", "degrees")]
)
def test_a_ground_truth_with_an_empty_normal_form_is_refused(rule, truth):
    with pytest.raises(RewardError, match="ground_truth is empty in normal form"):
        MATCHERS[rule].validate_truth(truth)


@pytest.mark.parametrize(
    ("text", "form"),
    [
        (r"x = .5", r"\frac{1}{2}"),
        (r"-\dfrac 12", r"-\frac{1}{2}"),
        (r"3\text{ red}, 2\text{ blue}", r"3\text{red},2\text{blue}"),
        (r"\left[ 2, \tfrac{\pi}{3} \right)", r"[2,\frac{\pi}{3})"),
    ],
)
def test_the_normal_form_of_math(text, form):
    assert math_answers.normalize_latex(text) == form
    assert math_answers.normalize_latex(form) == form


@pytest.mark.parametrize(
    ("text", "form"),
    [
        (r"a = \frac12 + \sqrt3", r"\frac{1}{2}+\sqrt{3}"),
        (r"the area is $\mbox{about }7$ square inches", "about7"),
        (r"1,234,567 \text{ meters}", "1234567"),
    ],
)
def test_dapo_math_normalizes_answers_like_minerva(text, form):
    assert math_answers.normalize_answer(text) == form

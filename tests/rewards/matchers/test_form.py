import pytest

from streamrl.rewards.kinds import form
from streamrl.user_code.reward_result import RewardOutcome

GOOD = "<think>2 + 3</think>\n<answer>5</answer>"
SWAPPED = "not in the order <think> </think> <answer> </answer>"


@pytest.mark.parametrize(
    ("completion", "detail"),
    [
        (GOOD, ""),
        (f"So: {GOOD}", "text before <think>"),
        (GOOD.replace("\n", " so "), "text before <answer>"),
        (f"{GOOD}.", "text after </answer>"),
        (GOOD + GOOD, "<think> 2 times"),
        ("<answer>5</answer><think>2 + 3</think>", SWAPPED),
        ("<think><answer>5</answer></think>", SWAPPED),
        ("<think> \n</think><answer>5</answer>", "<think> is empty"),
        ("<think>2 + 3</think><answer>5", "</answer> 0 times"),
    ],
)
def test_every_tag_occurs_once_in_order_with_content(completion, detail):
    result = form.judge_tags(completion)
    assert result.detail == detail
    assert result.score == (detail == "")


def test_text_outside_the_tags_can_be_allowed():
    assert form.judge_tags(f"So: {GOOD}.", nothing_outside=False).score == 1
    assert form.judge_tags("<answer>5</answer>", tags=["answer"]).score == 1


@pytest.mark.parametrize(
    ("num_words", "score"),
    [(0, 0.0), (6, 0.0), (7, 0.25), (9, 0.75), (10, 1.0), (20, 1.0), (21, 0.75), (24, 0.0)],
)
def test_the_score_falls_linearly_outside_the_length_bounds(num_words, score):
    result = form.judge_length("word " * num_words, least=10, most=20, tolerance=4)
    assert result.score == score
    assert result.outcome is (RewardOutcome.PASS if score == 1 else RewardOutcome.WRONG)

import time
from inspect import signature
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.errors import RewardError
from streamrl.rewards.kinds.rules import MATCHER_BY_SOURCE, MATCHERS, find_matcher
from streamrl.user_code.reward_result import RewardOutcome, RewardResult

TRUTHS = {"choice": "B"}
QUICK = [name for name, rule in MATCHERS.items() if not rule.may_hang]
PIECES = [
    *("\\boxed{", "\\boxed ", "{", "}", "#### ", "Answer: ", "answer is ", "B", "1", ",", ".", "="),
    *("\\frac", "\\sqrt", "\\text{ ", "$", "/", "-", " ", "\n", "<think>", "</think>", "\\", "("),
]


def judge(name, completion):
    return MATCHERS[name].judge_completion(completion, TRUTHS.get(name, "34"))


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("openai/gsm8k", "gsm8k"),
        ("lighteval/MATH", "math"),
        ("math_dapo", "dapo_math"),
        ("aime2024", "dapo_math"),
        ("numina_olympiads", "symbolic"),
    ],
)
def test_a_data_source_selects_its_matcher(source, name):
    assert find_matcher(source) is MATCHERS[name]


@pytest.mark.parametrize("source", ["", "codecontests", "AIME", "openai/gsm8k2", "math_other"])
def test_an_unknown_data_source_is_named(source):
    with pytest.raises(RewardError, match=f"data_source {source!r} has no default rule; known:"):
        find_matcher(source)


@pytest.mark.parametrize("name", QUICK)
@given(completion=st.text() | st.lists(st.sampled_from(PIECES), max_size=30).map("".join))
def test_matchers_accept_any_completion(name, completion):
    result = judge(name, completion)
    assert isinstance(result, RewardResult)
    assert result.outcome in (RewardOutcome.PASS, RewardOutcome.WRONG)
    assert -1 <= result.score <= 1


@pytest.mark.parametrize("name", QUICK)
def test_a_completion_of_a_million_characters_takes_less_than_a_second(name):
    for piece in PIECES:
        half = piece * (500_000 // len(piece))
        started = time.process_time()
        judge(name, f"{half} answer is {half} \\boxed{{{half}}}")
        assert time.process_time() - started < 1, piece


def test_the_reference_names_every_rule_option_and_source():
    page = (Path(__file__).parents[3] / "docs" / "rewards_reference.md").read_text()
    options = {
        name for rule in MATCHERS.values() for name in signature(rule.judge_completion).parameters
    }
    for name in {*MATCHERS, *MATCHER_BY_SOURCE, *options} - {"completion", "truth"}:
        assert f"`{name}`" in page

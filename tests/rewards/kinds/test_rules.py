import time
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.config.run_config import load_config
from streamrl.errors import ConfigError, RewardError
from streamrl.rewards.interface.reward import RewardSpec
from streamrl.rewards.kinds.rules import parse_number
from streamrl.rewards.registry import REWARD_KINDS
from streamrl.user_code.reward_result import RewardOutcome
from tests.rewards.judged import prompt


def build(kind, **options):
    return REWARD_KINDS[kind].create_reward(
        RewardSpec(kind, REWARD_KINDS[kind].options_type(**options))
    )


EXACT, NUMERIC = build("exact"), build("numeric")


async def score_one(reward, completion, ground_truth=None):
    (result,) = await reward.score(prompt(ground_truth), [completion])
    assert result.outcome is (RewardOutcome.PASS if result.score else RewardOutcome.WRONG)
    return result.score


@pytest.mark.parametrize(
    ("completion", "ground_truth"),
    [
        *(("42", "42"), ("  42\n", "42 "), ("42", 42), ("two words", "two words")),
        *(("42.0", "42"), ("the answer is 42", "42"), ("Yes", "yes"), ("", "42")),
    ],
)
async def test_exact_compares_text_without_surrounding_whitespace(completion, ground_truth):
    is_equal = completion.strip() == str(ground_truth).strip()
    assert await score_one(EXACT, completion, ground_truth) == is_equal


EQUAL = [
    *(("42", "42"), ("042", 42), ("42.000", "42"), ("42.", "42"), ("+42", "42")),
    *(("1,000,000.5", "1000000.5"), ("1000", "1,000"), ("0.1", 0.1), (".1", "1/10")),
    *(("1/3", "2/6"), ("1e3", "1000"), ("1e-1", "0.1")),
]
UNEQUAL = [
    *(("-42", "42"), ("12,34", "1234"), ("0.333333333333333333", "1/3"), ("1/0", "0")),
    *(("0.1000000000000000055511151231257827", 0.1), ("the answer is 42", "42"), ("42 43", "42")),
    *(("", "0"), ("nan", "0"), ("inf", "0"), ("0x2a", "42"), ("4_2", "42"), ("\u0664\u0662", "42")),
    *(("1e999999999", "42"), ("9" * 100_000, "42"), ("-" * 5000, "42"), ("1," * 499 + "1", "42")),
]


@pytest.mark.parametrize(("completion", "ground_truth"), [*EQUAL, *UNEQUAL])
async def test_numeric_compares_exact_numbers(completion, ground_truth):
    started = time.process_time()
    score = await score_one(NUMERIC, completion, ground_truth)
    assert score == ((completion, ground_truth) in EQUAL)
    assert time.process_time() - started < 1


@given(st.decimals(allow_nan=False, allow_infinity=False, places=6))
def test_every_decimal_survives_a_round_trip_with_or_without_commas(value):
    assert parse_number(f"{value:f}") == Fraction(value)
    assert parse_number(f"{value:,f}") == Fraction(value)


@given(st.text(max_size=30))
def test_parse_number_accepts_any_text(text):
    number = parse_number(text)
    assert number is None or isinstance(number, Fraction)


async def test_the_answer_is_the_last_match_of_the_pattern():
    reward = build("numeric", pattern="#### (.*)")
    assert await score_one(reward, "#### 3\nno, wait\n#### 1,000 ", "1000") == 1.0
    assert await score_one(reward, "1000", "1000") == 0.0
    words = build("exact", pattern=r"[a-z]+")
    assert await score_one(words, "ANSWER: one two!", "two") == 1.0


async def test_regex_rewards_the_form():
    reward = build("regex", pattern=r"(?s)\A<think>.*</think>\s*<answer>.*</answer>\Z")
    assert await score_one(reward, "<think>\n2+3\n</think> <answer>5</answer>") == 1.0
    assert await score_one(reward, "so: <think></think><answer>5</answer>") == 0.0
    anywhere = build("regex", pattern="5|6")
    assert await score_one(anywhere, "it is 6") == 1.0


@pytest.mark.parametrize(
    "rule",
    ["regex", *(pytest.param(rule, marks=pytest.mark.slow) for rule in ("exact", "numeric"))],
)
async def test_a_search_timeout_affects_only_its_completion(rule):
    pattern = r"(?:5|55)+[yz]"
    reward = build(rule, pattern=f"({pattern[:-4]})[yz]" if rule == "numeric" else pattern)
    truth = "5" if rule == "numeric" else "5y"
    slow, right = await reward.score(prompt(truth), ["5" * 40 + "!", "5y"])
    assert (slow.score, slow.outcome, slow.answer) == (0.0, RewardOutcome.TIMEOUT, None)
    assert slow.detail.endswith("took more than 0.5 s on a completion of 41 characters")
    assert (right.score, right.outcome) == (1.0, RewardOutcome.PASS)


def test_an_invalid_pattern_is_refused_at_start():
    with pytest.raises(ConfigError, match=r"rewards.pattern=\(: "):
        build("regex", pattern="(")


@pytest.mark.parametrize("ground_truth", [None, 1.5, True, ["42"], {"target": "42"}, "", " \n"])
async def test_exact_refuses_a_ground_truth_that_is_not_text_or_an_int(ground_truth):
    refusal = "ground_truth must be an answer as text or an int, "
    with pytest.raises(RewardError, match=refusal):
        EXACT.validate_prompt(prompt(ground_truth))
    for completion in ("42", ""):
        with pytest.raises(RewardError, match=refusal):
            await score_one(EXACT, completion, ground_truth)


@pytest.mark.parametrize(
    "ground_truth", [None, "", "about 5", True, float("nan"), float("inf"), ["5"], "1/0"]
)
async def test_numeric_refuses_a_ground_truth_without_a_number(ground_truth):
    with pytest.raises(RewardError, match="ground_truth must be a number, is"):
        NUMERIC.validate_prompt(prompt(ground_truth))
    with pytest.raises(RewardError, match="ground_truth must be a number, is"):
        await score_one(NUMERIC, "42", ground_truth)


@pytest.mark.parametrize(
    "completion",
    [
        *("So it is 34.\nAnswer: 34", "Answer: $34$.", "answer: 34.", "Answer: $\\boxed{34}$"),
        *("**Answer:** 34", "**Answer: 34**", "Answer: 12, no.\nAnswer: \\boxed{34}"),
        *("**Answer**: 34", "Answer : \\(34\\), since x."),
        *("Answer: \\boxed{ 34 }\nThe answer: is above.", "Answer: 34^\\circ"),
    ],
)
async def test_the_dapo_recipe_extracts_answers_in_common_formats(completion):
    (config,) = load_config(Path("configs/dapo_qwen2.5_32b_math.yaml")).rewards
    reward = build("numeric", **config.options)
    assert await score_one(reward, completion, "34") == 1.0
    assert await score_one(reward, completion, "12") == 0.0

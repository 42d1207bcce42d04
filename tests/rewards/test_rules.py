import time
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.config import load_config
from streamrl.errors import ConfigError, RewardError
from streamrl.messages import Prompt
from streamrl.rewards import RewardConfig
from streamrl.rewards.exact import ExactReward
from streamrl.rewards.numeric import NumericReward, parse_number
from streamrl.rewards.pattern import PatternReward


def prompt(ground_truth=None):
    return Prompt("0:0:0", np.array([1], np.int32), ground_truth=ground_truth)


async def score_one(reward, completion, ground_truth=None):
    (score,) = await reward.score(prompt(ground_truth), [completion])
    return score


@pytest.mark.parametrize(
    ("completion", "ground_truth", "score"),
    [
        ("42", "42", 1.0),
        ("  42\n", "42 ", 1.0),
        ("42", 42, 1.0),
        ("42.0", "42", 0.0),
        ("the answer is 42", "42", 0.0),
        ("Yes", "yes", 0.0),
        ("", "42", 0.0),
        ("", "", 1.0),
        ("two words", "two words", 1.0),
    ],
)
async def test_exact_compares_trimmed_text(completion, ground_truth, score):
    assert await score_one(ExactReward(RewardConfig("exact")), completion, ground_truth) == score


@pytest.mark.parametrize(
    ("completion", "ground_truth", "score"),
    [
        ("42", "42", 1.0),
        ("042", 42, 1.0),
        ("42.000", "42", 1.0),
        ("42.", "42", 1.0),
        ("+42", "42", 1.0),
        ("-42", "42", 0.0),
        ("1,000,000.5", "1000000.5", 1.0),
        ("1000", "1,000", 1.0),
        ("12,34", "1234", 0.0),
        ("0.1", 0.1, 1.0),
        (".1", "1/10", 1.0),
        ("1/3", "2/6", 1.0),
        ("0.333333333333333333", "1/3", 0.0),
        ("1e3", "1000", 1.0),
        ("1e-1", "0.1", 1.0),
        ("1/0", "0", 0.0),
        ("0.1000000000000000055511151231257827", 0.1, 0.0),
        ("the answer is 42", "42", 0.0),
        ("42 43", "42", 0.0),
        ("", "0", 0.0),
        ("nan", "0", 0.0),
        ("inf", "0", 0.0),
        ("0x2a", "42", 0.0),
        ("4_2", "42", 0.0),
        ("\u0664\u0662", "42", 0.0),
        ("1e999999999", "42", 0.0),
        ("9" * 100_000, "42", 0.0),
        ("-" * 5000, "42", 0.0),
        ("1," * 499 + "1", "42", 0.0),
    ],
)
async def test_numeric_compares_exact_numbers(completion, ground_truth, score):
    reward = NumericReward(RewardConfig("numeric"))
    started = time.process_time()
    assert await score_one(reward, completion, ground_truth) == score
    assert time.process_time() - started < 1


@given(st.fractions())
def test_every_fraction_reads_back_as_itself(value):
    assert parse_number(str(value)) == value


@given(st.decimals(allow_nan=False, allow_infinity=False, places=6))
def test_every_decimal_reads_back_with_or_without_commas(value):
    assert parse_number(f"{value:f}") == Fraction(value)
    assert parse_number(f"{value:,f}") == Fraction(value)


@given(st.text(max_size=30))
def test_no_text_breaks_the_number_reader(text):
    number = parse_number(text)
    assert number is None or isinstance(number, Fraction)


async def test_a_pattern_says_where_the_answer_stands_and_the_last_one_counts():
    reward = NumericReward(RewardConfig("numeric", pattern="#### (.*)"))
    assert await score_one(reward, "#### 3\nno, wait\n#### 1,000 ", "1000") == 1.0
    assert await score_one(reward, "1000", "1000") == 0.0
    words = ExactReward(RewardConfig("exact", pattern=r"[a-z]+"))
    assert await score_one(words, "ANSWER: one two!", "two") == 1.0


async def test_a_group_that_took_no_part_in_the_match_is_no_answer():
    reward = ExactReward(RewardConfig("exact", pattern="(a)|b"))
    assert await score_one(reward, "b", "") == 0.0


async def test_regex_rewards_the_form():
    reward = PatternReward(
        RewardConfig("regex", pattern=r"(?s)\A<think>.*</think>\s*<answer>.*</answer>\Z")
    )
    assert await score_one(reward, "<think>\n2+3\n</think> <answer>5</answer>") == 1.0
    assert await score_one(reward, "so: <think></think><answer>5</answer>") == 0.0
    anywhere = PatternReward(RewardConfig("regex", pattern="5|6"))
    assert await score_one(anywhere, "it is 6") == 1.0


async def test_a_search_that_explodes_is_an_error_not_a_hang():
    reward = PatternReward(RewardConfig("regex", pattern=r"(?:x|xx)+[yz]"))
    with pytest.raises(RewardError, match=r"took more than 0.5 s on a completion of 41 "):
        await score_one(reward, "x" * 40 + "!")


def test_a_broken_pattern_is_refused_at_start():
    with pytest.raises(ConfigError, match=r"rewards.pattern=\(: "):
        PatternReward(RewardConfig("regex", pattern="("))


@pytest.mark.parametrize("ground_truth", [None, 1.5, True, ["42"], {"target": "42"}])
async def test_exact_refuses_a_ground_truth_it_cannot_compare(ground_truth):
    reward = ExactReward(RewardConfig("exact"))
    with pytest.raises(RewardError, match="ground_truth must be text or an int, is"):
        reward.check(prompt(ground_truth))
    with pytest.raises(RewardError, match="ground_truth must be text or an int, is"):
        await score_one(reward, "42", ground_truth)


@pytest.mark.parametrize(
    "ground_truth", [None, "", "about 5", True, float("nan"), float("inf"), ["5"], "1/0"]
)
async def test_numeric_refuses_a_ground_truth_that_is_no_number(ground_truth):
    reward = NumericReward(RewardConfig("numeric"))
    with pytest.raises(RewardError, match="ground_truth must be a number, is"):
        reward.check(prompt(ground_truth))
    with pytest.raises(RewardError, match="ground_truth must be a number, is"):
        await score_one(reward, "42", ground_truth)


def test_good_ground_truths_pass_the_check():
    ExactReward(RewardConfig("exact")).check(prompt("x"))
    NumericReward(RewardConfig("numeric")).check(prompt("1,000"))
    PatternReward(RewardConfig("regex", pattern="x")).check(prompt(None))


@pytest.mark.parametrize(
    "completion",
    [
        "So it is 34.\nAnswer: 34",
        "Answer: $34$.",
        "answer: 34.",
        "Answer: $\\boxed{34}$",
        "**Answer:** 34",
        "**Answer: 34**",
        "Answer: 12, no.\nAnswer: \\boxed{34}",
        "**Answer**: 34",
        "Answer : \\(34\\), since x.",
        "Answer: \\boxed{ 34 }\nThe answer: is above.",
        "Answer: 34^\\circ",
    ],
)
async def test_the_recipe_for_dapo_finds_an_answer_as_models_write_it(completion):
    (config,) = load_config(Path("configs/dapo_qwen2.5_32b_math.yaml")).rewards
    assert await score_one(NumericReward(config), completion, "34") == 1.0
    assert await score_one(NumericReward(config), completion, "12") == 0.0

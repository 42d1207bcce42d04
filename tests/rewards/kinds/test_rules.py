"""Rules that score answers: patterns and numbers, and matchers of mathematics."""

import time
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from inspect import signature
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.config.run_config import load_config
from streamrl.errors import ConfigError, RewardError
from streamrl.rewards.interface.answers import AnswerPattern
from streamrl.rewards.interface.config import RewardConfig
from streamrl.rewards.interface.reward import RewardSpec
from streamrl.rewards.kinds import math_answers
from streamrl.rewards.kinds.rules import (
    KIND_BY_SOURCE,
    MATCHERS,
    find_kind,
    parse_number,
)
from streamrl.rewards.kinds.symbolic import judge_symbolic
from streamrl.rewards.registry import REWARD_KINDS, build_rewards
from streamrl.user_code.reward_result import RewardOutcome, RewardResult
from tests.rewards.judged import judge, prompt
from tests.rewards.kinds.answers import ANSWERS, RULES


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


async def test_a_search_timeout_affects_only_its_completion():
    reward = build("regex", pattern=r"(?:5|55)+[yz]")
    slow, right = await reward.score(prompt("5y"), ["5" * 40 + "!", "5y"])
    assert (slow.score, slow.outcome, slow.answer) == (0.0, RewardOutcome.TIMEOUT, None)
    assert slow.detail.endswith("took more than 0.5 s on a completion of 41 characters")
    assert (right.score, right.outcome) == (1.0, RewardOutcome.PASS)


def test_concurrent_searches_do_not_use_up_the_time_of_each_other():
    pattern = AnswerPattern(r"(?s)```\n(.*?)\n```\s*$", "rewards[0].extract")
    text = "```\nprint(1)\n```\n" * 600 + "end"
    with ThreadPoolExecutor(16) as threads:
        assert [*threads.map(pattern.find_last, [text] * 16)] == [None] * 16


def test_an_invalid_pattern_is_refused_at_start():
    with pytest.raises(ConfigError, match=r"rewards\[0\].pattern=\(: "):
        build("regex", pattern="(")


NO_TEXT = [None, 1.5, True, ["42"], {"target": "42"}, "", " \n"]
NO_NUMBER = [None, "", "about 5", True, float("nan"), float("inf"), ["5"], "1/0"]


@pytest.mark.parametrize(
    ("reward", "refusal", "truths"),
    [(EXACT, "an answer as text or an int, ", NO_TEXT), (NUMERIC, "a number, is", NO_NUMBER)],
)
async def test_a_ground_truth_that_no_answer_equals_is_refused(reward, refusal, truths):
    for truth in truths:
        with pytest.raises(RewardError, match=f"ground_truth must be {refusal}"):
            reward.validate_prompt(prompt(truth))
        for completion in ("42", ""):
            with pytest.raises(RewardError, match=f"ground_truth must be {refusal}"):
                await score_one(reward, completion, truth)


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
    lines = ("Answer: $34$", "answer: x = 34", r"\boxed{34}", "Answer: 34 cm")
    assert {math_answers.judge_dapo_math(line, "5").answer for line in lines} == {"34"}


@pytest.mark.parametrize("rule", ["gsm8k", "math", "dapo_math"])
@pytest.mark.parametrize("truth", NO_TEXT)
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
        (r"a = \frac12 + \sqrt3", r"\frac{1}{2}+\sqrt{3}"),
        (r"the area is $\mbox{about }7$ square inches", "about7"),
        (r"1,234,567 \text{ meters}", "1234567"),
    ],
)
def test_dapo_math_normalizes_answers_like_minerva(text, form):
    assert math_answers.normalize_answer(text) == form


@pytest.mark.parametrize(
    ("num_words", "score"),
    [(0, 0.0), (6, 0.0), (7, 0.25), (9, 0.75), (10, 1.0), (20, 1.0), (21, 0.75), (24, 0.0)],
)
async def test_the_score_falls_linearly_outside_the_length_bounds(num_words, score):
    options = {"least": 10, "most": 20, "tolerance": 4}
    config = RewardConfig("length", options=options)
    outcome = "pass" if score == 1 else "wrong"
    assert await judge(config, prompt(None), "word " * num_words) == [(score, outcome)]


PIECES = [
    *("\\boxed{", "\\boxed ", "{", "}", "#### ", "Answer: ", "answer is ", "B", "1", ",", ".", "="),
    *("\\frac", "\\sqrt", "\\text{ ", "$", "/", "-", " ", "\n", "<think>", "</think>", "\\", "("),
]


def judge_34(name, completion):
    return MATCHERS[name].judge_completion(completion, "34")


@pytest.mark.parametrize("source", ["", "AIME", "openai/gsm8k2", "math_other"])
def test_a_data_source_selects_its_rule_and_an_unknown_one_is_named(source):
    assert find_kind("lighteval/MATH") == "math"
    with pytest.raises(RewardError, match=f"data_source {source!r} has no default rule; known:"):
        find_kind(source)


@pytest.mark.parametrize("name", MATCHERS)
@given(completion=st.text() | st.lists(st.sampled_from(PIECES), max_size=30).map("".join))
def test_matchers_accept_any_completion(name, completion):
    result = judge_34(name, completion)
    assert isinstance(result, RewardResult)
    assert result.outcome in (RewardOutcome.PASS, RewardOutcome.WRONG)
    assert -1 <= result.score <= 1


@pytest.mark.parametrize("name", MATCHERS)
def test_a_completion_of_a_million_characters_takes_less_than_a_second(name):
    for piece in PIECES:
        half = piece * (500_000 // len(piece))
        started = time.process_time()
        judge_34(name, f"{half} answer is {half} \\boxed{{{half}}}")
        assert time.process_time() - started < 1, piece


def test_the_reference_names_every_rule_option_and_source():
    page = (Path(__file__).parents[3] / "docs" / "rewards_reference.md").read_text()
    options = {
        name for rule in MATCHERS.values() for name in signature(rule.judge_completion).parameters
    }
    for name in {*MATCHERS, *KIND_BY_SOURCE, *options} - {"completion", "truth"}:
        assert f"`{name}`" in page


@pytest.mark.parametrize(
    ("completion", "truth", "score"),
    [
        (r"\boxed{1+x}", "x+1", 1),
        (r"\boxed{1+x}", "$x+1$", 1),
        (r"\boxed{1+x}", r"\boxed{x+1}", 1),
        (r"So it is $\frac{2}{4}$.", "0.5", 1),
        ("The answer is 34.", 34, 1),
        (r"\boxed{x+2}", "x+1", 0),
        (r"\boxed{0.33}", r"\frac{1}{3}", 0),
        ("", "7", 0),
    ],
)
def test_answers_are_compared_as_mathematics(completion, truth, score):
    assert judge_symbolic(completion, truth).score == score


def test_an_integer_too_long_to_print_is_scored():
    assert judge_symbolic(r"\boxed{10^{5000}}", "7").score == 0
    assert judge_symbolic(r"\boxed{10^{5000}}", r"10^{5000}").score == 1


def test_a_ground_truth_that_cannot_be_parsed_is_an_error():
    with pytest.raises(RewardError, match="cannot be parsed by math-verify: "):
        judge_symbolic("7", r"\boxed{}")
    with pytest.raises(RewardError, match="must be an answer as text or an int"):
        math_answers.validate_symbolic_truth(None)
    for prose in ("the cat sat", r"\boxed{\text{The set of all even numbers}}"):
        with pytest.raises(RewardError, match="ground_truth is prose"):
            judge_symbolic(prose, prose)
    for mathematics in (r"\frac{\sin x}{\cos x}+\sqrt{2}", r"3 \text{ cm}", "12 dollars", "x or y"):
        assert math_answers.validate_symbolic_truth(mathematics) == mathematics


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("gsm8k", {"method": "loose"}, r"rewards\[0\].method=loose: must be one of"),
        ("length", {"least": 3, "most": 2}, r"rewards\[0\].most=2"),
        ("choice", {}, r"rewards\[0\].kind=choice: no such kind; use kind exact with pattern: "),
        ("length", {"unit": "tokens"}, r"rewards\[0\].unit=tokens"),
    ],
)
def test_invalid_rule_options_are_named(kind, options, words):
    with pytest.raises(ConfigError, match=words):
        build_rewards([RewardConfig(kind, options=options)])


@pytest.mark.slow
async def test_endless_parsing_is_a_timeout():
    config = RewardConfig("symbolic", options={"timeout_s": 3.0, "memory_gib": 0.5})
    (endless,) = await judge(config, prompt("x+1"), "\\boxed{10^{10^{10^{10}}}}")
    assert endless in [(0.0, "memory"), (0.0, "timeout")]


async def test_a_rule_is_a_kind_with_its_options():
    flexible = RewardConfig("gsm8k", options={"method": "flexible"})
    results = await judge(flexible, prompt("12"), "it is 12", "it is 13")
    assert results == [(1.0, "pass"), (0.0, "wrong")]


async def test_auto_selects_the_rule_by_data_source():
    auto = RewardConfig("auto")
    assert await judge(auto, prompt("7", "openai/gsm8k"), "#### 7") == [(1.0, "pass")]
    assert await judge(auto, prompt("7", "aime2024"), "Answer: 8") == [(-1.0, "wrong")]
    row = prompt("x+1", "numina_olympiads")
    assert await judge(auto, row, "\\boxed{1+x}") == [(1.0, "pass")]
    with pytest.raises(ConfigError, match=r"reward auto: data_source 'mine' has no default rule"):
        build_rewards([auto]).check_prompts([prompt("7", "mine")])


async def test_an_unusable_ground_truth_is_an_error_during_the_run():
    with pytest.raises(RewardError, match="reward gsm8k, uid 0:4:0: ground_truth"):
        await build_rewards([RewardConfig("gsm8k")]).judge_texts(prompt("seven"), ["#### 7"])

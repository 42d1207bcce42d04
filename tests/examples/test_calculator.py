"""The calculator task: its tool, its score and its demonstrations."""

import random
from pathlib import Path

import numpy as np
import pytest

from examples.calculator import training
from examples.calculator.calculator import Calculator
from examples.calculator.problems import make_rows
from examples.toy_models.rows import get_question
from streamrl.config.run_config import load_config
from streamrl.environments.hosts.environment_host import load_user_class
from streamrl.environments.interface import CallOutcome, EpisodeSummary
from streamrl.environments.tool_calls.call_formats import make_call_format
from streamrl.messages import Prompt
from tests.examples.turns import (
    check_demonstrations,
    make_renderer,
)

RECIPE = "configs/grpo_calculator.yaml"
PRODUCT = Prompt("0:0:0", np.array([1], np.int32), ground_truth="29842")


def score_answer(*turns: str) -> float:
    calculator = Calculator()
    calculator.reset(PRODUCT)
    messages = [{"role": "assistant", "content": text} for text in turns]
    return calculator.score(EpisodeSummary(messages, [0.0] * len(turns), "stop"))


def test_every_ground_truth_is_the_product():
    for part in make_rows(seed=0).values():
        for row in part:
            first, second = map(int, get_question(row).split("*"))
            assert row["reward_model"]["ground_truth"] == str(first * second)


@pytest.mark.parametrize(
    ("expression", "value"),
    [("347*86", "29842"), ("12*(3+4)", "84"), (" 7 - 10 ", "-3"), ("5", "5"), ("2+3*4", "14")],
)
def test_the_tool_works_out_an_expression(expression: str, value: str):
    assert Calculator().calculate(expression) == value


WRONG = [
    *("", " ", "347*", "(3", "3)", "7 2", "2(3)", "3x", "86!", "1e9", "0x19", "2.5", "True"),
    *("9**9", "9//2", "9/2", "-7", "007", "__import__('os').abort()", "(lambda:25)()"),
    *("(" * 19 + "9" + ")" * 21, "9*" * 100_000 + "9", "\u0662*2", "1,2", "2\n*3"),
]


@pytest.mark.parametrize("expression", WRONG, ids=lambda text: repr(text)[:20])
def test_the_tool_refuses_everything_else(expression: str):
    with pytest.raises((ValueError, SyntaxError)):
        Calculator().calculate(expression)


def test_the_last_turn_is_scored_and_no_earlier_one():
    assert score_answer("29842") == score_answer("", "29842") == 1.0
    assert score_answer("29842", "") == score_answer("29843") == score_answer() == 0.0
    assert score_answer("29842 or so") == score_answer("1", "029842") == 0.0


def test_demonstrations_are_what_an_episode_renders():
    rng, rows = random.Random(0), make_rows(seed=0)["train"][:50]
    tools = load_user_class(load_config(Path(RECIPE)).environment).description.tools
    demonstrations = [training.demonstrate(row, rng) for row in rows]
    check_demonstrations(demonstrations, num_prompt=1, tools=tools)


def test_the_recipe_finds_the_calls_of_the_demonstrations():
    config = load_config(Path(RECIPE))
    settings = config.environment
    assert settings.call_pattern == training.CALL_PATTERN.pattern
    assert settings.max_turns == training.MAX_TURNS
    assert config.generator.max_new_tokens == training.MAX_NEW_TOKENS
    tokenizer = make_renderer().tokenizer
    call_format = make_call_format(settings.call_format, tokenizer, pattern=settings.call_pattern)
    tools = load_user_class(settings).description.tools
    turn = [*tokenizer("<call>347*86</call>").input_ids, tokenizer.eos_token_id]
    assert len(turn) <= config.generator.max_new_tokens
    reply = call_format.parse(turn, tools)
    (call,) = reply.calls
    assert (reply.text, call.name, call.outcome) == ("", "calculate", CallOutcome.OK)
    assert call.arguments == {"expression": "347*86"}

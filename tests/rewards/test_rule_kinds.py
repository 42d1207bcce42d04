import numpy as np
import pytest

from streamrl.errors import ConfigError, RewardError
from streamrl.messages import Prompt
from streamrl.rewards.interface.config import RewardConfig
from streamrl.rewards.registry import build_rewards
from tests.rewards.judged import judge


def prompt(truth, source=""):
    return Prompt("0:0:0", np.array([1], np.int32), ground_truth=truth, data_source=source)


@pytest.mark.parametrize(
    ("kind", "options", "truth", "right", "wrong", "low"),
    [
        ("gsm8k", {}, "1000", "so #### 1,000", "1000", 0.0),
        ("gsm8k", {"method": "flexible"}, "12", "it is 12", "it is 13", 0.0),
        ("math", {}, "\\frac{1}{2}", "thus \\boxed{\\frac12}", "\\boxed{2}", 0.0),
        ("dapo_math", {}, "34", "Answer: 34", "Answer: 35", -1.0),
        ("choice", {}, "B", "The answer is (B).", "The answer is (C).", 0.0),
        ("tags", {"tags": ["a"]}, None, "<a>x</a>", "<a></a>", 0.0),
        ("length", {"most": 2, "tolerance": 1}, None, "two words", "these are three", 0.0),
    ],
)
async def test_rules_are_kinds_with_their_options(kind, options, truth, right, wrong, low):
    config = RewardConfig(kind, options=options)
    results = await judge(config, prompt(truth), right, wrong)
    assert results == [(1.0, "pass"), (low, "wrong")]


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("gsm8k", {"method": "loose"}, r"rewards\[0\].method=loose: must be one of"),
        ("choice", {"letters": "ab"}, r"rewards\[0\].letters=ab"),
        ("tags", {"tags": []}, r"rewards\[0\].tags="),
        ("length", {"unit": "tokens"}, r"rewards\[0\].unit=tokens"),
    ],
)
def test_invalid_rule_options_are_named(kind, options, words):
    with pytest.raises(ConfigError, match=words):
        build_rewards([RewardConfig(kind, options=options)])


@pytest.mark.slow
async def test_symbolic_compares_mathematics_and_endless_parsing_is_a_timeout():
    config = RewardConfig("symbolic", options={"timeout_s": 60.0, "memory_gib": 0.5})
    results = await judge(config, prompt("x+1"), "\\boxed{1+x}", "\\boxed{x}")
    assert results == [(1.0, "pass"), (0.0, "wrong")]
    config = RewardConfig("symbolic", options={"timeout_s": 3.0, "memory_gib": 0.5})
    (endless,) = await judge(config, prompt("x+1"), "\\boxed{10^{10^{10^{10}}}}")
    assert endless in [(0.0, "memory"), (0.0, "timeout")]


async def test_auto_selects_the_rule_by_data_source():
    auto = RewardConfig("auto")
    assert await judge(auto, prompt("7", "openai/gsm8k"), "#### 7") == [(1.0, "pass")]
    assert await judge(auto, prompt("7", "aime2024"), "Answer: 8") == [(-1.0, "wrong")]
    row = prompt("x+1", "numina_olympiads")
    assert await judge(auto, row, "\\boxed{1+x}") == [(1.0, "pass")]
    with pytest.raises(ConfigError, match=r"reward auto: data_source 'mine' has no default rule"):
        build_rewards([auto]).check_prompts([prompt("7", "mine")])


async def test_an_unusable_ground_truth_is_an_error_during_the_run():
    with pytest.raises(RewardError, match="reward gsm8k, uid 0:0:0: ground_truth"):
        await build_rewards([RewardConfig("gsm8k")]).judge_texts(prompt("seven"), ["#### 7"])

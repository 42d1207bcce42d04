"""Kind `reasoning_gym`: the dataset that made a row judges its answers."""

import asyncio
import pickle
import sys
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from streamrl.data.config import DataConfig
from streamrl.data.prompt_file import load_data_rows
from streamrl.errors import ConfigError, RewardError
from streamrl.messages import Prompt
from streamrl.rewards.interface.config import RewardConfig
from streamrl.rewards.kinds.reasoning_gym import judge_answer
from streamrl.rewards.registry import build_rewards
from tests.rewards.judged import started_rewards

IDS = np.array([1], np.int32)


def make_prompts(dataset, size=2, **options):
    """Return the first tasks of a dataset as prompts."""
    entry = {"kind": "reasoning_gym", "dataset": dataset, "size": size, "options": options}
    (file,) = DataConfig(train=entry).train_files
    return [
        Prompt(
            f"0:{row.index}:0",
            IDS,
            messages=row.messages,
            ground_truth=row.ground_truth,
            extra_info=row.extra_info,
        )
        for row in load_data_rows(file)
    ]


def make_config(**options):
    return RewardConfig("reasoning_gym", options={"replicas": 1, **options})


async def judge(rewards, prompt, *completions):
    results = (await rewards.judge_texts(prompt, completions)).components["reasoning_gym"]
    return [(result.score, result.outcome.value, result.answer) for result in results]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tagged():
    """Started reward that reads the answer from a tag; one worker judges all datasets."""
    async with started_rewards(make_config(pattern="<answer>(.*?)</answer>")) as rewards:
        yield rewards


def tag(answer):
    return f"well, <answer> {answer} </answer>"


@pytest.mark.asyncio(loop_scope="module")
async def test_the_datasets_judge_scores_an_answer(tagged):
    for prompt in make_prompts("chain_sum"):
        truth = prompt.ground_truth
        completions = (tag(truth), tag("x"), truth, tag("1") + tag(truth))
        assert await judge(tagged, prompt, *completions) == [
            (1.0, "pass", truth),
            (0.0, "wrong", "x"),
            (0.0, "wrong", None),
            (1.0, "pass", truth),
        ]


@pytest.mark.asyncio(loop_scope="module")
async def test_each_member_of_a_composite_judges_its_tasks(tagged):
    members: list[dict[str, Any]] = [
        {"name": name, "weight": 1, "config": {}} for name in ("chain_sum", "leg_counting")
    ]
    prompts = make_prompts("composite", size=6, datasets=members)
    results = [await judge(tagged, prompt, tag(prompt.ground_truth)) for prompt in prompts]
    assert [score for ((score, *_),) in results] == [1.0] * 6


@pytest.mark.asyncio(loop_scope="module")
async def test_a_row_whose_task_is_another_now_has_no_score(tagged):
    (prompt, other) = make_prompts("chain_sum")
    forged = Prompt("0:0:0", IDS, messages=other.messages, extra_info=prompt.extra_info)
    message = "chain_sum task 0: made again, it asks another question"
    with pytest.raises(RewardError, match=message) as caught:
        await judge(tagged, forged, tag("1"))
    assert caught.value.is_final
    assert pickle.loads(pickle.dumps(caught.value)).cause == "reward_error"


class Judge:
    """Dataset that scores as told."""

    def __init__(self, score):
        self._score = score

    def score_answer(self, answer, entry):
        return self._score(answer)


TASK = {"question": "?", "answer": "right", "metadata": {}}


def judge_with(score, answer="odd", **options):
    return judge_answer(Judge(score), TASK, answer, **{"pass_score": 1.0, **options})


def test_a_judge_that_raises_on_its_own_answer_fails_and_the_text_is_not_wrong():
    with pytest.raises(ZeroDivisionError):
        judge_with(lambda answer: 1 / 0)
    result = judge_with(lambda answer: {"right": 1.0}[answer])
    assert (result.score, result.outcome.value) == (0.0, "wrong")
    assert result.detail == "the judge cannot read it: KeyError: 'odd'"


@pytest.mark.parametrize("value", [None, float("nan"), "1"])
def test_a_score_that_is_no_number_is_an_error(value):
    assert judge_with(lambda answer: value).endswith("not a finite number")


def test_a_partial_score_passes_from_pass_score_on():
    results = [judge_with(lambda answer: 0.5, pass_score=least) for least in (0.5, 1.0)]
    assert [(r.score, r.outcome.value) for r in results] == [(0.5, "pass"), (0.5, "wrong")]


def test_rows_of_other_data_are_refused():
    prompt = Prompt("0:0:0", IDS, messages=({"role": "user", "content": "1+1"},))
    with pytest.raises(ConfigError, match="no task of reasoning-gym; data of kind reasoning_gym"):
        build_rewards([make_config()]).check_prompts([prompt])


def test_without_the_package_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r"run pip install 'streamrl\[reasoning_gym\]'"):
        asyncio.run(build_rewards([make_config()]).run_preflight())

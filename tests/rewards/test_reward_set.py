import asyncio
import pickle
import time
from collections import Counter

import numpy as np
import pytest
from msgspec.structs import replace

from streamrl.errors import ConfigError, RewardError
from streamrl.messages import GroupInfo, Prompt, check_column_sizes, measure_columns
from streamrl.rewards.interface.config import RewardConfig
from streamrl.rewards.interface.reward import Reward
from streamrl.rewards.metric_means import sums_to_means
from streamrl.rewards.registry import build_rewards
from streamrl.rewards.reward_set import COSTS, RewardComponent, RewardSet
from streamrl.telemetry.metric_names import find_metric
from streamrl.user_code.reward_result import RewardOutcome, RewardResult
from tests.rewards.judged import score_texts, started_rewards

PROMPT = Prompt("2:11:0", np.array([1], np.int32), ground_truth="5")
PLACED = replace(PROMPT, row_location="sums.jsonl line 12")


class FakeReward(Reward):
    """Returns fixed scores, or results, after a delay."""

    def __init__(self, values=(), *, wait_s=0.0, error=None, prompt_error=None):
        super().__init__()
        self.values, self.wait_s = values, wait_s
        self.error, self.prompt_error = error, prompt_error
        self.cancelled = False

    def validate_prompt(self, prompt):
        if self.prompt_error:
            raise RewardError(self.prompt_error)

    async def score(self, prompt, completions):
        try:
            await asyncio.sleep(self.wait_s)
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        if self.error:
            raise self.error
        return [
            value if isinstance(value, RewardResult) else RewardResult(value, outcome_of(value))
            for value in self.values
        ]


def outcome_of(value):
    return RewardOutcome.PASS if value >= 1 else RewardOutcome.WRONG


def reward_set(gates=(), **rewards):
    return RewardSet(
        [RewardComponent(name, weight, name in gates, r) for name, (weight, r) in rewards.items()]
    )


async def test_scores_are_the_weighted_sum_and_components_are_unweighted():
    rewards = reward_set(
        right=(1.0, FakeReward([1, 0])),
        form=(0.25, FakeReward([1, 1])),
        zero=(0, FakeReward([9, 9])),
    )
    columns = await score_texts(rewards, PROMPT, ["a", "b"])
    assert {name: column.tolist() for name, column in columns.items()} == {
        "reward/right": [1.0, 0.0],
        "reward/form": [1.0, 1.0],
        "reward/zero": [9.0, 9.0],
        "scores": [1.25, 0.25],
    }
    check_column_sizes(measure_columns(columns), GroupInfo((0, 0), 0, ()))
    assert rewards.component_names == ("right", "form", "zero")


async def test_a_failed_gate_makes_the_combined_score_0():
    rewards = reward_set(
        gates=("form",),
        right=(2.0, FakeReward([1, 1, 0])),
        form=(0.5, FakeReward([1, 0.5, 1])),
        fee=(-1.0, FakeReward([0, 9, 1])),
    )
    columns = await score_texts(rewards, PROMPT, ["a", "b", "c"])
    assert columns["scores"].tolist() == [2.5, 0.0, -0.5]


ABSENT = RewardResult.make_not_judged()


async def test_an_abstaining_component_is_excluded_from_the_score():
    """The score is the weighted sum of the components with a score, as in TRL."""
    rewards = reward_set(
        math=(2.0, FakeReward([ABSENT, 0.5, ABSENT])), code=(1.0, FakeReward([1.0, ABSENT, 3.0]))
    )
    columns = await score_texts(rewards, PROMPT, ["a", "b", "c"])
    assert columns["scores"].tolist() == [1.0, 1.0, 3.0]
    assert columns["reward/code"][[0, 2]].tolist() == [1.0, 3.0]
    assert np.isnan(columns["reward/math"]).tolist() == [True, False, True]
    assert rewards.drain_counts()["verdicts/not_judged"] == 3


async def test_an_abstaining_gate_is_open_and_a_completion_without_results_has_no_score():
    gate = reward_set(
        gates=["gate"],
        gate=(0.0, FakeReward([ABSENT, 0.0])),
        other=(1.0, FakeReward([2.0, 2.0])),
    )
    assert (await score_texts(gate, PROMPT, ["a", "b"]))["scores"].tolist() == [2.0, 0.0]
    abstaining = reward_set(
        a=(1.0, FakeReward([1.0, ABSENT])),
        logged=(0.0, FakeReward([1.0, 1.0])),
    )
    with pytest.raises(RewardError, match=r"completion 1 has no score: a returned None"):
        await score_texts(abstaining, PROMPT, ["a", "b"])


async def test_extra_metrics_are_summed_and_averaged():
    def results_with(*numbers):
        return [
            RewardResult(1.0, RewardOutcome.PASS, extra_metrics=tuple(metrics.items()))
            for metrics in numbers
        ]

    first = reward_set(f=(1.0, FakeReward(results_with({"acc": 1.0, "a/b": 4.0}, {"acc": 0.0}))))
    second = reward_set(f=(1.0, FakeReward(results_with({"acc": 0.0}, {"acc": -3.0}))))
    counts: Counter[str] = Counter()
    for rewards in (first, second):
        await score_texts(rewards, PROMPT, ["a", "b"])
        counts.update(rewards.drain_counts())
    assert sums_to_means(counts) == {"verdicts/pass": 4, "reward/f/acc": -0.5, "reward/f/a~b": 4.0}
    assert find_metric("reward/f/acc").name == "reward/<component>/<number>"
    assert first.drain_counts() == {}
    many = reward_set(f=(1.0, FakeReward(results_with({f"n{i}": 1.0 for i in range(999)}))))
    await score_texts(many, PROMPT, ["a"])
    assert len(sums_to_means(many.drain_counts())) == 201


async def test_a_failing_reward_raises_at_once_and_cancels_the_other_rewards():
    slow = FakeReward([1], wait_s=60)
    broken = FakeReward(error=RewardError("no answer from the judge"))
    rewards = reward_set(slow=(1.0, slow), broken=(1.0, broken))
    started = time.monotonic()
    with pytest.raises(
        RewardError, match=r"^reward broken, uid 2:11:0: no answer from the judge$"
    ) as caught:
        await score_texts(rewards, PROMPT, ["a"])
    assert time.monotonic() - started < 5
    await asyncio.sleep(0)
    assert slow.cancelled
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


async def test_cancelling_the_group_cancels_its_rewards():
    slow = FakeReward([1], wait_s=60)
    task = asyncio.create_task(score_texts(reward_set(slow=(1.0, slow)), PROMPT, ["a"]))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0)
    assert slow.cancelled


async def test_a_reward_that_cancels_itself_is_an_error_of_that_reward():
    rewards = reward_set(odd=(1.0, FakeReward(error=asyncio.CancelledError())))
    with pytest.raises(RewardError, match="reward odd, uid 2:11:0: the reward cancelled itself"):
        await score_texts(rewards, PROMPT, ["a"])


async def test_internal_errors_are_not_converted_to_reward_errors():
    rewards = reward_set(broken=(1.0, FakeReward(error=KeyError("x"))))
    with pytest.raises(KeyError):
        await score_texts(rewards, PROMPT, ["a"])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e39])
async def test_a_number_that_is_not_finite_is_an_error(bad):
    rewards = reward_set(odd=(1.0, FakeReward([1.0, bad])))
    with pytest.raises(RewardError, match=r"reward odd, uid 2:11:0: completion 1 has"):
        await score_texts(rewards, PROMPT, ["a", "b"])


async def test_a_sum_that_overflows_is_an_error():
    rewards = reward_set(big=(1e30, FakeReward([1e30])))
    with pytest.raises(RewardError, match="combined reward, uid 2:11:0: completion 0 has"):
        await score_texts(rewards, PROMPT, ["a"])


def test_check_prompts_names_the_first_row_that_a_reward_cannot_score():
    rewards = reward_set(fine=(1.0, FakeReward()), odd=(1.0, FakeReward(prompt_error="no truth")))
    message = r"^sums.jsonl line 12 \(uid 2:11:0\): reward odd: no truth$"
    with pytest.raises(ConfigError, match=message):
        rewards.check_prompts([PLACED])
    reward_set(fine=(1.0, FakeReward())).check_prompts([PLACED])


async def test_rewards_are_built_from_their_config(tmp_path):
    (tmp_path / "short.py").write_text("def f(prompt, completion): return -len(completion)")
    short = {"path": str(tmp_path / "short.py"), "function": "f"}
    async with started_rewards(
        RewardConfig("exact"),
        RewardConfig("numeric", name="value", weight=2.0),
        RewardConfig("regex", weight=0.5, options={"pattern": r"\A\d+\Z"}),
        RewardConfig("function", "short", weight=0, options=short),
    ) as rewards:
        columns = await score_texts(rewards, PROMPT, ["5", "5.0", "6", "what"])
    assert {name: column.tolist() for name, column in columns.items()} == {
        "reward/exact": [1, 0, 0, 0],
        "reward/value": [1, 1, 0, 0],
        "reward/regex": [1, 0, 1, 0],
        "reward/short": [-1, -3, -1, -4],
        "scores": [3.5, 2.0, 0.5, 0],
    }


@pytest.mark.parametrize(
    ("configs", "words"),
    [
        ([], "rewards: empty"),
        ([{"kind": "numerics"}], r"rewards\[0\].kind=numerics: .* nearest kind is numeric"),
        ([{"kind": "function"}], r"rewards\[0\].path: missing"),
        ([{"kind": "function", "options": {"path": ""}}], r"rewards\[0\].path: missing"),
        (
            [{"kind": "exact", "options": {"wieght": 2}}],
            r"rewards\[0\].wieght=2: not an option of .*; the nearest key is weight",
        ),
        ([{"kind": "exact"}, {"kind": "exact"}], "rewards.name=exact: given 2 times"),
        ([{"kind": "exact", "name": "a/b"}], r"rewards\[0\].name=a/b: letters"),
        ([{"kind": "exact", "name": "mean"}], r"rewards\[0\].name=mean: .*/mean is reserved"),
    ],
)
def test_invalid_reward_entries_are_refused(configs, words):
    with pytest.raises(ConfigError, match=words):
        build_rewards([RewardConfig(**config) for config in configs])
    with pytest.raises(ConfigError, match=words.replace("rewards", "costs", 1)):
        build_rewards([RewardConfig(**c) for c in configs], score_spec=COSTS)

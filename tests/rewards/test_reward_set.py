import asyncio
import pickle
import time

import numpy as np
import pytest

from streamrl.errors import ConfigError, DeadlineError, RewardError
from streamrl.messages import GroupInfo, Prompt, check_sizes, column_sizes
from streamrl.rewards import COSTS, Component, RewardConfig, RewardSet, ScorerConfig, build_rewards

PROMPT = Prompt("2:11:0", np.array([1], np.int32), ground_truth="5")


class FakeReward:
    """Gives the scores it is told to, when it is told to."""

    def __init__(self, values=(), *, wait_s=0.0, error=None, complaint=None):
        self.values, self.wait_s, self.error, self.complaint = values, wait_s, error, complaint
        self.cancelled = False

    def check(self, prompt):
        if self.complaint:
            raise RewardError(self.complaint)

    async def score(self, prompt, completions):
        try:
            await asyncio.sleep(self.wait_s)
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        if self.error:
            raise self.error
        return list(self.values)


def reward_set(timeout_s=5.0, **rewards):
    return RewardSet(
        [Component(name, weight, reward) for name, (weight, reward) in rewards.items()],
        timeout_s=timeout_s,
    )


async def test_scores_are_the_weighted_sum_and_components_are_unweighted():
    rewards = reward_set(
        right=(1.0, FakeReward([1, 0])),
        form=(0.25, FakeReward([1, 1])),
        zero=(0, FakeReward([9, 9])),
    )
    columns = await rewards.score(PROMPT, ["a", "b"])
    assert {name: column.tolist() for name, column in columns.items()} == {
        "reward/right": [1.0, 0.0],
        "reward/form": [1.0, 1.0],
        "reward/zero": [9.0, 9.0],
        "scores": [1.25, 0.25],
    }
    check_sizes(column_sizes(columns), GroupInfo((0, 0), 0, ()))
    assert rewards.names == ("right", "form", "zero")


async def test_rewards_run_side_by_side():
    rewards = reward_set(**{f"r{i}": (1.0, FakeReward([1], wait_s=0.1)) for i in range(20)})
    started = time.monotonic()
    await rewards.score(PROMPT, ["a"])
    assert time.monotonic() - started < 1.5


async def test_a_group_that_takes_too_long_names_the_late_reward():
    slow = FakeReward([1], wait_s=60)
    rewards = reward_set(timeout_s=0.05, quick=(1.0, FakeReward([1])), slow=(1.0, slow))
    with pytest.raises(DeadlineError, match=r"reward slow, uid 2:11:0: no result in 0.05 s"):
        await rewards.score(PROMPT, ["a"])
    await asyncio.sleep(0)
    assert slow.cancelled


async def test_a_reward_that_ignores_cancelling_is_not_waited_for():
    release = asyncio.Event()

    class Stubborn(FakeReward):
        async def score(self, prompt, completions):
            while not release.is_set():
                try:
                    await release.wait()
                except asyncio.CancelledError:
                    continue
            return [1.0]

    rewards = reward_set(timeout_s=0.05, stubborn=(1.0, Stubborn()))
    with pytest.raises(DeadlineError, match="reward stubborn"):
        await asyncio.wait_for(rewards.score(PROMPT, ["a"]), 5)
    release.set()


async def test_a_failure_is_raised_at_once_and_the_others_are_cancelled():
    slow = FakeReward([1], wait_s=60)
    broken = FakeReward(error=RewardError("no answer from the judge"))
    rewards = reward_set(slow=(1.0, slow), broken=(1.0, broken))
    started = time.monotonic()
    with pytest.raises(
        RewardError, match=r"^reward broken, uid 2:11:0: no answer from the judge$"
    ) as caught:
        await rewards.score(PROMPT, ["a"])
    assert time.monotonic() - started < 5
    await asyncio.sleep(0)
    assert slow.cancelled
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


async def test_cancelling_the_group_cancels_its_rewards():
    slow = FakeReward([1], wait_s=60)
    task = asyncio.create_task(reward_set(slow=(1.0, slow)).score(PROMPT, ["a"]))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0)
    assert slow.cancelled


async def test_a_reward_that_cancels_itself_is_an_error_of_that_reward():
    rewards = reward_set(odd=(1.0, FakeReward(error=asyncio.CancelledError())))
    with pytest.raises(RewardError, match="reward odd, uid 2:11:0: it cancelled itself"):
        await rewards.score(PROMPT, ["a"])


async def test_our_own_slips_are_not_dressed_up_as_rewards():
    rewards = reward_set(broken=(1.0, FakeReward(error=KeyError("x"))))
    with pytest.raises(KeyError):
        await rewards.score(PROMPT, ["a"])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e39])
async def test_a_number_that_is_not_finite_is_an_error(bad):
    rewards = reward_set(odd=(1.0, FakeReward([1.0, bad])))
    with pytest.raises(RewardError, match=r"reward odd, uid 2:11:0: completion 1 has"):
        await rewards.score(PROMPT, ["a", "b"])


async def test_a_sum_that_overflows_is_an_error():
    rewards = reward_set(big=(1e30, FakeReward([1e30])))
    with pytest.raises(RewardError, match="weighted sum, uid 2:11:0: completion 0 has"):
        await rewards.score(PROMPT, ["a"])


@pytest.mark.parametrize("values", [[], [1.0], [1.0, 1.0, 1.0]])
async def test_a_wrong_number_of_numbers_is_an_error(values):
    rewards = reward_set(odd=(1.0, FakeReward(values)))
    with pytest.raises(RewardError, match=f"reward odd, uid .*: {len(values)} numbers for 2 compl"):
        await rewards.score(PROMPT, ["a", "b"])


def test_check_names_the_first_row_a_reward_cannot_judge():
    rewards = reward_set(fine=(1.0, FakeReward()), odd=(1.0, FakeReward(complaint="no truth")))
    with pytest.raises(
        ConfigError, match=r"^sums.jsonl row 12 \(uid 2:11:0\): reward odd: no truth$"
    ):
        rewards.check([PROMPT], place="sums.jsonl")
    reward_set(fine=(1.0, FakeReward())).check([PROMPT], place="sums.jsonl")


async def test_rewards_are_built_from_their_config(tmp_path):
    (tmp_path / "short.py").write_text("def f(prompt, completion): return -len(completion)")
    rewards = build_rewards(
        [
            RewardConfig("exact"),
            RewardConfig("numeric", name="value", weight=2.0),
            RewardConfig("regex", weight=0.5, pattern=r"\A\d+\Z"),
            RewardConfig(
                "function", "short", path=str(tmp_path / "short.py"), function="f", weight=0
            ),
        ],
        timeout_s=30,
    )
    columns = await rewards.score(PROMPT, ["5", "5.0", "6", "what"])
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
        ([{"kind": ""}], r"rewards\[0\].kind=: must be one of exact, numeric, regex, function"),
        ([{"kind": "numerics"}], r"rewards\[0\].kind=numerics: .* did you mean numeric\?"),
        ([{"kind": "regex"}], r"rewards\[0\].pattern=: kind regex needs it"),
        ([{"kind": "function", "path": "x.py"}], r"rewards\[0\].function=: kind function needs it"),
        (
            [{"kind": "exact", "path": "x.py"}],
            r"rewards\[0\].path=x.py: means nothing to .* kind exact",
        ),
        ([{"kind": "exact"}, {"kind": "exact"}], "rewards.name=exact: given 2 times"),
        ([{"kind": "exact", "weight": float("nan")}], r"rewards\[0\].weight=nan: must be finite"),
        ([{"kind": "exact", "name": "a/b"}], r"rewards\[0\].name=a/b: letters"),
        ([{"kind": "exact", "name": "mean"}], r"rewards\[0\].name=mean: .*/mean is another metric"),
    ],
)
def test_rewards_that_cannot_be_built_are_refused(configs, words):
    with pytest.raises(ConfigError, match=words):
        build_rewards([RewardConfig(**config) for config in configs], timeout_s=1)
    with pytest.raises(ConfigError, match=words.replace("rewards", "costs", 1)):
        build_rewards([RewardConfig(**c) for c in configs], timeout_s=1, judged=COSTS)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"replicas": 0}, "scorer.replicas=0: must be 1 or more"),
        ({"max_groups": 0}, "scorer.max_groups=0: must be 1 or more"),
        ({"timeout_s": 0.0}, "scorer.timeout_s=0.0: must be above 0"),
        ({"timeout_s": float("inf")}, "scorer.timeout_s=inf: must be above 0 and finite"),
    ],
)
def test_impossible_scorer_settings_are_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        ScorerConfig(**settings)

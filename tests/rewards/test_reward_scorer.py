"""Workers of the reward and cost stages."""

from collections.abc import Mapping

import numpy as np

from streamrl.errors import RewardError
from streamrl.messages import Experience, FilteredGroup, GroupLease, Prompt
from streamrl.messages import rollouts_to_columns as columns_of
from streamrl.rewards.group_filter import accept_group
from streamrl.rewards.interface.reward import Reward, RewardSpec
from streamrl.rewards.kinds.rules import RegexOptions, build_regex_reward
from streamrl.rewards.reward_scorer import RewardScorer, score_costs
from streamrl.rewards.reward_set import COSTS, RewardComponent, RewardSet
from streamrl.telemetry.config import RolloutConfig
from tests.rollouts import make_rollout


class Letters:
    """Tokenizer: token n is the n-th letter."""

    def batch_decode(self, ids, **_):
        return ["".join("abcdef"[i] for i in row) for row in ids]


class FailingReward(Reward):
    """Reward that always fails."""

    async def score(self, prompt, completions):
        raise RewardError("the verifier is down")


PROMPT = Prompt("0:1:0", np.array([0], np.int32))


def experience(columns, *, token=1):
    lease = GroupLease(token=token, uid=PROMPT.uid, stage="any", attempt=1, expires_at=9.0)
    return Experience(lease, 0, prompt=PROMPT, columns=columns)


GROUP = experience(columns_of([make_rollout([0], tokens) for tokens in ([1, 2], [3], [1])]))
GREEDY = experience({"greedy_ids": np.array([3, 1], np.int32), "lengths": np.array([3, 2, 2])})


def contains(pattern):
    return build_regex_reward(RewardSpec("has", RegexOptions(pattern)))


def one_reward(reward, **settings):
    return RewardSet([RewardComponent("has", 2.0, False, reward)], **settings)


async def test_the_greedy_completion_is_the_baseline_of_every_rollout():
    scorer = RewardScorer(
        one_reward(contains("b")), Letters(), lambda prompt, columns: "all out", RolloutConfig()
    )
    (columns,) = await scorer.score_baseline([GREEDY])
    assert isinstance(columns, Mapping)
    expected = {"baseline_scores": [2.0, 2.0, 2.0]}
    assert {name: column.tolist() for name, column in columns.items()} == expected
    assert columns["baseline_scores"].dtype == np.float32
    assert scorer.drain_recorded() == []
    (filtered,) = await scorer.score([GROUP])
    assert isinstance(filtered, FilteredGroup), "the greedy completion alone is not filtered"


async def test_a_failed_baseline_is_an_error_not_a_zero():
    scorer = RewardScorer(one_reward(FailingReward()), Letters(), accept_group, RolloutConfig())
    (error,) = await scorer.score_baseline([GREEDY])
    assert isinstance(error, RewardError)
    assert "reward has, uid 0:1:0: the verifier is down" in str(error)


async def test_costs_have_separate_columns():
    (columns,) = await score_costs(one_reward(contains("b"), score_spec=COSTS), Letters(), [GROUP])
    assert isinstance(columns, Mapping)
    expected = {"cost/has": [1.0, 0.0, 1.0], "costs": [2.0, 0.0, 2.0]}
    assert {name: column.tolist() for name, column in columns.items()} == expected


async def test_a_rollout_without_an_environment_is_recorded_as_one_turn():
    scorer = RewardScorer(one_reward(contains("b")), Letters(), accept_group, RolloutConfig())
    await scorer.score([GROUP])
    (group,) = scorer.drain_recorded()
    assert [rollout.completion for rollout in group.rollouts] == ["bc", "d", "b"]
    first = group.rollouts[0]
    assert [(turn.source, turn.tokens) for turn in first.turns] == [("prompt", 1), ("sampled", 2)]
    assert (first.score, first.components, first.tokens) == (2.0, {"has": 1.0}, 2)
    assert first.turns[1].logprobs == ()
    assert first.versions == (0, 0)


async def test_logprobs_are_recorded_on_request_and_nothing_if_recording_is_off():
    for recording, logprobs in ((RolloutConfig(logprobs=True), 2), (RolloutConfig(every=0), None)):
        scorer = RewardScorer(one_reward(contains("b")), Letters(), accept_group, recording)
        await scorer.score([GROUP])
        recorded = scorer.drain_recorded()
        if logprobs is None:
            assert recorded == []
        else:
            assert len(recorded[0].rollouts[0].turns[1].logprobs) == logprobs

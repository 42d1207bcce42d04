"""Texts of rollouts by part: the policy's words apart from those of its environment."""

import numpy as np
import pytest

from streamrl.environments.episodes.episode import Episode, EpisodeTokens, episodes_to_columns
from streamrl.environments.rendering.turn_renderer import BridgeTokens
from streamrl.messages import FinishReason, Prompt, Rollout, TurnOutcome, rollouts_to_columns
from streamrl.rewards.combine import RewardComponent
from streamrl.rewards.interface.completion import Completion, decode_rollouts
from streamrl.rewards.kinds.environment import EnvironmentReward
from streamrl.rewards.kinds.patterns import RegexOptions, build_regex_reward
from streamrl.rewards.reward_set import RewardSet

PROMPT = Prompt("0:0:0", np.array([ord("?")], np.int32))


class CodePoints:
    """Tokenizer: a token is a code point."""

    def batch_decode(self, ids, **_):
        return ["".join(map(chr, row)) for row in ids]


def make_episode(*turns, score=0.0):
    """Return an episode of turns; every second text is an observation."""
    tokens = EpisodeTokens(PROMPT.token_ids)
    for number, text in enumerate(turns):
        ids = np.array([*map(ord, text)], np.int32)
        if number % 2:
            tokens.append_bridge(BridgeTokens(ids, np.ones(len(ids), np.bool_)))
        else:
            tokens.append_turn(
                Rollout.from_single_turn(
                    tokens.token_ids,
                    ids.tolist(),
                    logprobs=[0.0] * len(ids),
                    versions=[0] * len(ids),
                    finish_reason=FinishReason.STOP,
                )
            )
    count = len(tokens.turn_ends)
    outcomes = [TurnOutcome.SPOKE] * count
    rollout, source = tokens.finish(FinishReason.STOP)
    return Episode(rollout, source, tokens.turn_ends, [0.0] * count, outcomes, (), score)


COLUMNS = episodes_to_columns(
    [
        make_episode("9+1", "=10", "ten", score=1.0),
        make_episode("no", score=-1.0),
        make_episode("a", "b", "c", "d", "e", score=0.5),
    ]
)


def test_a_reward_reads_the_policys_words_unless_it_asks_for_more():
    episodes = decode_rollouts(CodePoints(), COLUMNS)
    parts = ("last_turn", "sampled", "conversation")
    assert [[episode.get_part(part) for part in parts] for episode in episodes] == [
        ["ten", "9+1\nten", "9+1=10ten"],
        ["no", "no", "no"],
        ["e", "a\nc\ne", "abcde"],
    ]
    assert [episode.environment_score for episode in episodes] == [1.0, -1.0, 0.5]


def test_a_rollout_without_an_environment_is_one_turn():
    rollout = Rollout.from_single_turn(
        PROMPT.token_ids, [97], logprobs=[0.0], versions=[0], finish_reason=FinishReason.STOP
    )
    (completion,) = decode_rollouts(CodePoints(), rollouts_to_columns([rollout]))
    assert completion == Completion.from_text("a")
    assert completion.environment_score is None


@pytest.mark.parametrize(
    ("part", "scores"),
    [("last_turn", [0, 0, 0]), ("sampled", [0, 0, 0]), ("conversation", [1, 0, 0])],
)
async def test_a_rule_does_not_reward_the_words_of_a_tool(part, scores):
    reward = build_regex_reward(RegexOptions("=10"))
    rewards = RewardSet([RewardComponent("sum", 1.0, False, reward, part)])
    result = await rewards.judge_group(PROMPT, decode_rollouts(CodePoints(), COLUMNS))
    assert result.totals.tolist() == scores


async def test_the_environments_score_is_a_component_with_a_weight():
    component = RewardComponent("environment", 2.0, False, EnvironmentReward())
    rewards = RewardSet([component])
    result = await rewards.judge_group(PROMPT, decode_rollouts(CodePoints(), COLUMNS))
    assert result.totals.tolist() == [2.0, -2.0, 1.0]
    assert [r.outcome.value for r in result.components["environment"]] == ["pass", "wrong", "pass"]

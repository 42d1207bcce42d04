"""Texts of rollouts by part: the policy's words apart from those of its environment."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.environments.episodes.driver import episodes_to_columns
from streamrl.messages import Prompt, TokenSource, rollouts_to_columns
from streamrl.rewards.interface.completion import (
    Completion,
    decode_completions,
    decode_conversations,
    decode_rollouts,
    encode_conversations,
)
from streamrl.rewards.interface.reward import RewardSpec
from streamrl.rewards.kinds.rules import EnvironmentReward, RegexOptions, build_regex_reward
from streamrl.rewards.reward_set import RewardComponent, RewardSet
from tests.rewards.episodes import make_episode
from tests.rollouts import make_rollout

PROMPT = Prompt("0:0:0", np.array([ord("?")], np.int32))


class CodePoints:
    """Tokenizer: a token is a code point."""

    def batch_decode(self, ids, **_):
        return ["".join(map(chr, row)) for row in ids]


def encode(text):
    return np.array([*map(ord, text)], np.int32)


def alternate(*texts):
    """Return segments of a prompt, then turns of the policy and observations alternately."""
    kinds = (TokenSource.SAMPLED, TokenSource.OBSERVATION)
    return [(TokenSource.PROMPT, "?", -1)] + [(kinds[i % 2], t, 0) for i, t in enumerate(texts)]


COLUMNS = episodes_to_columns(
    [
        make_episode(encode, alternate("9+1", "=10", "ten"), score=1.0),
        make_episode(encode, alternate("no"), score=-1.0),
        make_episode(encode, alternate("a", "b", "c", "d", "e"), score=0.5),
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


def test_the_conversation_of_a_single_turn_is_the_prompt_and_its_answer():
    question = {"role": "user", "content": "?"}
    prompt = Prompt("0:0:0", PROMPT.token_ids, messages=(question,))
    single = Completion.from_text("10").get_messages(prompt, "conversation")
    assert [*single] == [question, {"role": "assistant", "content": "10"}]


@given(st.lists(st.lists(st.fixed_dictionaries({"content": st.text()})), min_size=1))
def test_conversations_travel_as_a_column(conversations):
    column = encode_conversations(conversations)
    assert column.dtype == np.uint8
    assert decode_conversations(column) == conversations


def test_what_utf8_cannot_encode_in_a_conversation_is_replaced():
    column = encode_conversations([[{"role": "tool", "content": "\ud800x"}]])
    assert decode_conversations(column) == [[{"role": "tool", "content": "?x"}]]


def test_a_rollout_without_an_environment_is_one_turn():
    columns = rollouts_to_columns([make_rollout(PROMPT.token_ids, [97])])
    (completion,) = decode_rollouts(CodePoints(), columns)
    assert completion == Completion.from_text("a")
    assert completion.environment_score is None


@pytest.mark.parametrize(
    ("part", "scores"),
    [("last_turn", [0, 0, 0]), ("sampled", [0, 0, 0]), ("conversation", [1, 0, 0])],
)
async def test_a_rule_does_not_reward_the_words_of_a_tool(part, scores):
    reward = build_regex_reward(RewardSpec("sum", RegexOptions("=10")))
    rewards = RewardSet([RewardComponent("sum", 1.0, False, reward, part)])
    result = await rewards.judge_group(PROMPT, decode_rollouts(CodePoints(), COLUMNS))
    assert result.totals.tolist() == scores


async def test_the_environments_score_is_a_component_with_a_weight():
    component = RewardComponent("environment", 2.0, False, EnvironmentReward())
    rewards = RewardSet([component])
    result = await rewards.judge_group(PROMPT, decode_rollouts(CodePoints(), COLUMNS))
    assert result.totals.tolist() == [2.0, -2.0, 1.0]
    assert [r.outcome.value for r in result.components["environment"]] == ["pass", "wrong", "pass"]


def test_samples_of_an_episode_are_one_completion_without_what_they_repeat():
    repeated = [(TokenSource.PROMPT, "?=10;ten ", -1), (TokenSource.OBSERVATION, "so?", -1)]
    second = [*repeated, (TokenSource.SAMPLED, "10", 0)]  # the template drops "9+1"
    episode = make_episode(encode, alternate("9+1", "=10", "ten"), second, score=1.0)
    first = make_episode(encode, alternate("a"))
    columns = episodes_to_columns([first, episode], may_split=True)
    assert columns["episode"].tolist() == [0, 1, 1]
    assert columns["num_turns"].tolist() == [1, 2, 1]
    assert columns["environment_scores"].tolist() == [0.0, 1.0, 1.0]
    _, completion = decode_rollouts(CodePoints(), columns)
    assert completion.turns == ("9+1", "ten", "10")
    assert completion.conversation == "9+1=10tenso?10"
    assert completion.environment_score == 1.0
    assert [m["content"] for m in completion.messages] == ["?", "9+1", "=10", "ten", "so?", "10"]


def test_texts_are_decoded_as_sampled_without_special_tokens(bpe_tokenizer):
    ids = bpe_tokenizer(" hello . <|im_end|>world", add_special_tokens=False)["input_ids"]
    assert decode_completions(bpe_tokenizer, [np.array(ids), np.array(ids[:0])]) == [
        *(" hello . world", "")
    ]

"""Records of episodes: turns with the text, version and logprob of each sampled token."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from streamrl.environments.episodes.episode import episodes_to_columns
from streamrl.messages import Experience, GroupLease, Prompt, TokenSource
from streamrl.rewards.group_filter import accept_group
from streamrl.rewards.kinds.rules import EnvironmentReward
from streamrl.rewards.reward_scorer import RewardScorer, describe_rollouts, split_text
from streamrl.rewards.reward_set import RewardComponent, RewardSet
from streamrl.telemetry.config import RolloutConfig
from streamrl.telemetry.rollout_log import RecordedTurn, RolloutLog, read_recorded_groups
from tests.rewards.episodes import Segment, make_episode


def make_byte_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer whose tokens are the 256 bytes, and the special token `<|end|>`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[])
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


TOKENIZER = make_byte_tokenizer()
PROMPT, SAMPLED, SCAFFOLD, OBSERVATION = TokenSource


def encode(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False))


def make_columns(*episodes: Sequence[Segment]) -> dict[str, Any]:
    """Make the columns of a group; the environment scores its episodes 0, 1, ..."""
    return episodes_to_columns(
        [make_episode(encode, segments, score=i) for i, segments in enumerate(episodes)]
    )


TWO_TURNS: list[Segment] = [
    (PROMPT, "Guess.", -1),
    (SAMPLED, "50<|end|>", 3),
    (SCAFFOLD, "\nuser ", -1),
    (OBSERVATION, "higher ü", -1),
    (SCAFFOLD, "\n", -1),
    (SAMPLED, "75", 4),
]


def test_an_episode_is_cut_where_the_source_changes():
    (episode,) = describe_rollouts(TOKENIZER, make_columns(TWO_TURNS))
    assert (episode.finish_reason, episode.environment_score) == ("stop", 0.0)
    assert [(t.source, t.text, t.tokens) for t in episode.turns] == [
        ("prompt", "Guess.", 6),
        ("sampled", "50<|end|>", 3),
        ("scaffold", "\nuser ", 6),
        ("observation", "higher ü", 9),
        ("scaffold", "\n", 1),
        ("sampled", "75", 2),
    ]
    assert episode.turns[1] == RecordedTurn(
        "sampled",
        "50<|end|>",
        3,
        reward=0.5,
        outcome="called",
        versions=((3, 3),),
        piece_lengths=(1, 1, 7),
        logprobs=(-0.123, -0.123, -0.123),
    )
    assert (episode.tokens, episode.versions) == (5, (3, 4))


def test_consecutive_turns_are_apart_and_a_turn_lists_the_versions_that_sampled_it():
    columns = make_columns([(PROMPT, "p", -1), (SAMPLED, "ab", 1), (SAMPLED, "cde", 2)])
    columns["policy_version"][-1] = 3
    (episode,) = describe_rollouts(TOKENIZER, columns)
    assert [(t.text, t.versions) for t in episode.turns if t.versions] == [
        ("ab", ((1, 2),)),
        ("cde", ((2, 2), (3, 1))),
    ]


def test_a_logprob_that_is_not_finite_is_null():
    columns = make_columns([(PROMPT, "p", -1), (SAMPLED, "ab", 1)])
    columns["generator_logprobs"][-1] = -np.inf
    (episode,) = describe_rollouts(TOKENIZER, columns)
    assert episode.turns[-1].logprobs == (-0.123, None)


def test_the_detailed_tokens_of_a_group_are_bounded_and_the_text_is_complete():
    columns = make_columns(TWO_TURNS, TWO_TURNS)
    for episode in describe_rollouts(TOKENIZER, columns, max_detailed_tokens=8):
        sampled = [turn for turn in episode.turns if turn.source == "sampled"]
        assert [turn.text for turn in sampled] == ["50<|end|>", "75"]
        assert [len(turn.logprobs) for turn in sampled] == [3, 1]
        assert [len(turn.piece_lengths) for turn in sampled] == [3, 1]


@given(st.text(st.characters(exclude_categories=["Cs"])), st.integers(0, 80))
def test_the_pieces_of_a_text_join_to_the_text(text: str, max_pieces: int):
    ids = encode(text)
    pieces, rest = split_text(TOKENIZER, ids, max_pieces)
    assert len(pieces) == min(max_pieces, len(ids))
    assert "".join(pieces) + rest == text


async def test_the_turns_that_the_scorer_records_are_read_back(tmp_path: Path):
    columns = make_columns(TWO_TURNS, TWO_TURNS)
    rewards = [RewardComponent("env", 1.0, False, EnvironmentReward())]
    prompt = Prompt("0:1:0", np.array(encode("Guess."), np.int32), environment="guess")
    lease = GroupLease(token=1, uid=prompt.uid, stage="reward", attempt=1, expires_at=9.0)
    scorer = RewardScorer(RewardSet(rewards), TOKENIZER, accept_group, RolloutConfig(logprobs=True))
    await scorer.score([Experience(lease, 0, prompt=prompt, columns=columns)])
    RolloutLog(tmp_path).write_groups(1, scorer.drain_recorded())
    (group,) = read_recorded_groups(tmp_path, 1)
    first, second = group.rollouts
    assert group.environment == "guess"
    assert [r.score for r in group.rollouts] == [0.0, 1.0]
    assert second.environment_score == 1.0
    assert first.prompt_text == "Guess."
    assert first.version_range == (3, 4)
    assert (first.turns[1].text, first.turns[1].piece_lengths) == ("50<|end|>", (1, 1, 7))


async def test_an_episode_of_several_samples_is_scored_filtered_and_recorded_once():
    again = [(PROMPT, "Again.", -1), (SAMPLED, "60", 4)]
    split = make_episode(encode, TWO_TURNS, again, score=2.0)
    whole = make_episode(encode, TWO_TURNS, score=5.0)
    columns = episodes_to_columns([split, whole], may_split=True)
    filtered = []

    def record(prompt, scored):
        filtered.append(scored["scores"].tolist())

    rewards = [RewardComponent("env", 1.0, False, EnvironmentReward())]
    prompt = Prompt("0:1:0", np.array(encode("Guess."), np.int32))
    scorer = RewardScorer(RewardSet(rewards), TOKENIZER, record, RolloutConfig())

    async def score(token):
        lease = GroupLease(token, uid=prompt.uid, stage="reward", attempt=1, expires_at=9.0)
        (result,) = await scorer.score([Experience(lease, 0, prompt=prompt, columns=columns)])
        assert isinstance(result, Mapping)
        return {name: column.tolist() for name, column in result.items()}

    assert await score(token=1) == {"scores": [2.0, 2.0, 5.0], "reward/env": [2.0, 2.0, 5.0]}
    assert filtered == [[2.0, 5.0]]
    (group,) = scorer.drain_recorded()
    first, second = group.rollouts
    assert [turn.text for turn in first.turns if turn.source in ("prompt", "sampled")] == [
        *("Guess.", "50<|end|>", "75"),
        *("Again.", "60"),
    ]
    assert [rollout.environment_score for rollout in (first, second)] == [2.0, 5.0]
    assert (first.row, first.tokens, second.row) == (0, 7, 2)
    in_evaluation = await score(token=0)
    assert in_evaluation["scores"] == [2.0, 5.0]
    assert len(in_evaluation["answers"]) == 2

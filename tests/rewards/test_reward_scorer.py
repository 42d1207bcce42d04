"""Workers of the reward and cost stages, and the rollouts that they record."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from streamrl.environments.episodes.driver import episodes_to_columns
from streamrl.errors import RewardError
from streamrl.messages import Experience, FilteredGroup, GroupLease, Prompt, TokenSource
from streamrl.messages import rollouts_to_columns as columns_of
from streamrl.rewards.group_filter import accept_group
from streamrl.rewards.interface.reward import Reward, RewardSpec
from streamrl.rewards.kinds.rules import EnvironmentReward, RegexOptions, build_regex_reward
from streamrl.rewards.metric_means import sums_to_means
from streamrl.rewards.reward_scorer import RewardScorer, describe_rollouts, score_costs, split_text
from streamrl.rewards.reward_set import COSTS, RewardComponent, RewardSet
from streamrl.telemetry.config import RolloutConfig
from streamrl.telemetry.rollout_log import RecordedTurn
from tests.bpe_tokenizer import make_byte_tokenizer
from tests.rewards.episodes import Segment, make_episode
from tests.rollouts import make_rollout


class Letters:
    """Tokenizer: token n is the n-th letter."""

    def decode(self, ids, **_):
        return "".join("abcdef"[i] for i in ids)

    def batch_decode(self, rows, **_):
        return [self.decode(ids) for ids in rows]


class FailingReward(Reward):
    """Reward that always fails."""

    async def score(self, prompt, completions):
        raise RewardError("the verifier is down")


ROW = Prompt("0:1:0", np.array([0], np.int32))


def experience(columns, *, token=1, row=ROW):
    lease = GroupLease(token=token, uid=row.uid, stage="any", attempt=1, expires_at=9.0)
    return Experience(lease, 0, prompt=row, columns=columns)


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


async def test_prompts_of_right_and_of_wrong_rollouts_are_counted_before_the_filter():
    groups = [[[1, 1], [1]], [[3], [4]], [[1], [3]], [[1]]]
    columns = [columns_of([make_rollout([0], tokens) for tokens in group]) for group in groups]
    rewards = one_reward(contains("b"))
    scorer = RewardScorer(rewards, Letters(), lambda prompt, columns: "out", RolloutConfig())
    await scorer.score([experience(group) for group in columns])
    await scorer.score([experience(columns[0], token=0)])  # of an evaluation
    means = sums_to_means(rewards.drain_counts())
    assert means["rollout/all_right_frac"] == 2 / 4
    assert means["rollout/all_wrong_frac"] == 1 / 4


async def test_own_loops_get_token_scores_of_every_group():
    reward, places = contains("b"), {"token_scores"}
    scorer = RewardScorer(
        one_reward(reward), Letters(), accept_group, RolloutConfig(), extra_columns=places
    )
    (queued,) = await scorer.score([GROUP])
    assert isinstance(queued, Mapping) and "token_scores" not in queued, "all fall on last tokens"
    (columns,) = await scorer.score([experience(GROUP.columns, token=0)])
    assert isinstance(columns, Mapping)
    # Rollouts of 3, 2 and 2 tokens, of which the first and the last have a b.
    assert columns["token_scores"].tolist() == [0, 0, 2, 0, 0, 0, 2]


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
    for recording, logprobs in ((RolloutConfig(logprobs=True), [2]), (RolloutConfig(every=0), [])):
        scorer = RewardScorer(one_reward(contains("b")), Letters(), accept_group, recording)
        await scorer.score([GROUP])
        recorded = scorer.drain_recorded()
        assert [len(group.rollouts[0].turns[1].logprobs) for group in recorded] == logprobs


# Records of episodes: turns with the text, version and logprob of each sampled token.


TOKENIZER = make_byte_tokenizer(["<|end|>"], [], eos_token="<|end|>")
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


async def test_an_episode_of_several_samples_is_scored_filtered_and_recorded_once():
    again = [(PROMPT, "Again.", -1), (SAMPLED, "60", 4)]
    split = make_episode(encode, TWO_TURNS, again, score=2.0)
    whole = make_episode(encode, TWO_TURNS, score=5.0)
    columns = episodes_to_columns([split, whole], may_split=True)
    filtered = []

    def record(prompt, scored):
        filtered.append(scored["scores"].tolist())

    rewards = [RewardComponent("env", 1.0, False, EnvironmentReward())]
    scorer = RewardScorer(RewardSet(rewards), TOKENIZER, record, RolloutConfig())

    async def score(token):
        (result,) = await scorer.score([experience(columns, token=token)])
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

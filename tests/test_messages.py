"""Messages between stages: prompts, columns, rollouts."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from streamrl.errors import ContractError
from streamrl.messages import (
    FinishReason,
    GroupInfo,
    Prompt,
    Rollout,
    check_column_sizes,
    check_samples,
    columns_to_rollouts,
    count_samples,
    extend_wide,
    extract_completions,
    rollouts_to_columns,
    sum_over_samples,
)
from tests.rollouts import make_rollout


@pytest.mark.parametrize(
    ("tokens", "described"),
    [
        (np.array([2**40]), r"int64\[1\]"),
        (np.zeros((2, 3), np.int32), r"int32\[2, 3\]"),
        ([1, 2], "list"),
    ],
)
def test_prompt_rejects_wrong_token_dtype_or_shape(tokens: np.ndarray, described: str):
    with pytest.raises(
        ContractError, match=f"prompt 0:0:0: token_ids are {described}, wanted int32"
    ):
        Prompt("0:0:0", tokens)


def rollout_of(mask: list[bool], tokens: list[int]) -> Rollout:
    """Make a rollout; `mask` marks sampled tokens."""
    sampled = np.array(mask)
    versions = np.where(sampled, 0, -1).astype(np.int32)
    ended = FinishReason.STOP if sampled.any() else FinishReason.ABORT
    return Rollout(
        np.array(tokens, np.int32), sampled, np.zeros(len(mask), np.float32), versions, ended
    )


def test_completions_begin_with_the_first_sampled_token():
    prompt, tool = [False, False], [True, False, True]
    rollouts = [
        rollout_of([*prompt, True], [7, 8, 1]),
        # Tokens that a tool wrote between two turns belong to the completion.
        rollout_of([*prompt, *tool], [7, 8, 2, 50, 3]),
        # A rollout without sampled tokens.
        rollout_of(prompt, [7, 8]),
    ]
    completions = [
        completion.tolist() for completion in extract_completions(rollouts_to_columns(rollouts))
    ]
    assert completions == [[1], [2, 50, 3], []]
    assert completions == [rollout.completion_ids.tolist() for rollout in rollouts]


def make_samples(episode: list[int]) -> dict[str, np.ndarray]:
    """Make the columns of a group, with a rollout of one prompt and one sampled token each."""
    columns = rollouts_to_columns([make_rollout([1], [2]) for _ in episode])
    return columns | {"episode": np.array(episode, np.int32)}


def test_rollouts_with_the_same_episode_are_samples_of_it():
    columns = make_samples([0, 0, 1, 2, 2, 2])
    assert count_samples(columns).tolist() == [2, 1, 3]
    assert sum_over_samples(columns["lengths"], count_samples(columns)).tolist() == [4, 2, 6]
    info = GroupInfo.from_columns(columns)
    assert (info.samples, len(info.lengths)) == ((2, 1, 3), 6)


def test_without_the_column_each_rollout_is_an_episode():
    columns = make_samples([0, 1])
    del columns["episode"]
    assert count_samples(columns).tolist() == [1, 1]
    info = GroupInfo.from_columns(columns)
    assert info.samples == ()


@pytest.mark.parametrize("episode", [[1, 2], [0, 2], [0, 1, 0], [-1, 0], [1, 0]])
def test_samples_of_an_episode_must_follow_each_other(episode: list[int]):
    with pytest.raises(ContractError, match="must number the episodes from 0"):
        check_samples(make_samples(episode))


def test_a_group_that_was_journaled_before_episodes_had_samples_is_read():
    stored = {"lengths": (3, 2), "num_loss_tokens": 2, "version_tokens": ((0, 2),), "num_turns": 2}
    assert msgspec.convert(stored, GroupInfo).samples == ()


def test_a_wide_column_has_as_many_entries_for_each_token():
    info = GroupInfo((2, 3), 2, ())
    check_column_sizes({"token_ids": 5, "sampling_mask": 10}, info)
    for name, size in (("sampling_mask", 11), ("sampling_mask", 3), ("token_ids", 10)):
        with pytest.raises(ContractError, match=rf"column {name}: int32\[{size}\], wanted"):
            check_column_sizes({name: size}, info)


def test_rows_of_later_tokens_extend_wide_columns_and_replace_rows_where_they_have_entries():
    grown = extend_wide({}, {"routed_experts": np.array([[3, 5]], np.uint8)}, 3)
    assert grown["routed_experts"].tolist() == [[255, 255], [255, 255], [3, 5]]
    whole = np.array([[1, 2], [7, 8], [255, 255], [4, 6]], np.uint8)
    again = extend_wide(grown, {"routed_experts": whole}, 4)
    assert again["routed_experts"].tolist() == [[1, 2], [7, 8], [3, 5], [4, 6]]
    assert extend_wide(again, {}, 5)["routed_experts"].tolist()[3:] == [[4, 6], [255, 255]]


def test_wide_columns_of_rollouts_survive_the_way_through_columns():
    begun = rollout_of([False, True], [7, 8])
    begun = replace(begun, wide={"sampling_mask": np.array([[-1, -1], [8, 3]], np.int32)})
    columns = rollouts_to_columns([rollout_of([False], [7]), begun])
    assert columns["sampling_mask"].tolist() == [-1, -1, -1, -1, 8, 3]
    rows = [rollout.wide["sampling_mask"].tolist() for rollout in columns_to_rollouts(columns)]
    assert rows == [[[-1, -1]], [[-1, -1], [8, 3]]]

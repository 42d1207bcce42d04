"""Advantages from the scores of groups."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from streamrl.algorithms.math.advantages import (
    decoupled_reward_advantages,
    gpg_advantages,
    group_relative_advantages,
    leave_one_out_advantages,
    length_weighted_advantages,
)


def grouped(groups: list[list[float]]) -> tuple[torch.Tensor, torch.Tensor]:
    scores = torch.tensor([score for group in groups for score in group])
    ids = torch.tensor([i for i, group in enumerate(groups) for _ in group])
    return scores, ids


def near(advantages: torch.Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(advantages, torch.tensor(expected), atol=3e-6, rtol=0)


@given(st.floats(-1e6, 1e6, width=32), st.integers(1, 9))
def test_equal_scores_give_exactly_zero(score, size):
    scores, ids = grouped([[score] * size, [0.0, 1.0]])
    assert group_relative_advantages(scores, ids)[:size].tolist() == [0.0] * size
    assert leave_one_out_advantages(scores, ids)[:size].tolist() == [0.0] * size
    assert gpg_advantages(scores, ids)[:size].tolist() == [0.0] * size
    lengths = torch.arange(1, size + 3)
    assert length_weighted_advantages(scores, ids, lengths)[:size].tolist() == [0.0] * size


def test_a_group_without_sampled_tokens_gets_its_plain_mean_as_baseline():
    no_tokens = torch.zeros(2, dtype=torch.int64)
    near(length_weighted_advantages(*grouped([[0.0, 1.0]]), no_tokens), [-0.5, 0.5])


def test_nan_rewards_are_left_out_per_rollout_by_hand():
    nan, half = math.nan, 1 / math.sqrt(2)
    # The first reward scores two of three rollouts in the first group, none in the other.
    rewards = torch.tensor([[0.0, 1.0], [nan, 1.0], [2.0, 1.0], [nan, 0.0], [nan, 4.0]])
    ids = torch.tensor([4, 4, 4, 1, 1])
    near(decoupled_reward_advantages(rewards, ids), [-half, 0.0, half, -half, half])
    near(decoupled_reward_advantages(torch.full((2, 1), nan), ids[:2]), [0.0, 0.0])

"""Advantages from the scores of groups."""

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streamrl.algorithms.math.advantages import (
    best_of_group_advantages,
    decoupled_reward_advantages,
    gpg_advantages,
    greedy_baseline_advantages,
    group_relative_advantages,
    leave_one_out_advantages,
    length_weighted_advantages,
)

SEEDS = st.integers(0, 9999)


def make_random_groups(seed: int) -> list[list[float]]:
    """Return 1 to 4 groups of 2 to 5 scores; a fifth of the scores is 0.

    Scores are multiples of 1/8, so sums are exact and independent of the order of rounding.
    """
    draw = random.Random(seed)
    return [
        [draw.choice((0.0, *[draw.randint(-40, 40) / 8] * 4)) for _ in range(draw.randint(2, 5))]
        for _ in range(draw.randint(1, 4))
    ]


GROUPS = st.builds(make_random_groups, SEEDS)


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


def make_lengths(scores: torch.Tensor) -> torch.Tensor:
    """Return a length for every score, equal for equal scores."""
    return 1 + (scores * 8).long().abs() % 7


def two_rewards(scores: torch.Tensor) -> torch.Tensor:
    return torch.stack([scores, scores.square() % 3], -1)


# Keeps 0 / 0 away.
TINY = 1e-12
ESTIMATORS = {
    "std": lambda s, g: group_relative_advantages(s, g, eps=TINY),
    "batch": lambda s, g: group_relative_advantages(s, g, scale="batch", eps=TINY),
    "mean": lambda s, g: group_relative_advantages(s, g, scale="mean", eps=TINY),
    "none": lambda s, g: group_relative_advantages(s, g, scale="none"),
    "leave one out": leave_one_out_advantages,
    "length weighted": lambda s, g: length_weighted_advantages(s, g, make_lengths(s)),
    "best": best_of_group_advantages,
    "best over std": lambda s, g: best_of_group_advantages(s, g, scale="std", eps=TINY),
    "gpg": gpg_advantages,
    "greedy": lambda s, g: greedy_baseline_advantages(s, s.square()),
    "decoupled": lambda s, g: decoupled_reward_advantages(two_rewards(s), g, eps=TINY),
}


@pytest.mark.parametrize("name", ESTIMATORS)
@given(groups=GROUPS)
def test_float32_is_as_near_as_its_rounding(name, groups):
    scores, ids = grouped(groups)
    single, double = (ESTIMATORS[name](x, ids) for x in (scores, scores.double()))
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), double, atol=2e-5, rtol=2e-5)

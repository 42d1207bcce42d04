"""Advantages from the scores of groups."""

import math
import random
from functools import partial
from statistics import mean, stdev

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
from tests.algorithms.ragged import assert_equals_reference

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


def test_group_relative_by_hand():
    # Group 7: mean 2, unbiased deviation sqrt(((1-2)^2 + 0 + (3-2)^2) / 2) = 1. Group 3: mean 0.5,
    # deviation sqrt(2 * 0.25 / 1) = sqrt(0.5).
    scores = torch.tensor([1.0, 0.0, 2.0, 1.0, 3.0])
    ids = torch.tensor([7, 3, 7, 3, 7])
    half = 0.5 / math.sqrt(0.5)
    near(group_relative_advantages(scores, ids), [-1.0, -half, 0.0, half, 1.0])


def test_scale_none_only_subtracts_the_mean():
    near(group_relative_advantages(*grouped([[1.0, 2.0, 6.0]]), scale="none"), [-2.0, -1.0, 3.0])


def test_scale_batch_divides_by_the_deviation_of_all_scores():
    # All: mean 3, squared deviations 9 + 1 + 1 + 9 = 20. Groups: means 1 and 5.
    scores, ids = grouped([[0.0, 2.0], [4.0, 6.0]])
    result = group_relative_advantages(scores, ids, scale="batch")
    near(result, [x / math.sqrt(20 / 3) for x in (-1, 1, -1, 1)])


def test_scale_mean_divides_by_the_mean_and_gives_0_if_it_is_not_positive():
    scores, ids = grouped([[1.0, 0.0, 0.0, 1.0], [0.0, 0.0], [-3.0, 1.0], [1.0, 3.0]])
    expected = [1.0, -1.0, -1.0, 1.0, 0.0, 0.0, 0.0, 0.0, -0.5, 0.5]
    near(group_relative_advantages(scores, ids, scale="mean"), expected)


@given(st.floats(-1e6, 1e6, width=32), st.integers(1, 9))
def test_equal_scores_give_exactly_zero(score, size):
    scores, ids = grouped([[score] * size, [0.0, 1.0]])
    assert group_relative_advantages(scores, ids)[:size].tolist() == [0.0] * size
    assert leave_one_out_advantages(scores, ids)[:size].tolist() == [0.0] * size
    assert gpg_advantages(scores, ids)[:size].tolist() == [0.0] * size
    lengths = torch.arange(1, size + 3)
    assert length_weighted_advantages(scores, ids, lengths)[:size].tolist() == [0.0] * size


def test_a_single_rollout_gets_zero_or_keeps_its_score():
    scores, ids = grouped([[3.0], [1.0, 1.0]])
    near(group_relative_advantages(scores, ids), [0.0, 0.0, 0.0])
    keep = partial(group_relative_advantages, scores, ids, single="keep")
    near(keep(scale="none"), [3.0, 0.0, 0.0])
    torch.testing.assert_close(keep(), torch.tensor([3.0 / (1 + 1e-6), 0.0, 0.0]))
    near(keep(eps=2.0), [1.0, 0.0, 0.0])


def test_leave_one_out_by_hand():
    # 1 - (2 + 6) / 2, 2 - (1 + 6) / 2, 6 - (1 + 2) / 2; and 0 - 4, 4 - 0.
    scores, ids = grouped([[1.0, 2.0, 6.0], [0.0, 4.0]])
    near(leave_one_out_advantages(scores, ids), [-3.0, -1.5, 4.5, -4.0, 4.0])


def test_the_length_weighted_baseline_by_hand():
    # Group 0: (1 * 4 + 3 * 0) / 4 = 1. Group 1: (2 * 1 + 2 * 3) / 4 = 2. Group 2 has no tokens.
    scores, ids = grouped([[4.0, 0.0], [1.0, 3.0], [0.0, 1.0]])
    advantages = length_weighted_advantages(scores, ids, torch.tensor([1, 3, 2, 2, 0, 0]))
    near(advantages, [3.0, -1.0, -1.0, 1.0, -0.5, 0.5])


def test_the_best_of_a_group_by_hand():
    # Leads of 3 and 2, and a tie. Deviation of 0, 0, 3: sqrt((1 + 1 + 4) / 2).
    scores, ids = grouped([[0.0, 3.0, 0.0], [-3.0, -5.0], [2.0, 2.0, 1.0]])
    near(best_of_group_advantages(scores, ids), [0.0, 3.0, 0.0, 2.0, 0.0, 0.0, 0.0, 0.0])
    scaled = best_of_group_advantages(scores, ids, scale="std")
    near(scaled, [0.0, math.sqrt(3), 0.0, math.sqrt(2), 0.0, 0.0, 0.0, 0.0])


def test_gpg_by_hand_with_a_factor_over_the_whole_batch():
    # 4 rollouts, 1 with a score: a factor of 4. The first group alone: a factor of 2.
    scores, ids = grouped([[1.0, 0.0], [0.0, 0.0]])
    near(gpg_advantages(scores, ids), [2.0, -2.0, 0.0, 0.0])
    near(gpg_advantages(scores[:2], ids[:2]), [1.0, -1.0])


def test_the_greedy_baseline_by_hand():
    scores, baselines = torch.tensor([[1.0, 0.0, 2.5], [1.0, 1.0, -1.0]])
    assert greedy_baseline_advantages(scores, baselines).tolist() == [0.0, -1.0, 3.5]


def test_decoupled_rewards_by_hand():
    # Rewards of spread 2 and 200: each has a deviation of half its spread times sqrt 2.
    rewards = torch.tensor([[0.0, 100.0], [2.0, -100.0], [5.0, 0.0], [5.0, 200.0]])
    ids = torch.tensor([4, 4, 1, 1])
    half = 1 / math.sqrt(2)
    near(decoupled_reward_advantages(rewards, ids), [0.0, 0.0, -half, half])
    weighted = decoupled_reward_advantages(rewards, ids, weights=torch.tensor([3.0, 1.0]))
    near(weighted, [-2 * half, 2 * half, -half, half])


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
OF_THE_BATCH = ("batch", "gpg")


def others(group, i):
    return group[:i] + group[i + 1 :]


def spread(group):
    """Return scores over their deviation, 0 if they are equal."""
    divisor = stdev(group)
    return [(x - mean(group)) / divisor if divisor else 0.0 for x in group]


def leads(group):
    return [max(x - max(others(group, i)), 0.0) for i, x in enumerate(group)]


def weighted(group):
    weights = [1 + abs(int(x * 8)) % 7 for x in group]
    baseline = math.fsum(w * x for w, x in zip(weights, group, strict=True)) / sum(weights)
    return [x - baseline for x in group]


def decoupled(group):
    parts = spread(group), spread([x**2 % 3 for x in group])
    return [sum(pair) for pair in zip(*parts, strict=True)]


# References in plain Python: scores of a group, scores of all groups -> advantages of the group.
IN_LOOPS = {
    "std": lambda group, _: spread(group),
    "batch": lambda group, batch: [(x - mean(group)) / (stdev(batch) or 1.0) for x in group],
    "mean": lambda group, _: [x / mean(group) - 1 if mean(group) > 0 else 0.0 for x in group],
    "none": lambda group, _: [x - mean(group) for x in group],
    "leave one out": lambda group, _: [x - mean(others(group, i)) for i, x in enumerate(group)],
    "length weighted": lambda group, _: weighted(group),
    "best": lambda group, _: leads(group),
    "best over std": lambda group, _: [x / (stdev(group) or 1.0) for x in leads(group)],
    "gpg": lambda group, batch: [
        (x - mean(group)) * len(batch) / max(sum(map(bool, batch)), 1) for x in group
    ],
    "greedy": lambda group, _: [x - x**2 for x in group],
    "decoupled": lambda group, _: decoupled(group),
}


def assert_equals_loops(name, dtype, groups):
    scores, ids = grouped(groups)
    expected = [x for group in groups for x in IN_LOOPS[name](group, scores.tolist())]
    advantages = ESTIMATORS[name](scores.to(dtype), ids)
    assert_equals_reference(advantages, torch.tensor(expected, dtype=torch.float64), dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", ESTIMATORS)
@given(groups=GROUPS)
def test_advantages_equal_the_reference_in_python_loops(name, dtype, groups):
    assert_equals_loops(name, dtype, groups)


# References that square the scores are left out.


@pytest.mark.parametrize("name", [name for name in ESTIMATORS if name not in OF_THE_BATCH])
@given(groups=GROUPS)
def test_groups_are_independent(name, groups):
    scores, ids = grouped(groups)
    for i in range(len(groups)):
        expected = ESTIMATORS[name](scores[ids == i], ids[ids == i])
        assert torch.equal(ESTIMATORS[name](scores, ids)[ids == i], expected)


@pytest.mark.parametrize("name", ["std", "batch", "none", "leave one out", "best", "best over std"])
@given(groups=GROUPS, shift=st.integers(-9, 9))
def test_a_shift_of_all_scores_has_no_effect(name, groups, shift):
    scores, ids = grouped(groups)
    shifted = ESTIMATORS[name](scores.double() + shift, ids)
    expected = ESTIMATORS[name](scores.double(), ids)
    torch.testing.assert_close(shifted, expected, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize(
    ("name", "power"),
    [
        *((name, 0) for name in ("std", "batch", "mean", "best over std")),
        *((name, 1) for name in ("none", "leave one out", "best", "gpg")),
    ],
)
@given(groups=GROUPS, factor=st.integers(1, 7))
def test_advantages_scale_with_the_scores_or_not_at_all(name, power, groups, factor):
    scores, ids = grouped(groups)
    scaled = ESTIMATORS[name](scores.double() * factor, ids)
    expected = ESTIMATORS[name](scores.double(), ids) * factor**power
    torch.testing.assert_close(scaled, expected, atol=1e-9, rtol=1e-9)

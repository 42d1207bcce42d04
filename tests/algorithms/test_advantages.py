"""Group-relative advantages."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streamrl.algorithms import group_relative

SCORES = st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=6)


def grouped(groups: list[list[float]]) -> tuple[torch.Tensor, torch.Tensor]:
    scores = torch.tensor([score for group in groups for score in group])
    ids = torch.tensor([i for i, group in enumerate(groups) for _ in group])
    return scores, ids


def test_two_groups_by_hand():
    # Group 7: mean 2, unbiased deviation sqrt(((1-2)^2 + 0 + (3-2)^2) / 2) = 1. Group 3: mean 0.5,
    # deviation sqrt(2 * 0.25 / 1) = sqrt(0.5).
    scores = torch.tensor([1.0, 0.0, 2.0, 1.0, 3.0])
    ids = torch.tensor([7, 3, 7, 3, 7])
    half = 0.5 / math.sqrt(0.5)
    expected = torch.tensor([-1.0, -half, 0.0, half, 1.0])
    torch.testing.assert_close(group_relative(scores, ids), expected, atol=3e-6, rtol=0)


def test_scale_none_only_subtracts_the_mean():
    scores, ids = grouped([[1.0, 2.0, 6.0]])
    advantages = group_relative(scores, ids, scale="none")
    torch.testing.assert_close(advantages, torch.tensor([-2.0, -1.0, 3.0]))


def test_the_biased_deviation_divides_by_n():
    scores, ids = grouped([[0.0, 2.0]])
    torch.testing.assert_close(
        group_relative(scores, ids, unbiased=False), torch.tensor([-1.0, 1.0]), atol=2e-6, rtol=0
    )


@given(st.floats(-1e6, 1e6, width=32), st.integers(1, 9))
def test_equal_scores_give_exactly_zero(score, size):
    scores, ids = grouped([[score] * size, [0.0, 1.0]])
    assert group_relative(scores, ids)[:size].tolist() == [0.0] * size


def test_a_group_of_one_gets_zero_or_keeps_its_score():
    scores, ids = grouped([[3.0], [1.0, 1.0]])
    assert group_relative(scores, ids).tolist() == [0.0, 0.0, 0.0]
    assert group_relative(scores, ids, scale="none", single="keep").tolist() == [3.0, 0.0, 0.0]
    kept = group_relative(scores, ids, single="keep")
    torch.testing.assert_close(kept, torch.tensor([3.0 / (1 + 1e-6), 0.0, 0.0]))


@given(st.lists(SCORES, min_size=1, max_size=4))
def test_advantages_of_a_group_sum_to_zero(groups):
    scores, ids = grouped(groups)
    advantages = group_relative(scores, ids)
    assert advantages.isfinite().all()
    for i in range(len(groups)):
        assert abs(float(advantages[ids == i].sum())) < 1e-4


@given(st.lists(SCORES, min_size=2, max_size=4))
def test_a_group_does_not_see_the_others(groups):
    scores, ids = grouped(groups)
    alone, own = grouped(groups[:1])
    assert torch.equal(group_relative(scores, ids)[: len(alone)], group_relative(alone, own))


@given(st.lists(SCORES, min_size=1, max_size=4), st.randoms())
def test_the_order_of_rows_does_not_matter(groups, random):
    scores, ids = grouped(groups)
    order = list(range(len(scores)))
    random.shuffle(order)
    torch.testing.assert_close(
        group_relative(scores[order], ids[order]), group_relative(scores, ids)[order]
    )


@given(st.lists(st.integers(-5, 5), min_size=2, max_size=6), st.integers(-9, 9), st.integers(1, 7))
def test_shift_does_nothing_and_scale_does_nothing_but_round(group, shift, factor):
    scores, ids = grouped([[float(score) for score in group]])
    torch.testing.assert_close(
        group_relative(scores * factor + shift, ids),
        group_relative(scores, ids),
        atol=1e-5,
        rtol=1e-5,
    )


def test_an_unknown_choice_is_refused():
    scores, ids = grouped([[0.0, 1.0]])
    with pytest.raises(ValueError, match="scale='iqr'"):
        group_relative(scores, ids, scale="iqr")

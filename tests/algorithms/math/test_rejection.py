"""Rejection of tokens and rollouts that are too far off-policy."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streamrl.algorithms.correction import REJECTION_KINDS, REJECTION_LEVELS
from streamrl.algorithms.math.correction import (
    off_policy_sequence_mask,
    rejection_mask,
    second_moment_limit,
)
from tests.algorithms.ragged import BATCHES

NAN = math.nan


@pytest.mark.parametrize("level", REJECTION_LEVELS)
@pytest.mark.parametrize("kind", REJECTION_KINDS)
def test_distant_tokens_are_rejected_without_overflow(kind, level):
    mask = torch.tensor([[True, True]])
    for far in (1e6, -1e6):
        x = torch.tensor([[far, far]])
        low, sampling = 0.5 if kind == "k1" else None, torch.full_like(x, -20.0 if far > 0 else 0.0)
        kept = rejection_mask(x, mask, kind=kind, level=level, low=low, high=2.0, sampling=sampling)
        assert not kept.any()


def test_a_binary_divergence_counts_both_ways_by_hand():
    # 0.9 log(0.9/0.5) + 0.1 log(0.1/0.5) = 0.368, and the other way log(5/3) = 0.511.
    sampling = torch.tensor([[0.5, 0.9]], dtype=torch.float64).log()
    x = torch.tensor([[0.9, 0.5]], dtype=torch.float64).log() - sampling
    mask = torch.ones_like(x, dtype=torch.bool)

    def keeps(high):
        kept = rejection_mask(
            x, mask, kind="binary_kl", level="token", high=high, sampling=sampling
        )
        return kept.tolist()

    assert keeps(0.50) == [[False, False]]
    assert keeps(0.52) == [[True, True]]
    # A rare token may become three times as likely: 3 % in place of 1 %.
    sampling = torch.tensor([[0.01, 0.01]], dtype=torch.float64).log()
    x = torch.tensor([[3.0, 1.0]], dtype=torch.float64).log()
    assert keeps(0.1) == [[True, True]]


def test_off_policy_sequence_mask_by_hand():
    # The mean log-ratios are -1/4 and 0.
    x = torch.tensor([[-0.5, NAN, 0.0], [-0.5, 0.5, NAN]]).requires_grad_()
    mask = torch.tensor([[True, False, True], [True, True, False]])
    bad = torch.tensor([[-1.0], [-1.0]])

    def keeps(advantages, threshold):
        return off_policy_sequence_mask(x, advantages, mask, threshold=threshold).tolist()

    assert keeps(bad, 0.25) == mask.tolist()  # on the threshold
    assert keeps(bad, 0.24) == [[False] * 3, mask[1].tolist()]
    for good in (0.0, 0.5):
        assert keeps(torch.tensor([[good], [good]]), -0.01) == mask.tolist()
    assert keeps(bad, -0.01) == [[False] * 3] * 2
    mixed = torch.tensor([[-1.0, NAN, 1.0], [-1.0, 1.0, NAN]])
    assert keeps(mixed, 0.24) == [[False, False, True], mask[1].tolist()]


def test_equal_tokens_are_kept_or_dropped_together():
    # With one of the two ones the mean is 5/8, with both 3/4.
    squares = torch.tensor([1.0, 0.25, 1.0])
    assert second_moment_limit(squares, threshold=0.7) == 0.25
    assert second_moment_limit(squares, threshold=0.8) == 1.0
    assert second_moment_limit(squares, threshold=0.25) == -1.0  # below, not at


@given(batch=BATCHES, threshold=st.floats(0.01, 1.0))
def test_the_second_moment_limit_is_maximal(batch, threshold):
    squares = batch["log_ratio"][batch["loss_mask"]].square()
    limit = second_moment_limit(squares, threshold=threshold)
    inside = sorted(squares[squares <= limit].tolist())
    outside = sorted(squares[squares > limit].tolist())
    assert not inside or sum(inside) / len(inside) < threshold
    assert not outside or sum([*inside, outside[0]]) / (len(inside) + 1) >= threshold

"""Masked sums over rows."""

import math

import torch

from streamrl.algorithms.math.tokens import apply_mask, masked_row_mean, masked_row_sum
from tests.algorithms import ragged

NAN = math.nan
VALUES = torch.tensor([[1.0, NAN, 4.0, NAN], [NAN, NAN, NAN, NAN]])
MASK = torch.tensor([[True, False, True, False], [False, False, False, False]])


def test_row_sums_and_means_by_hand_with_an_empty_row():
    assert masked_row_sum(VALUES, MASK).tolist() == [[5.0], [0.0]]
    assert masked_row_mean(VALUES, MASK).tolist() == [[2.5], [0.0]]


def test_masked_nan_gets_no_gradient():
    values = VALUES.clone().requires_grad_()
    (masked_row_mean(values, MASK).sum() + apply_mask(values, MASK).square().sum()).backward()
    assert ragged.gradient(values).tolist() == [[2.5, 0.0, 8.5, 0.0], [0.0, 0.0, 0.0, 0.0]]

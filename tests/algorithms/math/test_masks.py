"""Masked sums over rows."""

import math

import torch
from hypothesis import given

from streamrl.algorithms.math.masks import apply_mask, masked_row_mean, masked_row_sum
from tests.algorithms import ragged
from tests.algorithms.ragged import BATCHES, Batch

NAN = math.nan
VALUES = torch.tensor([[1.0, NAN, 4.0, NAN], [NAN, NAN, NAN, NAN]])
MASK = torch.tensor([[True, False, True, False], [False, False, False, False]])


def test_apply_mask_puts_0_outside_the_mask():
    assert apply_mask(VALUES, MASK).tolist() == [[1.0, 0.0, 4.0, 0.0], [0.0, 0.0, 0.0, 0.0]]


def test_row_sums_and_means_by_hand_with_an_empty_row():
    assert masked_row_sum(VALUES, MASK).tolist() == [[5.0], [0.0]]
    assert masked_row_mean(VALUES, MASK).tolist() == [[2.5], [0.0]]


def test_masked_nan_gets_no_gradient():
    values = VALUES.clone().requires_grad_()
    (masked_row_mean(values, MASK).sum() + apply_mask(values, MASK).square().sum()).backward()
    assert ragged.gradient(values).tolist() == [[2.5, 0.0, 8.5, 0.0], [0.0, 0.0, 0.0, 0.0]]


@given(batch=BATCHES)
def test_row_sums_and_means_are_over_the_mask(batch: Batch):
    rows = [row["values"] for row in ragged.list_counted_rows(batch)]
    for padded in (batch, ragged.with_nan_padding(batch), ragged.with_more_padding(batch)):
        values, mask = padded["values"], padded["loss_mask"]
        sums, means = masked_row_sum(values, mask)[:, 0], masked_row_mean(values, mask)[:, 0]
        for i, row in enumerate(rows):
            assert math.isclose(sums[i], sum(row), abs_tol=1e-12)
            assert math.isclose(means[i], sum(row) / max(len(row), 1), abs_tol=1e-12)

"""What counts, summed over rows."""

import math

import torch
from hypothesis import given

from streamrl.algorithms.math.masks import apply_mask, masked_row_mean, masked_row_sum
from tests.algorithms.ragged import BATCHES, Batch, gradient, rows_that_count, spoilt, wider

NAN = math.nan
VALUES = torch.tensor([[1.0, NAN, 4.0, NAN], [NAN, NAN, NAN, NAN]])
MASK = torch.tensor([[True, False, True, False], [False, False, False, False]])


def test_keep_puts_0_where_the_mask_is_false():
    assert apply_mask(VALUES, MASK).tolist() == [[1.0, 0.0, 4.0, 0.0], [0.0, 0.0, 0.0, 0.0]]


def test_sums_and_means_of_rows_by_hand_and_0_for_a_row_without_a_token():
    assert masked_row_sum(VALUES, MASK).tolist() == [[5.0], [0.0]]
    assert masked_row_mean(VALUES, MASK).tolist() == [[2.5], [0.0]]


def test_nan_outside_the_mask_gets_no_gradient():
    values = VALUES.clone().requires_grad_()
    (masked_row_mean(values, MASK).sum() + apply_mask(values, MASK).square().sum()).backward()
    assert gradient(values).tolist() == [[2.5, 0.0, 8.5, 0.0], [0.0, 0.0, 0.0, 0.0]]


@given(batch=BATCHES)
def test_sums_and_means_are_those_of_the_tokens_that_count(batch: Batch):
    rows = [row["values"] for row in rows_that_count(batch)]
    for padded in (batch, spoilt(batch), wider(batch)):
        values, mask = padded["values"], padded["loss_mask"]
        sums, means = masked_row_sum(values, mask)[:, 0], masked_row_mean(values, mask)[:, 0]
        for i, row in enumerate(rows):
            assert math.isclose(sums[i], sum(row), abs_tol=1e-12)
            assert math.isclose(means[i], sum(row) / max(len(row), 1), abs_tol=1e-12)

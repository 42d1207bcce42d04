"""Shaping of scores before advantages."""

import math

import torch

from streamrl.algorithms.math.advantages import soft_overlong_penalty

NAN = math.nan


def test_overlong_penalty_by_hand():
    # Each of the last 4 of 10 tokens costs a quarter.
    lengths = torch.tensor([0, 6, 7, 8, 10, 15])
    penalties = soft_overlong_penalty(lengths, max_length=10, buffer=4)
    assert penalties.tolist() == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]
    assert penalties.dtype == torch.float32
    tripled = soft_overlong_penalty(lengths, max_length=10, buffer=4, factor=3.0)
    assert tripled.tolist() == [0.0, 0.0, -0.75, -1.5, -3.0, -3.0]

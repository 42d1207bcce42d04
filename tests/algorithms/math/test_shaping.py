"""Shaping of scores before advantages."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streamrl.algorithms.math.advantages import make_token_rewards, soft_overlong_penalty
from tests.algorithms import ragged
from tests.algorithms.ragged import BATCHES

NAN = math.nan
SEEDS = st.integers(0, 9999)


def test_overlong_penalty_by_hand():
    # Each of the last 4 of 10 tokens costs a quarter.
    lengths = torch.tensor([0, 6, 7, 8, 10, 15])
    penalties = soft_overlong_penalty(lengths, max_length=10, buffer=4)
    assert penalties.tolist() == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]
    assert penalties.dtype == torch.float32
    tripled = soft_overlong_penalty(lengths, max_length=10, buffer=4, factor=3.0)
    assert tripled.tolist() == [0.0, 0.0, -0.75, -1.5, -3.0, -3.0]


@given(st.lists(st.integers(0, 60), min_size=1, max_size=9), st.integers(1, 30), st.floats(0.1, 10))
def test_overlong_penalty_is_linear_from_0_to_minus_factor(lengths, buffer, factor):
    penalties = soft_overlong_penalty(
        torch.tensor(lengths), max_length=40, buffer=buffer, factor=factor
    )
    for length, penalty in zip(lengths, penalties.tolist(), strict=True):
        over = max(min(length, 40) - (40 - buffer), 0)
        assert penalty == pytest.approx(-factor * over / buffer, abs=2e-5)


MASK = torch.tensor(
    [[True, False, True, False], [True, False, False, False], [False, False, False, False]]
)


def test_the_score_is_the_reward_of_the_last_sampled_token():
    rewards = make_token_rewards(torch.tensor([3.0, 4.0, 5.0]), MASK)
    assert rewards.tolist() == [[0, 0, 3.0, 0], [4.0, 0, 0, 0], [0, 0, 0, 0]]


def test_penalties_are_subtracted_from_sampled_tokens():
    penalties = torch.tensor([[0.5, NAN, 0.25, NAN], [-1.0, NAN, NAN, NAN], [NAN] * 4])
    rewards = make_token_rewards(torch.tensor([3.0, 4.0, 5.0]), MASK, penalties)
    assert rewards.tolist() == [[-0.5, 0, 2.75, 0], [5.0, 0, 0, 0], [0, 0, 0, 0]]


def rewards_of(batch):
    return make_token_rewards(batch["scores"], batch["loss_mask"], batch["values"])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_token_rewards_equal_the_reference_in_python_loops(dtype):
    for seed in range(8):
        batch = ragged.make_batch(seed, dtype)
        plain, penalized = [], []
        for row in ragged.list_counted_rows(batch):
            num_tokens = len(row["values"])
            plain.append([0.0] * (num_tokens - 1) + row["scores"][:num_tokens])
            penalized.append([r - x for r, x in zip(plain[-1], row["values"], strict=True)])
        mask = batch["loss_mask"]
        ragged.assert_equals_rows(make_token_rewards(batch["scores"], mask), plain, mask, dtype)
        ragged.assert_equals_rows(rewards_of(batch), penalized, mask, dtype)


@given(batch=BATCHES, seed=SEEDS)
def test_token_rewards_ignore_padding_and_other_rows(batch, seed):
    ragged.assert_padding_has_no_effect(rewards_of, batch)
    ragged.assert_rows_are_independent(rewards_of, batch, seed)

"""Advantages per token, from token rewards and values."""

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streamrl.algorithms.math.advantages import generalized_advantages, masked_whiten, reward_to_go
from tests.algorithms import ragged
from tests.algorithms.ragged import BATCHES, Batch

NAN = math.nan
# Two tokens of the policy with a tool's between them, then padding.
TURNS = torch.tensor([[True, False, True, False]])
REWARDS = torch.tensor([[1.0, NAN, 2.0, NAN]])
VALUES = torch.tensor([[0.5, NAN, 1.0, NAN]])
DISCOUNT: dict[str, Any] = {"gamma": 0.9, "lam": 0.8}
SEEDS = st.integers(0, 9999)


def test_gae_by_hand_skips_tool_tokens():
    # Deltas: 2 - 1 = 1 and 1 + 0.9 * 1 - 0.5 = 1.4; the first advantage 1.4 + 0.72 * 1.
    advantages, returns = generalized_advantages(REWARDS, VALUES, TURNS, **DISCOUNT)
    torch.testing.assert_close(advantages, torch.tensor([[2.12, 0.0, 1.0, 0.0]]))
    torch.testing.assert_close(returns, torch.tensor([[2.62, 0.0, 2.0, 0.0]]))


def test_gae_of_a_truncated_rollout_uses_the_bootstrap_value():
    # Deltas: 2 + 0.9 * 3 - 1 = 3.7 and 1.4; the first advantage 1.4 + 0.72 * 3.7.
    advantages, returns = generalized_advantages(
        REWARDS, VALUES, TURNS, bootstrap_values=torch.tensor([3.0]), **DISCOUNT
    )
    torch.testing.assert_close(advantages, torch.tensor([[4.064, 0.0, 3.7, 0.0]]))
    torch.testing.assert_close(returns, torch.tensor([[4.564, 0.0, 4.7, 0.0]]))


def test_rewards_to_go_by_hand_skip_tool_tokens():
    returns = reward_to_go(REWARDS, TURNS, gamma=0.9)
    torch.testing.assert_close(returns, torch.tensor([[2.8, 0.0, 2.0, 0.0]]))


def test_whitening_by_hand():
    # 1, 2, 3: variance 1 with n - 1, 2/3 with n.
    x = torch.tensor([[1.0, NAN], [2.0, 3.0]])
    mask = torch.tensor([[True, False], [True, True]])
    torch.testing.assert_close(masked_whiten(x, mask), torch.tensor([[-1.0, 0.0], [0.0, 1.0]]))
    third = math.sqrt(1.5)
    biased = masked_whiten(x, mask, unbiased=False)
    torch.testing.assert_close(biased, torch.tensor([[-third, 0.0], [0.0, third]]))


def test_eps_is_added_to_the_variance():
    x, mask = torch.tensor([[-1.0, 1.0]]), torch.tensor([[True, True]])
    assert masked_whiten(x, mask, eps=3.0, unbiased=False).tolist() == [[-0.5, 0.5]]
    # A variance of 3e-8, and a third of it by default.
    small = masked_whiten(x * math.sqrt(3e-8), mask, unbiased=False)
    torch.testing.assert_close(small, x * math.sqrt(3 / 4))


def test_whitening_fewer_than_two_tokens_gives_0():
    x = torch.tensor([[5.0, NAN]])
    for mask in ([[True, False]], [[False, False]]):
        assert masked_whiten(x, torch.tensor(mask)).tolist() == [[0.0, 0.0]]


def test_whitening_equal_values_gives_0():
    assert not masked_whiten(torch.full((2, 2), 4.0), torch.ones(2, 2).bool()).any()


def compute_gae_of_row(
    row: dict[str, list[float]], last: float, gamma: float, lam: float
) -> list[float]:
    """Return the sum of discounted deltas, each written out."""
    rewards, values = row["token_rewards"], [*row["values"], last]
    deltas = [r + gamma * values[t + 1] - values[t] for t, r in enumerate(rewards)]
    return [
        math.fsum((gamma * lam) ** (s - t) * deltas[s] for s in range(t, len(deltas)))
        for t in range(len(deltas))
    ]


def compute_returns_of_row(row: dict[str, list[float]], gamma: float) -> list[float]:
    rewards = row["token_rewards"]
    return [
        math.fsum(gamma ** (s - t) * rewards[s] for s in range(t, len(rewards)))
        for t in range(len(rewards))
    ]


def gae(batch: Batch, gamma: float = 0.9, lam: float = 0.8, bootstrap: bool = True):
    columns = (batch[name] for name in ("token_rewards", "values", "loss_mask"))
    last = batch["scores"] if bootstrap else None
    return generalized_advantages(*columns, gamma=gamma, lam=lam, bootstrap_values=last)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_gae_equals_the_reference_in_python_loops(dtype):
    for seed, bootstrap in itertools.product(range(8), (False, True)):
        batch = ragged.make_batch(seed, dtype)
        mask, rows = batch["loss_mask"], ragged.list_counted_rows(batch)
        advantages, returns = gae(batch, bootstrap=bootstrap)
        last = [row["scores"][0] if bootstrap else 0.0 for row in rows]
        sums = [compute_gae_of_row(row, x, 0.9, 0.8) for row, x in zip(rows, last, strict=True)]
        expected = ragged.place_on_tokens(sums, mask)
        ragged.assert_equals_reference(advantages, expected, dtype)
        values = ragged.place_on_tokens([row["values"] for row in rows], mask)
        ragged.assert_equals_reference(returns, expected + values, dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_rewards_to_go_equal_the_reference_in_python_loops(dtype):
    for seed in range(8):
        batch = ragged.make_batch(seed, dtype)
        expected = [compute_returns_of_row(row, 0.9) for row in ragged.list_counted_rows(batch)]
        result = reward_to_go(batch["token_rewards"], batch["loss_mask"], gamma=0.9)
        ragged.assert_equals_rows(result, expected, batch["loss_mask"], dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_whitening_equals_the_reference_in_python_loops(dtype):
    for seed, unbiased in itertools.product(range(8), (False, True)):
        batch = ragged.make_batch(seed, dtype)
        rows = [row["values"] for row in ragged.list_counted_rows(batch)]
        tokens = [x for row in rows for x in row]
        mean = math.fsum(tokens) / max(len(tokens), 1)
        squares = math.fsum((x - mean) ** 2 for x in tokens)
        deviation = math.sqrt(squares / max(len(tokens) - unbiased, 1) + 1e-8)
        expected = [[(x - mean) / deviation for x in row] for row in rows]
        result = masked_whiten(batch["values"], batch["loss_mask"], unbiased=unbiased)
        ragged.assert_equals_rows(result, expected, batch["loss_mask"], dtype)


def test_long_sums_are_accurate_in_float32():
    rewards = torch.full((1, 3000), 0.1)
    mask, tenth = torch.ones(1, 3000).bool(), rewards[0, 0].item()
    expected = torch.arange(3000, 0, -1).double()[None] * tenth
    result = reward_to_go(rewards, mask, gamma=1.0)
    torch.testing.assert_close(result.double(), expected, atol=0, rtol=1e-7)
    advantages, _ = generalized_advantages(
        rewards, torch.zeros_like(rewards), mask, gamma=1.0, lam=1.0
    )
    torch.testing.assert_close(advantages.double(), expected, atol=0, rtol=1e-7)
    # A mean far from 0 costs little precision.
    far = masked_whiten(2.0**23 + torch.tensor([[0.0, 1.0, 2.0]]), mask[:, :3])
    torch.testing.assert_close(far, torch.tensor([[-1.0, 0.0, 1.0]]))


@given(batch=BATCHES)
def test_gae_with_lam_0_is_the_one_step_td_error(batch):
    advantages, _ = gae(batch, lam=0.0, bootstrap=False)
    errors = []
    for row in ragged.list_counted_rows(batch):
        tokens = zip(row["token_rewards"], row["values"], [*row["values"][1:], 0.0], strict=False)
        errors.append([r + 0.9 * after - now for r, now, after in tokens])
    torch.testing.assert_close(advantages, ragged.place_on_tokens(errors, batch["loss_mask"]))


@given(batch=BATCHES, gamma=st.floats(0.5, 1.0))
def test_gae_with_lam_1_is_return_minus_value(batch, gamma):
    advantages, returns = gae(batch, gamma=gamma, lam=1.0, bootstrap=False)
    mask = batch["loss_mask"]
    expected = reward_to_go(batch["token_rewards"], mask, gamma=gamma)
    torch.testing.assert_close(returns, expected)
    torch.testing.assert_close(advantages, expected - torch.where(mask, batch["values"], 0.0))


@given(batch=BATCHES)
def test_without_discount_every_return_is_the_final_score(batch):
    mask = batch["loss_mask"]
    last = torch.zeros_like(batch["token_rewards"])
    for i, row in enumerate(mask):
        if row.any():
            last[i, row.nonzero().max()] = batch["scores"][i]
    expected = torch.where(mask, batch["scores"][:, None], 0.0)
    assert torch.equal(reward_to_go(last, mask, gamma=1.0), expected)


@given(batch=BATCHES)
def test_a_perfect_critic_gives_zero_advantages(batch):
    mask = batch["loss_mask"]
    right = batch | {"values": reward_to_go(batch["token_rewards"], mask, gamma=0.9)}
    advantages, returns = gae(right, bootstrap=False)
    torch.testing.assert_close(advantages, torch.zeros_like(advantages))
    torch.testing.assert_close(returns, right["values"])


@given(batch=BATCHES)
def test_whitening_gives_mean_0_and_variance_1(batch):
    mask = batch["loss_mask"]
    tokens = masked_whiten(batch["values"], mask)[mask]
    if len(tokens) > 1:
        assert tokens.mean().item() == pytest.approx(0, abs=1e-9)
        variance = batch["values"][mask].var().item()
        # eps shows where values hardly vary.
        assert tokens.var().item() == pytest.approx(variance / (variance + 1e-8), abs=1e-6)


@given(batch=BATCHES, shift=st.integers(-9, 9), factor=st.integers(1, 9))
def test_whitening_ignores_shift_and_scale(batch, shift, factor):
    mask = batch["loss_mask"]
    moved = masked_whiten(batch["values"] * factor + shift, mask, eps=1e-15)
    expected = masked_whiten(batch["values"], mask, eps=1e-15)
    torch.testing.assert_close(moved, expected, atol=1e-9, rtol=0)


FUNCTIONS = {
    "advantages": lambda batch: gae(batch)[0],
    "returns": lambda batch: gae(batch)[1],
    "rewards to go": lambda b: reward_to_go(b["token_rewards"], b["loss_mask"], gamma=0.9),
    "whitened": lambda batch: masked_whiten(batch["values"], batch["loss_mask"]),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@given(batch=BATCHES)
def test_padding_has_no_effect(name, batch):
    ragged.assert_padding_has_no_effect(FUNCTIONS[name], batch)


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "whitened"])
@given(batch=BATCHES, seed=SEEDS)
def test_rows_are_independent(name, batch, seed):
    ragged.assert_rows_are_independent(FUNCTIONS[name], batch, seed)


@given(batch=BATCHES, seed=SEEDS)
def test_whitening_ignores_row_order(batch, seed):
    ragged.assert_row_order_has_no_effect(FUNCTIONS["whitened"], batch, seed)

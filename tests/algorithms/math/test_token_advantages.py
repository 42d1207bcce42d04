"""Advantages per token, from token rewards and values."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given

from streamrl.algorithms.math.advantages import generalized_advantages, masked_whiten, reward_to_go
from tests.algorithms import ragged
from tests.algorithms.ragged import BATCHES, Batch

NAN = math.nan
# Two tokens of the policy with a tool's between them, then padding.
TURNS = torch.tensor([[True, False, True, False]])
REWARDS = torch.tensor([[1.0, NAN, 2.0, NAN]])
VALUES = torch.tensor([[0.5, NAN, 1.0, NAN]])
DISCOUNT: dict[str, Any] = {"gamma": 0.9, "lam": 0.8}


def test_gae_by_hand_skips_tool_tokens():
    # Deltas: 2 - 1 = 1 and 1 + 0.9 * 1 - 0.5 = 1.4; the first advantage 1.4 + 0.72 * 1.
    advantages, returns = generalized_advantages(REWARDS, VALUES, TURNS, **DISCOUNT)
    torch.testing.assert_close(advantages, torch.tensor([[2.12, 0.0, 1.0, 0.0]]))
    torch.testing.assert_close(returns, torch.tensor([[2.62, 0.0, 2.0, 0.0]]))


def test_rewards_to_go_by_hand_skip_tool_tokens():
    returns = reward_to_go(REWARDS, TURNS, gamma=0.9)
    torch.testing.assert_close(returns, torch.tensor([[2.8, 0.0, 2.0, 0.0]]))


def compute_gae_of_row(row: dict[str, list[float]], gamma: float, lam: float) -> list[float]:
    """Return the sum of discounted deltas, each written out."""
    rewards, values = row["token_rewards"], [*row["values"], 0.0]
    deltas = [r + gamma * values[t + 1] - values[t] for t, r in enumerate(rewards)]
    return [
        math.fsum((gamma * lam) ** (s - t) * deltas[s] for s in range(t, len(deltas)))
        for t in range(len(deltas))
    ]


def gae(batch: Batch, gamma: float = 0.9, lam: float = 0.8):
    columns = (batch[name] for name in ("token_rewards", "values", "loss_mask"))
    return generalized_advantages(*columns, gamma=gamma, lam=lam)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_gae_equals_the_reference_in_python_loops(dtype):
    for seed in range(8):
        batch = ragged.make_batch(seed, dtype)
        mask, rows = batch["loss_mask"], ragged.list_counted_rows(batch)
        advantages, returns = gae(batch)
        sums = [compute_gae_of_row(row, 0.9, 0.8) for row in rows]
        expected = ragged.place_on_tokens(sums, mask)
        ragged.assert_equals_reference(advantages, expected, dtype)
        values = ragged.place_on_tokens([row["values"] for row in rows], mask)
        ragged.assert_equals_reference(returns, expected + values, dtype)


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
def test_whitening_gives_mean_0_and_variance_1(batch):
    mask = batch["loss_mask"]
    tokens = masked_whiten(batch["values"], mask)[mask]
    if len(tokens) > 1:
        assert tokens.mean().item() == pytest.approx(0, abs=1e-9)
        variance = batch["values"][mask].var().item()
        # eps shows where values hardly vary.
        assert tokens.var().item() == pytest.approx(variance / (variance + 1e-8), abs=1e-6)

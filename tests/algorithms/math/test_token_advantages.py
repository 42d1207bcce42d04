"""Advantages per token, from token rewards and values."""

import math
from typing import Any

import torch

from streamrl.algorithms.math.advantages import (
    generalized_advantages,
    length_adaptive_lambda,
    masked_whiten,
    reward_to_go,
)

NAN = math.nan
# Two tokens of the policy with a tool's between them, then padding; a single token; none.
TURNS = torch.tensor([[True, False, True, False], [False, True, False, False], [False] * 4])
REWARDS = torch.tensor([[1.0, NAN, 2.0, NAN], [NAN, 3.0, NAN, NAN], [NAN] * 4])
VALUES = torch.tensor([[0.5, NAN, 1.0, NAN], [NAN, 4.0, NAN, NAN], [NAN] * 4])
DISCOUNT: dict[str, Any] = {"gamma": 0.9, "lam": 0.8}


def make_rows(*rows: list[float]) -> torch.Tensor:
    """Return the rows, and one of zeros for that without tokens."""
    return torch.tensor([*rows, [0.0] * 4])


def test_gae_by_hand_skips_tool_tokens():
    # Deltas: 2 - 1 = 1 and 1 + 0.9 * 1 - 0.5 = 1.4; the first advantage 1.4 + 0.72 * 1.
    advantages, returns = generalized_advantages(REWARDS, VALUES, TURNS, **DISCOUNT)
    torch.testing.assert_close(advantages, make_rows([2.12, 0.0, 1.0, 0.0], [0, -1.0, 0, 0]))
    torch.testing.assert_close(returns, make_rows([2.62, 0.0, 2.0, 0.0], [0, 3.0, 0, 0]))


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


def test_lambda_grows_with_the_length_of_a_rollout():
    lengths = torch.tensor([0, 10, 40, 200])
    lam = length_adaptive_lambda(lengths, alpha=0.05)
    torch.testing.assert_close(lam, torch.tensor([0, 0, 0.5, 0.9], dtype=torch.float64))

"""Rewards under a cost limit."""

import math

import pytest
import torch

from streamrl.algorithms import AlgorithmConfig
from streamrl.algorithms.adaptive_params import adapt_multiplier
from streamrl.algorithms.math.advantages import lagrangian_advantages
from streamrl.algorithms.objective import derive_group_columns
from tests.algorithms.steps import make_settings, make_step


def test_lagrangian_advantages_by_hand():
    reward, cost = torch.tensor([1.0, 0.0, -2.0]), torch.tensor([0.5, 1.0, 0.0])
    advantages = lagrangian_advantages(reward, cost, multiplier=3.0)
    torch.testing.assert_close(advantages, torch.tensor([(1 - 1.5) / 4, -3 / 4, -2 / 4]))


def test_multiplier_0_gives_the_reward_advantages():
    reward = torch.tensor([[1.0, -3.0]])
    assert torch.equal(
        lagrangian_advantages(reward, torch.full((1, 2), 9.0), multiplier=0.0), reward
    )


def test_swapping_cost_and_reward_negates_the_advantages():
    reward, cost = torch.randn(5), torch.randn(5)
    advantages, swapped = (
        lagrangian_advantages(a, b, multiplier=1.0) for a, b in ((reward, cost), (cost, reward))
    )
    torch.testing.assert_close(advantages, -swapped)


def test_the_multiplier_stays_positive_and_bounded():
    chosen = {"limit": 0.0, "lr": 0.1, "largest": 5.0}
    assert adapt_multiplier(2.0, 1.0, **chosen) == pytest.approx(2 * math.exp(0.2))
    assert adapt_multiplier(2.0, 0.0, **chosen) == 2.0
    assert 0 < adapt_multiplier(2.0, -100.0, **chosen) < 1e-8
    assert adapt_multiplier(2.0, math.inf, **chosen) == 5.0


SAFE = AlgorithmConfig(name="safe_rlhf", params={"lam": 1.0})


def derive_for_one_rollout(config, **columns):
    """Derive the columns of a rollout with two tokens after a prompt token."""
    step = {
        "lengths": torch.tensor([3]),
        "loss_mask": torch.tensor([[False, True, True]]),
        "finish_reason": torch.tensor([0]),
        "generator_logprobs": torch.tensor([[0.0, -1.0, -2.0]]),
        "ref_logprobs": torch.tensor([[0.0, -1.5, -1.0]]),
        **{name: torch.tensor([value]) for name, value in columns.items()},
    }
    return derive_group_columns(config.spec, make_settings(config), step, torch.tensor([0]))


def test_each_critic_has_its_own_returns():
    values, cost_values = [0.0, 0.5, 0.25], [0.0, 0.1, 0.3]
    derived = derive_for_one_rollout(
        SAFE, scores=2.0, costs=0.7, values=values, cost_values=cost_values
    )
    torch.testing.assert_close(derived["returns"], torch.tensor([[0.0, 2.0, 2.0]]))
    torch.testing.assert_close(derived["cost_returns"], torch.tensor([[0.0, 0.7, 0.7]]))
    expected = [0.0, ((2 - 0.5) - (0.7 - 0.1)) / 2, ((2 - 0.25) - (0.7 - 0.3)) / 2]
    torch.testing.assert_close(derived["advantages"], torch.tensor([expected]))


def test_the_kl_penalty_lowers_rewards_and_raises_costs():
    held = AlgorithmConfig(name="safe_rlhf", params={"lam": 1.0}, kl_coef=0.1)
    nothing = {"values": [0.0] * 3, "cost_values": [0.0] * 3}
    derived = derive_for_one_rollout(held, scores=2.0, costs=0.7, **nothing)
    # k1 of the two tokens: 0.5 and -1.
    torch.testing.assert_close(derived["returns"], torch.tensor([[0.0, 2.05, 2.1]]))
    torch.testing.assert_close(derived["cost_returns"], torch.tensor([[0.0, 0.65, 0.6]]))


def test_token_rewards_are_clipped_to_token_clip():
    clipped = AlgorithmConfig(name="safe_rlhf", params={"lam": 1.0, "token_clip": 0.5})
    nothing = {"values": [0.0] * 3, "cost_values": [0.0] * 3}
    derived = derive_for_one_rollout(clipped, scores=-2.0, costs=0.7, **nothing)
    torch.testing.assert_close(derived["returns"], torch.tensor([[0.0, -0.5, -0.5]]))
    torch.testing.assert_close(derived["cost_returns"], torch.tensor([[0.0, 0.5, 0.5]]))


def test_the_greedy_completion_is_the_baseline_of_its_rollouts():
    config, step = AlgorithmConfig(name="remax"), make_step()
    derived = derive_group_columns(config.spec, make_settings(config), step.columns, step.group_ids)
    lead = step.columns["scores"] - step.columns["baseline_scores"]
    mask = step.columns["loss_mask"]
    torch.testing.assert_close(derived["advantages"][mask], lead[:, None].expand(mask.shape)[mask])

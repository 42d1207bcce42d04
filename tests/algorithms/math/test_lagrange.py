"""Rewards under a cost limit."""

import pytest
import torch

from streamrl.algorithms import AlgorithmConfig
from streamrl.algorithms.math.advantages import lagrangian_advantages
from streamrl.algorithms.objective import derive_group_columns
from tests.algorithms.steps import make_settings, make_step


def test_lagrangian_advantages_by_hand():
    reward, cost = torch.tensor([1.0, 0.0, -2.0]), torch.tensor([0.5, 1.0, 0.0])
    advantages = lagrangian_advantages(reward, cost, multiplier=3.0)
    torch.testing.assert_close(advantages, torch.tensor([(1 - 1.5) / 4, -3 / 4, -2 / 4]))


@pytest.mark.parametrize(
    ("settings", "score", "expected", "expected_costs"),
    [
        ({}, 2.0, [0.0, 2.0, 2.0], [0.0, 0.7, 0.7]),
        # k1 of the two tokens, 0.5 and -1, lowers rewards and raises costs.
        ({"kl_coef": 0.1}, 2.0, [0.0, 2.05, 2.1], [0.0, 0.65, 0.6]),
        ({"params": {"token_clip": 0.5}}, -2.0, [0.0, -0.5, -0.5], [0.0, 0.5, 0.5]),
    ],
)
def test_returns_of_both_critics_by_hand(settings, score, expected, expected_costs):
    # A rollout with two tokens after a prompt token.
    params = {"lam": 1.0, **settings.get("params", {})}
    config = AlgorithmConfig(name="safe_rlhf", **{**settings, "params": params})
    columns = {
        "lengths": torch.tensor([3]),
        "loss_mask": torch.tensor([[False, True, True]]),
        "finish_reason": torch.tensor([0]),
        "generator_logprobs": torch.tensor([[0.0, -1.0, -2.0]]),
        "ref_logprobs": torch.tensor([[0.0, -1.5, -1.0]]),
        "scores": torch.tensor([score]),
        "costs": torch.tensor([0.7]),
        "values": torch.tensor([[0.0, 0.5, 0.25]]),
        "cost_values": torch.tensor([[0.0, 0.1, 0.3]]),
    }
    chosen = make_settings(config)
    derived = derive_group_columns(config.spec, chosen, columns, torch.tensor([0]))
    torch.testing.assert_close(derived["returns"], torch.tensor([expected]))
    torch.testing.assert_close(derived["cost_returns"], torch.tensor([expected_costs]))
    leads = (torch.tensor([expected]) - columns["values"]) * columns["loss_mask"]
    cost_leads = (torch.tensor([expected_costs]) - columns["cost_values"]) * columns["loss_mask"]
    torch.testing.assert_close(derived["advantages"], (leads - cost_leads) / 2)


def test_the_greedy_completion_is_the_baseline_of_its_rollouts():
    config, step = AlgorithmConfig(name="remax"), make_step()
    derived = derive_group_columns(config.spec, make_settings(config), step.columns, step.group_ids)
    to_go = step.columns["token_scores"].flip(-1).cumsum(-1).flip(-1)
    lead = to_go - step.columns["baseline_scores"][:, None]
    mask = step.columns["loss_mask"]
    torch.testing.assert_close(derived["advantages"][mask], lead[mask])

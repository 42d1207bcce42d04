"""A short run of every recipe in configs/ on a toy task: the reward rises."""

from collections.abc import Mapping, Sequence
from statistics import fmean as mean
from typing import Any

import pytest

from tests.e2e.shared_runs import RECIPES, Ended, RunsInTurn


def check_learning(rows: Sequence[Mapping[str, Any]]) -> None:
    """Assert that the reward rises, every step updates, and staleness is at most 1."""
    rewards = [row["reward/mean"] for row in rows]
    # A quarter of a run: single steps vary by more than the reward rises.
    count = max(4, len(rows) // 4)
    assert mean(rewards[-count:]) > mean(rewards[:count]) + 0.03, rewards
    # A critic may be trained alone at first.
    assert all((row["policy/grad_norm"] or 0) > 0 for row in rows[3:])
    assert max(row["staleness/max"] for row in rows) <= 1


@pytest.mark.xdist_group("ppo")
def test_the_ppo_recipe_trains_policy_and_critic_and_its_reward_rises(ppo_run: Ended):
    assert ppo_run.code == 0, ppo_run.output
    rows = ppo_run.rows
    assert [row["step"] for row in rows] == list(range(1, 11))
    check_learning(rows)
    assert not any(row["staleness/max"] for row in rows), "its bound is 0"
    assert all(row["critic/grad_norm"] > 0 for row in rows)
    losses = [row["loss/value"] for row in rows]
    assert mean(losses[-3:]) < losses[0], "the critic learns"


@pytest.mark.slow
@pytest.mark.xdist_group("recipes")
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_runs_and_its_reward_rises(recipe_runs: RunsInTurn, recipe: str):
    run = recipe_runs.wait(recipe)
    assert run.code == 0, run.output
    rows = run.rows
    assert f"run.steps={len(rows)}" in RECIPES[recipe][1]
    check_learning(rows)
    if recipe == "safe_rlhf":
        costs = [row["cost/mean"] for row in rows]
        assert mean(costs[-6:]) < mean(costs[:6]) - 0.02, costs
    if recipe == "colocated":
        assert not any(row["weights/bytes"] for row in rows)


@pytest.mark.slow
@pytest.mark.xdist_group("recipes")
def test_recipes_leave_no_process(recipe_runs: RunsInTurn):
    assert recipe_runs.run.wait() == 0
    assert recipe_runs.run.orphans() == []

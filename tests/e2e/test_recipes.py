"""Every recipe in configs/ on a toy task, in short: it runs, and the reward rises."""

from statistics import fmean as mean

import pytest

from tests.e2e.launched import rows
from tests.e2e.recital import RECIPES, Recital

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_runs_and_its_reward_rises(recital: Recital, name: str) -> None:
    run, code, run_dir = recital.played(name)
    assert code == 0, run.output
    found = rows(run_dir)
    assert f"run.steps={len(found)}" in RECIPES[name][1]
    rewards = [row["reward/mean"] for row in found]
    assert mean(rewards[-4:]) > mean(rewards[:4]) + 0.03, rewards
    if name == "safe_rlhf":
        costs = [row["cost/mean"] for row in found]
        assert mean(costs[-6:]) < mean(costs[:6]) - 0.02, costs
    if name == "colocated":
        # As the demo does, see test_demo.py.
        assert mean(rewards[-5:]) > 0.9
        assert not any(row["weights/bytes"] for row in found)
    # A critic may be trained alone at first.
    assert all((row["policy/grad_norm"] or 0) > 0 for row in found[3:])
    assert max(row["staleness/max"] for row in found) <= 1

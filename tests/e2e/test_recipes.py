"""Every recipe in configs/ on a toy task, in short: it runs, and the reward rises."""

import re
import subprocess
import sys
from pathlib import Path
from statistics import fmean as mean

import pytest

from tests.e2e.launched import Launched, rows

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
CUSTOM = ["algorithm.path=examples/custom_algorithm/median.py", "algorithm.name=median_grpo"]
SHARED = ["critic={shared_coef: 0.5}"]
STEPS = 12
RECIPES = {
    # The longest come first: where two are played side by side, none is left over. This one is
    # whole.
    "colocated": (ROOT / "configs" / "grpo_arithmetic_colocated.yaml", ["run.steps=80"]),
    "grpo_code": (ROOT / "configs" / "grpo_code.yaml", [f"run.steps={STEPS}"]),
    # It is slow to learn.
    "grpo_countdown": (ROOT / "configs" / "grpo_countdown.yaml", ["run.steps=30"]),
    # Costs give way more slowly than rewards come.
    "safe_rlhf": (ROOT / "configs" / "safe_rlhf_toy.yaml", ["run.steps=26"]),
    "shared": (ROOT / "configs" / "ppo_arithmetic.yaml", [*SHARED, f"run.steps={STEPS}"]),
    "custom": (ROOT / "configs" / "grpo_arithmetic.yaml", [*CUSTOM, f"run.steps={STEPS}"]),
} | {
    path.stem.removesuffix("_arithmetic"): (path, [f"run.steps={STEPS}"])
    for path in sorted((ROOT / "configs").glob("*_arithmetic.yaml"))
    # The demo runs it whole.
    if path.stem != "grpo_arithmetic"
}


def play(name: str, folder: Path) -> Path:
    """A recipe to its end, on tasks made anew; its run's directory, in the folder."""
    recipe, overrides = RECIPES[name]
    for task in sorted(set(re.findall(r"examples/(\w+)/build", recipe.read_text()))):
        make = [sys.executable, str(ROOT / "examples" / task / "make.py")]
        subprocess.run(make, check=True, capture_output=True, timeout=600)
    words = [str(recipe), f"run.dir={folder}", f"run.name={name}", *overrides]
    short = ['data.eval=""', "checkpoint.at_end=false", "telemetry.wandb.mode=disabled"]
    # Recipes name their files from the root of the repository.
    run = Launched(["train", *words, *short], folder, cwd=ROOT)
    assert run.wait() == 0, run.output
    return folder / name


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_runs_and_its_reward_rises(tmp_path: Path, name: str) -> None:
    found = rows(play(name, tmp_path))
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

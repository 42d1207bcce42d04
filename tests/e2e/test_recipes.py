"""Every recipe in configs/ on the demo's task, in short: it runs, and the reward rises."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean as mean

import pytest

from tests.e2e.launched import Launched, rows

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
CUSTOM = ["algorithm.path=examples/custom_algorithm/median.py", "algorithm.name=median_grpo"]
SHARED = ["critic.shared_coef=0.5", "critic.warmup_alone=0"]
STEPS = 16
RECIPES = {
    path.stem.removesuffix("_arithmetic"): (path, [f"run.steps={STEPS}"])
    for path in sorted((ROOT / "configs").glob("*_arithmetic.yaml"))
    # The demo runs it whole.
    if path.stem != "grpo_arithmetic"
} | {
    "custom": (ROOT / "configs" / "grpo_arithmetic.yaml", [*CUSTOM, f"run.steps={STEPS}"]),
    # Costs give way more slowly than rewards come.
    "safe_rlhf": (ROOT / "configs" / "safe_rlhf_toy.yaml", ["run.steps=26"]),
    "shared": (ROOT / "configs" / "ppo_arithmetic.yaml", [*SHARED, f"run.steps={STEPS}"]),
}
AT_ONCE = 2
"""Most of a short run is start-up, of which much is waiting."""


def play(name: str, folder: Path) -> tuple[Launched, int]:
    recipe, overrides = RECIPES[name]
    # Recipes name their files from the root of the repository, where the tests are run too.
    run = Launched(
        [
            *("train", str(recipe), f"run.dir={folder}", f"run.name={name}"),
            *('data.eval=""', "checkpoint.at_end=false", *overrides),
        ],
        folder,
    )
    return run, run.wait(timeout_s=600.0)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Launched, int, Path]]:
    make = [sys.executable, str(ROOT / "examples" / "arithmetic" / "make.py")]
    subprocess.run(make, check=True, timeout=600)
    folder = tmp_path_factory.mktemp("recipes")
    with ThreadPoolExecutor(AT_ONCE) as pool:
        ended = dict(zip(RECIPES, pool.map(lambda name: play(name, folder), RECIPES), strict=True))
    return {name: (run, code, folder / name) for name, (run, code) in ended.items()}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_runs_and_its_reward_rises(played, name: str) -> None:
    run, code, run_dir = played[name]
    assert code == 0, run.output
    found = rows(run_dir)
    assert f"run.steps={len(found)}" in RECIPES[name][1]
    rewards = [row["reward/mean"] for row in found]
    assert mean(rewards[-4:]) > mean(rewards[:4]) + 0.03, rewards
    if name == "safe_rlhf":
        costs = [row["cost/mean"] for row in found]
        assert mean(costs[-6:]) < mean(costs[:6]) - 0.02, costs
    # A critic may be trained alone at first.
    assert all((row["policy/grad_norm"] or 0) > 0 for row in found[3:])
    assert max(row["staleness/max"] for row in found) <= 1

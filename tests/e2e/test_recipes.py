"""Every recipe in configs/ on the demo's task, in short: it runs, and the reward rises."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.launched import Launched, rows

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
CUSTOM = ["algorithm.path=examples/custom_algorithm/median.py", "algorithm.name=median_grpo"]
RECIPES = {
    path.stem.removesuffix("_arithmetic"): (path, list[str]())
    for path in sorted((ROOT / "configs").glob("*_arithmetic.yaml"))
    # The demo runs it whole.
    if path.stem != "grpo_arithmetic"
} | {"custom": (ROOT / "configs" / "grpo_arithmetic.yaml", CUSTOM)}
STEPS = 16
AT_ONCE = 2
"""Most of a short run is start-up, of which much is waiting."""


def play(name: str, folder: Path) -> tuple[Launched, int]:
    recipe, overrides = RECIPES[name]
    # Recipes name their files from the root of the repository, where the tests are run too.
    run = Launched(
        [
            *("train", str(recipe), f"run.dir={folder}", f"run.name={name}"),
            *(f"run.steps={STEPS}", 'data.eval=""', "checkpoint.at_end=false", *overrides),
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
    assert len(found) == STEPS
    rewards = [row["reward/mean"] for row in found]
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.03, rewards
    # A critic may be trained alone at first.
    assert all((row["policy/grad_norm"] or 0) > 0 for row in found[3:])
    assert max(row["staleness/max"] for row in found) <= 1

"""The recipes in configs/ on the toy tasks, in short, played beside whatever tests there are.

Most of a short run is the start of processes, which Ray lets run only where others leave room.
"""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.e2e.launched import MARK, Launched

ROOT = Path(__file__).resolve().parents[2]
CUSTOM = ["algorithm.path=examples/custom_algorithm/median.py", "algorithm.name=median_grpo"]
SHARED = ["critic={shared_coef: 0.5}"]
STEPS = 12
RECIPES = {
    # The longest come first: what is played beside other whole runs is short. This one is whole.
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


class Recital:
    """Recipes, by name, one after the other; their runs go into a folder."""

    def __init__(self, names: Sequence[str], folder: Path) -> None:
        self._folder = folder
        # Tests change both, for themselves, while the recipes are played.
        self._environment, self._cwd = {**os.environ, MARK: "recital"}, Path.cwd()
        self._runs: dict[str, Launched] = {}
        self._pool = ThreadPoolExecutor(1)
        self._codes = {name: self._pool.submit(self._play, name) for name in names}

    def played(self, name: str) -> tuple[Launched, int, Path]:
        """The run of a recipe once it has ended, its exit code and its directory."""
        code = self._codes[name].result()
        return self._runs[name], code, self._folder / name

    def close(self) -> None:
        """End the run under way, if there is one; no other is started."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for run in self._runs.values():
            run.end()

    def _play(self, name: str) -> int:
        recipe, overrides = RECIPES[name]
        facts = {"cwd": self._cwd, "env": self._environment, "timeout": 600}
        for task in sorted(set(re.findall(r"examples/(\w+)/build", recipe.read_text()))):
            make = [sys.executable, str(ROOT / "examples" / task / "make.py")]
            # Others look at what is printed while this runs.
            subprocess.run(make, check=True, capture_output=True, **facts)
        # Recipes name their files from the root of the repository, where the tests are run too.
        words = [str(recipe), f"run.dir={self._folder}", f"run.name={name}", *overrides]
        short = ['data.eval=""', "checkpoint.at_end=false", "telemetry.wandb.mode=disabled"]
        self._runs[name] = Launched(
            ["train", *words, *short], self._folder, inherits=self._environment, cwd=self._cwd
        )
        return self._runs[name].wait(timeout_s=600.0)

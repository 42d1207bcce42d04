"""Whole runs that several tests read: each is started once in a session.

Tests that read one run carry the same `xdist_group`, so that one process runs all of them.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.in_turn import HEADING, code_file
from tests.e2e.launched import Launched, rows
from tests.e2e.outside import Outside, inspect_run

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs"
BUILD = ROOT / "examples" / "arithmetic" / "build"
BARE = ['data.eval=""', "checkpoint.at_end=false", "telemetry.wandb.mode=disabled"]
"""Overrides of a run whose tests look at its steps only."""
PPO_ODD = ["pipeline.groups_per_step=129", "algorithm.mini_batches=3", "critic.warmup_alone=1"]
"""Overrides of the PPO recipe: two ranks cannot share its steps evenly, nor its updates."""

_CUSTOM = ["algorithm.path=examples/custom_algorithm/median.py", "algorithm.name=median_grpo"]
_STEPS = 12
_SHORT_DECAY = "trainer.lr_decay_steps=15"
RECIPES = {
    "colocated": ("grpo_arithmetic_colocated.yaml", [f"run.steps={_STEPS}"]),
    "grpo_code": ("grpo_code.yaml", [f"run.steps={_STEPS}"]),
    # Learns slowly.
    "grpo_countdown": ("grpo_countdown.yaml", ["run.steps=30"]),
    # Episodes of several turns.
    "grpo_calculator": ("grpo_calculator.yaml", [f"run.steps={_STEPS}"]),
    "grpo_guess": ("grpo_guess.yaml", ["run.steps=30", _SHORT_DECAY]),
    # Costs fall more slowly than rewards rise.
    "safe_rlhf": ("safe_rlhf_toy.yaml", ["run.steps=26", "pipeline.groups_per_step=128"]),
    "shared_critic": ("ppo_arithmetic.yaml", ["critic={shared_coef: 0.5}", f"run.steps={_STEPS}"]),
    "custom": ("grpo_arithmetic.yaml", [*_CUSTOM, f"run.steps={_STEPS}"]),
} | {
    path.stem.removesuffix("_arithmetic"): (path.name, [f"run.steps={_STEPS}"])
    for path in sorted(CONFIGS.glob("*_arithmetic.yaml"))
    # The fixtures `demo` and `ppo_run` run these two.
    if path.stem not in ("grpo_arithmetic", "ppo_arithmetic")
}
"""Recipes in configs/ by name, each with the overrides that make it short."""


@dataclass(frozen=True)
class Ended:
    """A run that has ended; `outside`: see tests/e2e/outside.py."""

    code: int
    output: str
    run_dir: Path
    outside: Outside | None = None

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Metrics per step."""
        return rows(self.run_dir)


SHORT_BUILDS: dict[str, dict[str, int]] = {
    "calculator": {"num_steps": 200},
    "countdown": {"num_clean_steps": 200, "num_slip_steps": 25},
    "guess": {"num_steps": 200},
}
"""Steps of base models that suffice for the reward of a short run to rise, by task.

The models of the tasks code and reward_model learn nothing of use in half of their steps.
"""


def write_short_recipe(recipe: Path, folder: Path) -> Path:
    """Write a recipe that uses short builds of its task, made in the folder if missing."""
    text = recipe.read_text()
    for task, steps in SHORT_BUILDS.items():
        name, build = f"examples/{task}/build", folder / "builds" / task
        if name in text and not build.exists():
            build.mkdir(parents=True)
            full = import_module(f"examples.{task}.training").RECIPE
            short = replace(full, num_measured=16, bar={}, **steps)
            import_module(f"examples.{task}.make").write_contents(build, 0, recipe=short)
        text = text.replace(name, str(build))
    written = folder / recipe.name
    written.write_text(text)
    return written


def make_builds(recipes: Iterable[Path]) -> None:
    """Make the base models and data that recipes name, unless they exist."""
    text = "".join(path.read_text() for path in recipes)
    for task in sorted(set(re.findall(r"examples/(\w+)/build", text))):
        make = [sys.executable, str(ROOT / "examples" / task / "make.py")]
        subprocess.run(make, check=True, capture_output=True, timeout=900)


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """The demo, trained to its end, with wandb and two evaluation files.

    While it trains it is inspected from outside.
    """
    folder = tmp_path_factory.mktemp("demo")
    recipe = CONFIGS / "grpo_arithmetic.yaml"
    make_builds([recipe])
    words = ["train", str(recipe), f"run.dir={folder}", "run.name=demo", "checkpoint.every=40"]
    words.append(f"data.eval=[{BUILD}/eval.parquet, {{path: {BUILD}/eval.jsonl, name: again}}]")
    run = Launched([*words, "telemetry.wandb.mode=offline"], folder)
    run.until(lambda: len(rows(folder / "demo")) > 1)
    outside = inspect_run(run)
    code = run.wait()
    assert run.orphans() == []
    return Ended(code, run.output, folder / "demo", outside)


@pytest.fixture(scope="session")
def ppo_run(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """A short on-policy run of the PPO recipe, which an own loop can repeat."""
    folder = tmp_path_factory.mktemp("ppo")
    recipe = CONFIGS / "ppo_arithmetic.yaml"
    make_builds([recipe])
    short = ["run.steps=10", *PPO_ODD, "pipeline.max_staleness=0", *BARE]
    run = Launched(["train", str(recipe), f"run.dir={folder}", "run.name=ppo", *short], folder)
    code = run.wait()
    assert run.orphans() == []
    return Ended(code, run.output, folder / "ppo")


class RunsInTurn:
    """Commands by name, one after the other in one process, to import the driver once."""

    def __init__(self, commands: Mapping[str, Sequence[str]], folder: Path) -> None:
        """Start the commands; each run's directory is named after it in `folder`."""
        self._folder = folder
        words = [str(folder), *(json.dumps([name, *words]) for name, words in commands.items())]
        self.run = Launched(words, folder, module="tests.e2e.in_turn")

    def wait(self, name: str) -> Ended:
        """Wait for a command."""
        code = code_file(self._folder, name)
        if not code.exists():
            self.run.until(code.exists)
        _, _, behind = self.run.output.partition(f"{HEADING} {name}\n")
        output, _, _ = behind.partition(HEADING)
        return Ended(int(code.read_text()), output, self._folder / name)


@pytest.fixture(scope="session")
def recipe_runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> RunsInTurn:
    """Runs of the recipes that this session's tests need."""
    needed = {
        item.callspec.params["recipe"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and {"recipe", "recipe_runs"} <= {*item.fixturenames}
    }
    folder = tmp_path_factory.mktemp("recipes")
    chosen = {name: recipe for name, recipe in RECIPES.items() if name in needed}
    recipes = {
        name: write_short_recipe(CONFIGS / file, folder) for name, (file, _) in chosen.items()
    }
    make_builds(recipes.values())
    commands = {
        name: ["train", str(recipes[name]), f"run.dir={folder}", f"run.name={name}", *short, *BARE]
        for name, (_, short) in chosen.items()
    }
    return RunsInTurn(commands, folder)

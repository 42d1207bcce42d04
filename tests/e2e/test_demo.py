"""The demo: the recipe in configs/ teaches the model that examples/ makes."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.launched import Launched, events, rows

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


def test_the_demo_learns_within_its_bound_and_evaluates_better_on_held_out_prompts(
    tmp_path: Path,
) -> None:
    make = [sys.executable, str(ROOT / "examples" / "arithmetic" / "make.py")]
    subprocess.run(make, check=True, timeout=600)
    recipe = ROOT / "configs" / "grpo_arithmetic.yaml"
    build = ROOT / "examples" / "arithmetic" / "build"
    run = Launched(
        [
            "train",
            str(recipe),
            f"run.dir={tmp_path}",
            "run.name=demo",
            # The recipe's own paths are relative to the repository.
            f"model.path={build}/base_model",
            f"data.train={build}/train.parquet",
            f"data.eval={build}/eval.parquet",
        ],
        tmp_path,
    )
    assert run.wait(timeout_s=480.0) == 0, run.output
    found = rows(tmp_path / "demo")
    rewards = [row["reward/mean"] for row in found]
    assert sum(rewards[:5]) / 5 < 0.6
    assert sum(rewards[-5:]) / 5 > 0.9
    assert max(row["staleness/max"] for row in found) == 1
    (base,) = events(tmp_path / "demo", "base_evaluation")
    assert base["eval/pass_at_1"] < 0.6
    assert found[-1]["eval/pass_at_1"] > 0.88

    score = subprocess.run(
        [
            *(sys.executable, "-m", "streamrl.cli.main", "evaluate", str(tmp_path / "demo")),
            *("--data", f"{build}/eval.jsonl", "--samples", "2"),
        ],
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert "pass@1" in score.stdout and "mean@2" in score.stdout
    assert float(score.stdout.split("pass@1")[1].split()[0]) > 0.85

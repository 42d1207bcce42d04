"""The demo: the recipe in configs/ teaches the model that examples/ makes."""

import subprocess
import sys

import pytest

from tests.e2e.launched import events
from tests.e2e.shared_runs import BUILD, Ended

pytestmark = pytest.mark.xdist_group("demo")


def test_the_demo_learns_within_its_bound_and_evaluates_better_on_held_out_prompts(
    demo: Ended,
) -> None:
    assert demo.code == 0, demo.output
    found = demo.rows
    rewards = [row["reward/mean"] for row in found]
    assert sum(rewards[:5]) / 5 < 0.6
    assert sum(rewards[-5:]) / 5 > 0.9
    assert max(row["staleness/max"] for row in found) == 1
    (base,) = events(demo.run_dir, "base_evaluation")
    assert base["eval/pass_at_1"] < 0.6
    assert found[-1]["eval/pass_at_1"] > 0.88


@pytest.mark.slow
def test_evaluate_scores_the_demos_checkpoint_on_a_file(demo: Ended) -> None:
    score = subprocess.run(
        [
            *(sys.executable, "-m", "streamrl.cli.main", "evaluate", str(demo.run_dir)),
            *("--data", f"{BUILD}/eval.jsonl", "--samples", "2"),
        ],
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert "pass@1" in score.stdout and "mean@2" in score.stdout
    assert float(score.stdout.split("pass@1")[1].split()[0]) > 0.85

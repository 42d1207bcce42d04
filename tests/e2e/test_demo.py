"""The demo: the recipe in configs/ teaches the model that examples/ makes."""

import subprocess
import sys

import pytest

from tests.e2e.launched import events
from tests.e2e.shared_runs import BUILD, Ended

pytestmark = pytest.mark.xdist_group("demo")


def test_demo_learns_within_max_staleness_and_improves_on_held_out_prompts(demo: Ended):
    assert demo.code == 0, demo.output
    metrics = demo.rows
    rewards = [row["reward/mean"] for row in metrics]
    assert sum(rewards[:5]) / 5 < 0.6
    assert sum(rewards[-5:]) / 5 > 0.9
    assert max(row["staleness/max"] for row in metrics) == 1
    (base,) = events(demo.run_dir, "base_evaluation")
    assert base["eval/pass_at_1"] < 0.6
    assert metrics[-1]["eval/pass_at_1"] > 0.88


@pytest.mark.slow
def test_evaluate_scores_the_demos_checkpoint_on_a_file(demo: Ended):
    command = [sys.executable, "-m", "streamrl.cli", "evaluate", str(demo.run_dir)]
    command += ["--data", f"{BUILD}/eval.jsonl", "--samples", "2"]
    output = subprocess.check_output(command, text=True, timeout=300)
    assert "pass@1" in output and "mean@2" in output
    assert float(output.split("pass@1")[1].split()[0]) > 0.85

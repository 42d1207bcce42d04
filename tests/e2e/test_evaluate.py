"""`streamrl evaluate` on a plain model directory."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from streamrl.cli.main import main


def evaluate(*words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "streamrl.cli", "evaluate", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


@pytest.mark.slow
def test_evaluate_scores_a_plain_model_with_a_recipes_rewards(toy: Path):
    recipe = toy / "numeric.yaml"
    text = (toy / "recipe.yaml").read_text()
    recipe.write_text(text.replace("{kind: exact}", "{kind: numeric, weight: 2}"))
    rows, other = toy / "rows.jsonl", toy / "other" / "rows.jsonl"
    other.parent.mkdir()
    other.write_text(rows.read_text().replace('"toy"', '"org/other"'))
    words = [str(toy / "model"), "--data", str(rows), "--data", str(other), "--config", str(recipe)]
    result = evaluate(*words, "--limit", "4", "--json")
    assert all(line.startswith("streamrl: ") for line in result.stderr.splitlines())
    scores = json.loads(result.stdout)
    assert scores["rewards"] == ["numeric"]
    assert scores["model"] == str(toy / "model")
    assert scores["unscored"] == 0
    assert 2 * scores["pass@1"] == scores["mean@2"] < 1
    assert scores["pass@1"] <= scores["pass@2"] and "pass@4" not in scores
    low, high = scores["pass@1_interval"]
    assert low <= scores["pass@1"] <= high
    assert scores["prompts"] == 8
    assert [part["prompts"] for part in scores["by_file"].values()] == [4, 4]
    assert list(scores["by_file"]) == [str(rows), str(other)]
    assert list(scores["by_source"]) == ["org/other", "toy"]


def test_evaluate_needs_files_or_a_recipe_that_names_some(
    toy: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["evaluate", str(toy / "model")]) == 2
    assert "give prompt files with --data" in capsys.readouterr().err


@pytest.mark.slow
def test_the_longest_completion_fits_a_small_model(toy: Path):
    result = evaluate(str(toy / "model"), "--data", str(toy / "rows.jsonl"), "--limit", "2")
    assert "scored by exact; at most 64 new tokens" in result.stdout
    assert re.search(r"^  pass@1 +[\d.]+  \(95 %: [\d.]+ to [\d.]+\)$", result.stdout, re.MULTILINE)

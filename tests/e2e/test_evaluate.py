"""`streamrl evaluate` on a plain model directory."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from streamrl.cli.main import main
from tests.toy import write_toy


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy(tmp_path_factory.mktemp("toy"))


@pytest.mark.slow
def test_a_plain_model_is_scored_as_a_recipe_does(toy: Path) -> None:
    recipe = toy / "numeric.yaml"
    text = (toy / "recipe.yaml").read_text()
    recipe.write_text(text.replace("{kind: exact}", "{kind: numeric}"))
    rows, other = toy / "rows.jsonl", toy / "other" / "rows.jsonl"
    other.parent.mkdir()
    other.write_text(rows.read_text().replace('"toy"', '"org/other"'))
    words = [str(toy / "model"), "--data", str(rows), "--data", str(other), "--config", str(recipe)]
    result = subprocess.run(
        [sys.executable, "-m", "streamrl.cli.main", "evaluate", *words, "--limit", "4", "--json"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert result.stderr == ""
    found = json.loads(result.stdout)
    assert found["rewards"] == ["numeric"]
    assert found["model"] == str(toy / "model")
    assert found["unscored"] == 0
    assert found["pass@1"] == found["mean@4"] < 0.5
    assert found["pass@1"] <= found["pass@2"] <= found["pass@4"]
    low, high = found["pass@1_interval"]
    assert low <= found["pass@1"] <= high
    assert found["prompts"] == 8
    assert [part["prompts"] for part in found["by_file"].values()] == [4, 4]
    assert list(found["by_file"]) == [str(rows), str(other)]
    assert list(found["by_source"]) == ["org/other", "toy"]


def test_the_longest_completion_fits_a_small_model(toy: Path) -> None:
    words = [str(toy / "model"), "--data", str(toy / "rows.jsonl"), "--limit", "2"]
    assert main(["evaluate", words[0]]) == 2, "nothing says what it is evaluated on"
    result = subprocess.run(
        [sys.executable, "-m", "streamrl.cli.main", "evaluate", *words],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "scored by exact; at most 64 new tokens" in result.stdout
    assert re.search(r"^  pass@1 +[\d.]+  \(95 %: [\d.]+ to [\d.]+\)$", result.stdout, re.MULTILINE)

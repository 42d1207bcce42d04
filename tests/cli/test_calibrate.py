"""`streamrl calibrate`: what it prints and writes, and what it refuses."""

import json
from pathlib import Path

import pytest
import yaml

from streamrl.cli.main import main
from streamrl.placement.costs import Constants
from tests.calibration.runs import TRUE, play, recipe, write_run


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    config = recipe(tmp_path)
    return write_run(tmp_path / "run", config, play(config))


def test_the_constants_of_a_run_are_printed_and_written(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "constants.yaml"
    assert main(["calibrate", str(run_dir), "-o", str(out)]) == 0
    text = capsys.readouterr().out
    assert "12 steps of" in text and "left out: 3 to warm up" in text
    assert "decode_step_s" in text and f"written     {out}" in text
    written = Constants.read(out)
    assert written.hop_s == pytest.approx(TRUE.hop_s, rel=0.05)
    assert written.begin_s == pytest.approx(TRUE.generator.begin_s, rel=0.05)
    assert set(yaml.safe_load(out.read_text())) == set(vars(Constants()))


def test_json_has_every_constant_with_its_default_and_how_well_it_fits(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", str(run_dir), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    one = found["determined"]["update_s"]
    assert one["default"] == pytest.approx(0.05)
    assert one["count"] > 5 and one["residual"] < 0.01 and one["is_known"]
    assert abs(found["simulated"]["step_s"]["error"]) < 0.1
    assert found["cores"] == {"cores": 2, "taken": 0.0, "queue": 0.0}


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (["nowhere"], "no run: no such directory"),
        (["{run}", "--cluster", "8xZ9"], "not in the table"),
        (["{run}", "--cluster", "1xH100"], "the run has 2 devices"),
    ],
)
def test_wrong_input_is_one_line_and_code_2(
    run_dir: Path, words: list[str], rule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", *(word.format(run=run_dir) for word in words)]) == 2
    error = capsys.readouterr().err
    assert rule in error and error.count("\n") == 1

"""`streamrl calibrate`: console output, written constants, refusals."""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from streamrl.cli.main import main
from streamrl.planner.costs.constants import CostConstants
from tests.planner.calibration.runs import TRUE, play, recipe, write_run


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    config = recipe(tmp_path)
    return write_run(tmp_path / "run", config, play(config))


def test_fitted_constants_are_printed_and_written(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "constants.yaml"
    assert main(["calibrate", str(run_dir), "-o", str(out)]) == 0
    text = capsys.readouterr().out
    assert "12 steps of" in text and "left out: 3 to warm up" in text
    assert "decode_step_s" in text and f"written     {out}" in text
    written = CostConstants.from_yaml(out)
    assert written.hop_s == pytest.approx(TRUE.hop_s, rel=0.05)
    assert written.begin_s == pytest.approx(TRUE.generator.begin_s, rel=0.05)
    assert set(yaml.safe_load(out.read_text())) == set(vars(CostConstants()))


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (["{run}", "--cluster", "8xZ9"], "not in the table"),
        (["{run}", "--cluster", "1xH100"], "the run uses 2 devices"),
        # The output is checked before the run is read.
        (["nowhere", "-o", "/dev/null"], "-o /dev/null: not a file"),
    ],
)
def test_bad_input_is_a_one_line_error(
    run_dir: Path, words: list[str], rule: str, refuse: Callable[..., str]
):
    error = refuse("calibrate", *(word.format(run=run_dir) for word in words))
    assert rule in error

"""`streamrl report RUN`: bottleneck and advice as text and JSON."""

import json
import shutil
from pathlib import Path

import pytest

from streamrl.cli.main import main
from tests.planner.calibration.runs import play, recipe, write_run


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("advice")
    config = recipe(folder)
    return write_run(folder / "run", config, play(config))


def test_the_bottleneck_is_reported_without_a_simulation(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["report", str(run_dir)]) == 0
    text = capsys.readouterr().out
    assert "bound by    " in text and "groups wait for it" in text
    assert main(["report", str(run_dir), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["bound_by"] in report["stages"]


def test_a_stage_without_queue_depth_omits_the_waiting_groups(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run_copy = shutil.copytree(run_dir, tmp_path / "run")
    path = run_copy / "metrics.jsonl"
    path.write_text(path.read_text().replace("queue/depth/train", "other"))
    assert main(["report", str(run_copy)]) == 0
    text = capsys.readouterr().out
    assert "nan" not in text
    lines_by_stage = {line.split()[0]: line for line in text.splitlines() if line.startswith("  ")}
    assert "waiting" not in lines_by_stage["train"] and "waiting" in lines_by_stage["reward"]

"""`streamrl scale`: refusals and the printed answer."""

import threading
import time
from pathlib import Path

import pytest

from streamrl.cli.main import main
from streamrl.config.run_config import dump_config, load_config
from streamrl.run_dir.control_requests import ScaleAnswer, ScaleRequestInbox

RECIPE = Path(__file__).parents[2] / "configs" / "grpo_arithmetic.yaml"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").write_text(dump_config(load_config(RECIPE)))
    return tmp_path


def test_a_stopped_run_or_an_unknown_role_is_a_one_line_error(run_dir: Path, refuse):
    error = refuse("scale", run_dir, "--generators", "2")
    assert error == f"streamrl: {run_dir}: the run is not running, or still starting"
    error = refuse("scale", run_dir, "--cost-value", "2")
    assert error == "streamrl: --cost-value: this run has no cost_value"


def test_a_role_that_a_trained_models_ranks_compute_is_refused_with_these(run_dir: Path, refuse):
    config = load_config(RECIPE, ["algorithm.name=ppo"])
    (run_dir / "config.yaml").write_text(dump_config(config))
    error = refuse("scale", run_dir, "--value", "2")
    assert error == "streamrl: --value: this run has no value: the ranks of critic compute it"


@pytest.mark.parametrize("is_done", [True, False])
def test_the_answer_sets_the_exit_code(
    run_dir: Path, capsys: pytest.CaptureFixture[str], is_done: bool
):
    mailbox = ScaleRequestInbox(run_dir)
    mailbox.open()

    def answer() -> None:
        while not (requests := mailbox.take_requests()):
            time.sleep(0.01)
        lines = [f"{role}: 1 -> {count}" for role, count in requests[0].counts.items()]
        mailbox.write_answer(requests[0].id, ScaleAnswer(lines, is_done))

    answering = threading.Thread(target=answer, daemon=True)
    answering.start()
    code = main(["scale", str(run_dir), "--generators", "2", "--scorers", "3"])
    answering.join()
    printed = capsys.readouterr()
    if is_done:
        assert (code, printed.out) == (0, "generator: 1 -> 2\nreward: 1 -> 3\n")
    else:
        assert (code, printed.err) == (2, "streamrl: generator: 1 -> 2; reward: 1 -> 3\n")

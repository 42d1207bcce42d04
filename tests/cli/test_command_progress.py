"""Commands count their work for the progress line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streamrl.cli.main import main
from streamrl.telemetry import progress as progress_line
from streamrl.telemetry.progress import WorkStatus
from tests.cli.test_plan import TINY


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Run a command; return the phases of its work, each as it ended."""
    phases: list[WorkStatus] = []

    def begin_phase(*arguments: Any) -> WorkStatus:
        phases.append(WorkStatus(*arguments))
        return phases[-1]

    monkeypatch.setattr(progress_line, "WorkStatus", begin_phase)

    def run_command(*words: str) -> list[str]:
        assert main(list(words)) == 0
        return [phase.description for phase in phases]

    return run_command


def test_plan_counts_placements(run: Callable[..., list[str]]):
    words = ("plan", *TINY, "--max-staleness", "0,1")
    _, reading, searching, simulating, _ = run(*words)
    assert reading == "reading config and data"
    assert int(searching.split()[1].replace(",", "")) > 20 and searching.endswith("placements")
    assert simulating == "simulating: 2 of 2 placements"


def test_simulate_counts_steps(run: Callable[..., list[str]]):
    assert run("simulate", *TINY[:-2], "--steps", "6")[-1] == "simulating: 6 of 6 steps"


def test_score_counts_completions(tmp_path: Path, run: Callable[..., list[str]]):
    rows, completions = tmp_path / "rows.jsonl", tmp_path / "completions.jsonl"
    rows.write_text('{"prompt": "2+3=", "ground_truth": "5"}\n' * 2)
    lines = [json.dumps({"index": index, "completion": "5"}) for index in (0, 0, 1)]
    completions.write_text("\n".join(lines))
    words = ("score", str(rows), "--completions", str(completions), "--reward", "exact")
    assert run(*words)[-1] == "scoring: 3 of 3 completions"

"""Run traces: reading run directories, and errors for incomplete runs."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from streamrl.errors import ConfigError
from streamrl.planner.calibration.run_trace import load_run_trace
from streamrl.run_dir.checkpoint import RUN_LOG_FOLDER, get_journal_dir
from streamrl.telemetry.chrome_trace import EARLIER_TRACE_FILE, TRACE_FILE
from tests.planner.calibration.runs import play, recipe, write_run


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    config = recipe(tmp_path)
    return write_run(tmp_path / "run", config, play(config))


def test_the_steady_steps_of_a_run_are_read(tmp_path: Path):
    config = recipe(tmp_path)
    simulated = play(config)
    trace = load_run_trace(write_run(tmp_path / "run", config, simulated))
    # 16 steps without 2 of engine warm-up, 1 that fills the stream, and 1 after the last prompt.
    assert [step.version for step in trace.steps] == list(range(3, 15))
    assert trace.excluded_steps == {
        "to warm up": 3,
        "after the last prompt": 1,
        "evaluated or saved": 0,
        "no longer in the trace": 0,
    }
    seconds = simulated.step_ends[14] - simulated.step_ends[2]
    assert trace.mean_step_s == pytest.approx(seconds / 12, rel=1e-4)
    assert 0.5 < trace.staleness_mean <= 1
    assert trace.cores == 2
    assert all(0 < idle < 1 for idle in trace.idle_fractions.values())


def test_steps_no_longer_in_the_trace_are_excluded(run_dir: Path):
    trace = run_dir / "trace.json"
    full = load_run_trace(run_dir)
    events = json.loads(trace.read_text())
    names = [event for event in events if event["ph"] == "M"]
    spans = sorted((e for e in events if e["ph"] == "X"), key=lambda event: event["ts"])
    first, second = len(spans) // 3, 2 * len(spans) // 3
    # The first third of the spans is lost; the second is in trace.earlier.json.
    for name, part_spans in (
        (EARLIER_TRACE_FILE, spans[first:second]),
        (TRACE_FILE, spans[second:]),
    ):
        body = ",\n".join(map(json.dumps, [*names, *part_spans]))
        (run_dir / name).write_text(f"[\n{body}\n]\n")
    trimmed = load_run_trace(run_dir)
    num_excluded = trimmed.excluded_steps["no longer in the trace"]
    assert (
        0 < num_excluded < len(full.steps) and len(trimmed.steps) == len(full.steps) - num_excluded
    )
    assert trimmed.steps == full.steps[num_excluded:]
    assert [s for s in trimmed.spans if s.start_s >= trimmed.steps[0].start_s] == [
        s for s in full.spans if s.start_s >= trimmed.steps[0].start_s
    ]


def _without(run: Path, number: int, name: str) -> None:
    """Remove a metric from a row."""
    path = run / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    del rows[number - 1][name]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("break_it", "rule"),
    [
        (lambda run: (run / "config.yaml").unlink(), "holds no config.yaml"),
        (lambda run: (run / "trace.json").unlink(), "trace.json has no spans"),
        (lambda run: (run / "metrics.jsonl").write_text("{}x\n{}\n"), "metrics.jsonl:1"),
        (lambda run: (run / "trace.json").write_text("[" * 100_000), "trace.json: nested too deep"),
        (lambda run: (run / "events.jsonl").write_text(""), "events.jsonl has no machine"),
        (lambda run: _fifo(run / "events.jsonl"), "events.jsonl: not a regular file"),
        (
            lambda run: _fifo(next(get_journal_dir(run, RUN_LOG_FOLDER).glob("*.journal"))),
            "not a regular file",
        ),
        (lambda run: (run / "metrics.jsonl").write_text(""), "too short: 0 steady steps"),
        (lambda run: _without(run, 3, "time/step_s"), "metrics.jsonl:3: has no time/step_s"),
        (lambda run: _without(run, 8, "idle/train"), "metrics.jsonl: step 8: has no idle/train"),
        (lambda run: (run / "metrics.jsonl").write_text("[1]\n"), "metrics.jsonl:1: has no step"),
        (
            lambda run: shutil.rmtree(get_journal_dir(run, RUN_LOG_FOLDER)),
            "run: has no run log in journal/books",
        ),
    ],
)
def test_an_incomplete_run_is_a_one_line_error(
    run_dir: Path, break_it: Callable[[Path], object], rule: str
):
    break_it(run_dir)
    with pytest.raises(ConfigError, match=rule) as error:
        load_run_trace(run_dir)
    assert "\n" not in str(error.value)


def test_spans_without_lengths_are_an_error(run_dir: Path):
    trace = run_dir / "trace.json"
    trace.write_text(trace.read_text().replace('"lengths"', '"sizes"'))
    with pytest.raises(ConfigError, match="truncated or of an older version"):
        load_run_trace(run_dir).lengths  # noqa: B018

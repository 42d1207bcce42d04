import io
import json
import sys

import pytest
from rich.console import Console

from streamrl.errors import ConfigError
from streamrl.files.bounded_read import read_jsonl
from streamrl.telemetry import sink_group
from streamrl.telemetry.config import TelemetryConfig, WandbConfig
from streamrl.telemetry.console import LiveConsole, PlainConsole
from streamrl.telemetry.progress import WorkStatus
from streamrl.telemetry.sink_group import SinkGroup, make_console, make_sink_group
from streamrl.telemetry.sinks import MetricsSink
from streamrl.telemetry.spans import Span
from tests.telemetry.rows import full_row, make_run_info


class RecordingSink(MetricsSink):
    """Sink that records its calls and fails on request."""

    def __init__(self, name, log, fails_at=""):
        self.name, self.log, self.fails_at = name, log, fails_at

    def _note(self, call):
        self.log.append(f"{self.name}.{call}")
        if call == self.fails_at:
            raise OSError(f"{self.name} failed")

    def start(self, config):
        self._note("start")

    def log_step(self, step, row):
        self._note("step")

    def log_event(self, name, fields):
        self._note("event")

    def close(self, summary):
        self._note("close")


def quiet(**options):
    return TelemetryConfig(wandb=WandbConfig(mode="disabled"), console="none", **options)


def output(*, is_terminal, encoding="utf-8"):
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    return Console(file=file, force_terminal=is_terminal, _environ={"TERM": "xterm"})


def test_all_sinks_get_every_call_and_close_in_reverse():
    log: list[str] = []
    group = SinkGroup([RecordingSink("a", log), RecordingSink("b", log)])
    group.start({})
    group.log_step(1, {"reward/mean": 0.5})
    group.log_event("drop", {})
    group.close({})
    group.close({})
    assert [entry.split(".")[1] for entry in log] == [
        *("start", "start", "step", "step", "event", "event", "close", "close")
    ]
    assert log[-2:] == ["b.close", "a.close"]


def test_a_failed_start_closes_the_started_sinks():
    log: list[str] = []
    group = SinkGroup([RecordingSink("a", log), RecordingSink("b", log, fails_at="start")])
    with pytest.raises(OSError, match="b failed"):
        group.start({})
    assert log == ["a.start", "b.start", "a.close"]


def test_a_row_outside_the_contract_or_a_step_out_of_order_reaches_no_sink():
    log: list[str] = []
    group = SinkGroup([RecordingSink("a", log)])
    with pytest.raises(ValueError, match="not in the metrics contract"):
        group.log_step(1, {"rewards": 1.0})
    assert log == []
    group.log_step(2, {"reward/mean": 0.5})
    for later in (2, 1, 0):
        with pytest.raises(ValueError, match=f"step {later} was reported after step 2"):
            group.log_step(later, {"reward/mean": 0.5})
    assert log == ["a.step"]


def test_a_run_leaves_metrics_events_and_a_trace(tmp_path):
    run = make_sink_group(quiet(), make_run_info(tmp_path))
    run.start({"seed": 1})
    run.show_status(WorkStatus("starting"))
    run.log_step(1, full_row(1))
    run.write_spans([Span("trainer-0", "train", 0, 1.0, 2.0)])
    run.log_event("drop", {"cause": "timeout"})
    run.close({"steps": 1})
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("events.jsonl", "metrics.jsonl", "trace.json")
    ]
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert {"train", "step 1", "drop"} <= {event["name"] for event in trace}


def test_a_resumed_run_continues_its_files_and_its_console(tmp_path, monkeypatch):
    run = make_sink_group(quiet(), make_run_info(tmp_path))
    run.start({})
    for step in (1, 2, 3):
        run.log_step(step, full_row(step))
    run.close({})
    config = TelemetryConfig(wandb=WandbConfig(mode="disabled"), console="plain")
    text = io.StringIO()
    monkeypatch.setattr(sink_group, "make_stdout_console", lambda: Console(file=text, width=100))
    resumed = make_sink_group(config, make_run_info(tmp_path, resume_step=2))
    resumed.start({})
    resumed.log_step(3, full_row(3))
    resumed.close({})
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    trace = json.loads((tmp_path / "trace.json").read_text())
    marks = [e["name"] for e in trace if e["ph"] == "i"]
    # The drop of the first step is alerted once, and not again by the resumed run.
    assert marks == ["step 1", "alert", "step 2", "step 3", "step 3"]
    printed = " ".join(text.getvalue().split())
    assert "reward 0.100 -> 0.300" in printed and "resumed after step 2" in printed
    assert "wall time 0:00 since the resume" in printed


@pytest.mark.parametrize("kind", [ImportError, AttributeError])
def test_a_wandb_that_cannot_be_imported_is_one_line(tmp_path, monkeypatch, kind):
    (tmp_path / "wandb.py").write_text(f"raise {kind.__name__}('two\\nlines')")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("wandb", "streamrl.telemetry.wandb_sink"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    words = r"telemetry.wandb.mode=offline: .*: two lines; telemetry.wandb.mode=disabled runs"
    with pytest.raises(ConfigError, match=words):
        make_sink_group(TelemetryConfig(console="none"), make_run_info(tmp_path))


def test_an_existing_run_is_not_overwritten(tmp_path):
    run = make_sink_group(quiet(), make_run_info(tmp_path))
    run.start({})
    run.log_step(1, full_row(1))
    run.close({})
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ConfigError, match="already holds a run"):
        make_sink_group(quiet(), make_run_info(tmp_path)).start({})
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    ("kind", "console", "expected"),
    [
        ("auto", output(is_terminal=True), LiveConsole),
        ("auto", output(is_terminal=False), PlainConsole),
        ("auto", output(is_terminal=True, encoding="ascii"), PlainConsole),
        ("plain", output(is_terminal=True), PlainConsole),
        ("live", output(is_terminal=False), LiveConsole),
    ],
)
def test_the_console_depends_on_the_output(kind, console, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(sink_group, "make_stdout_console", lambda: console)
    assert isinstance(make_console(kind, make_run_info(tmp_path)), expected)

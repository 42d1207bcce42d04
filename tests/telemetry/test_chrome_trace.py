import errno
import json
import os
from io import FileIO
from pathlib import Path
from types import SimpleNamespace

import pytest

from streamrl.errors import ConfigError, DiskError
from streamrl.telemetry import chrome_trace
from streamrl.telemetry.chrome_trace import (
    EARLIER_TRACE_FILE,
    TRACE_FILE,
    TraceSink,
    check_trace,
    read_spans,
)
from streamrl.telemetry.spans import Span
from tests.telemetry.rows import full_row
from tests.virtual_time import ManualClock

SPANS = [
    Span("generator-0", "generate", 0, 100.0, 102.0, {"groups": 4}),
    Span("generator-0", "pull", 1, 101.0, 101.5),
    Span("trainer-0", "train", 0, 102.25, 103.0),
]


def events(run_dir, phase):
    return [e for e in json.loads((run_dir / TRACE_FILE).read_text()) if e["ph"] == phase]


@pytest.fixture
def sink(tmp_path, monkeypatch):
    monkeypatch.setattr(chrome_trace, "time", SimpleNamespace(time=ManualClock(104.0)))
    sink = TraceSink(tmp_path)
    sink.start({})
    return sink


def test_spans_and_steps_are_events_in_microseconds(sink, tmp_path):
    sink.write_spans(SPANS)
    sink.log_step(3, full_row(3))
    first, (instant,) = events(tmp_path, "X")[0], events(tmp_path, "i")
    assert (first["name"], first["ts"], first["dur"]) == ("generate", 100_000_000, 2_000_000)
    assert first["args"] == {"groups": 4}
    assert (instant["name"], instant["s"], instant["ts"]) == ("step 3", "g", 104_000_000)


def test_processes_and_lanes_have_names_and_nonzero_ids(sink, tmp_path):
    sink.write_spans(SPANS)
    named = events(tmp_path, "M")
    pids = {e["args"]["name"]: e["pid"] for e in named if e["name"] == "process_name"}
    lanes = {(e["pid"], e["tid"]) for e in named if e["name"] == "thread_name"}
    assert list(pids) == ["run", "generator-0", "trainer-0"]
    assert min(pids.values()) > 0 and len(set(pids.values())) == 3
    spans = events(tmp_path, "X")
    assert [e["pid"] for e in spans] == [pids[s.process] for s in SPANS]
    assert {(e["pid"], e["tid"]) for e in spans} < lanes
    assert len({tid for _, tid in lanes}) == len(lanes)


def test_the_file_is_valid_json_after_every_append(sink, tmp_path):
    for number in range(1, 4):
        sink.write_spans([SPANS[0]])
        assert len(events(tmp_path, "X")) == number
    sink.close({})
    assert len(events(tmp_path, "X")) == 3
    assert list(tmp_path.iterdir()) == [tmp_path / TRACE_FILE]


def test_a_resumed_trace_keeps_process_ids(sink, tmp_path):
    sink.write_spans(SPANS)
    sink.close({})
    resumed = TraceSink(tmp_path, resume=True)
    resumed.start({})
    resumed.write_spans([SPANS[2], Span("trainer-1", "train", 0, 103.0, 104.0)])
    resumed.close({})
    named = [e for e in events(tmp_path, "M") if e["name"] == "process_name"]
    assert [e["args"]["name"] for e in named] == ["run", "generator-0", "trainer-0", "trainer-1"]
    assert len(events(tmp_path, "X")) == 5


class FullDisk(FileIO):
    """File on a disk with ten free bytes."""

    free_bytes = 10

    def write(self, data):
        num_written = super().write(data[: self.free_bytes])
        self.free_bytes -= num_written
        if not num_written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return num_written


def test_a_full_disk_raises_and_leaves_a_readable_trace(sink, tmp_path):
    sink.write_spans(SPANS[:1])
    file = sink._file = FullDisk(tmp_path / TRACE_FILE, "r+")
    with pytest.raises(DiskError, match=r"trace.json cannot be written: No space left on device"):
        sink.write_spans(SPANS)
    sink.close({})
    assert file.closed
    resumed = TraceSink(tmp_path, resume=True)
    resumed.start({})
    assert [e["name"] for e in events(tmp_path, "X")] == ["generate"]


def long_run(run_dir, *, steps, most_bytes):
    sink = TraceSink(run_dir, most_bytes=most_bytes)
    sink.start({})
    for step in range(steps):
        start_s = 100.0 + step
        sink.write_spans(
            [Span("generator-0", "generate", 0, start_s, start_s + 0.5, {"uid": f"0:{step}:0"})]
        )
        sink.write_spans([Span(f"trainer-{step % 2}", "train", 0, start_s, start_s + 1.0)])
        sink.log_step(step + 1, {"reward/mean": 0.5})
    return sink


def test_a_long_trace_stays_within_its_limit_and_keeps_the_last_steps(tmp_path):
    sink = long_run(tmp_path, steps=400, most_bytes=20_000)
    sink.close({})
    parts = sorted(path.name for path in tmp_path.iterdir())
    assert parts == [EARLIER_TRACE_FILE, TRACE_FILE]
    assert sum((tmp_path / name).stat().st_size for name in parts) < 20_000 + 1000
    spans = read_spans(tmp_path / TRACE_FILE)
    sampled = [span.args["uid"] for span in spans if span.name == "generate"]
    assert sampled == [f"0:{step}:0" for step in range(400 - len(sampled), 400)]
    assert len(sampled) > 15
    assert {span.process for span in spans} == {"generator-0", "trainer-0", "trainer-1"}
    for name in parts:  # each file is complete on its own
        trace_events = json.loads((tmp_path / name).read_text())
        named = {e["pid"] for e in trace_events if e["name"] == "process_name"}
        assert {e["pid"] for e in trace_events} == named


def test_only_a_resumed_trace_keeps_its_earlier_file(tmp_path):
    long_run(tmp_path, steps=100, most_bytes=10_000).close({})
    before = read_spans(tmp_path / TRACE_FILE)
    resumed = TraceSink(tmp_path, resume=True, most_bytes=10_000)
    resumed.start({})
    resumed.close({})
    assert read_spans(tmp_path / TRACE_FILE) == before
    TraceSink(tmp_path).start({})
    assert not (tmp_path / EARLIER_TRACE_FILE).exists()
    assert read_spans(tmp_path / TRACE_FILE) == []


@pytest.mark.parametrize(
    "line",
    [
        "[" * 100_000,
        '{"ph": "M", "pid": 1, "tid": 1}',
        '{"ph": "M", "name": "process_name", "pid": 1, "tid": 1, "args": {}}',
        '{"ph": "X", "name": "x", "pid": 1, "tid": 1, "ts": 0, "args": {}}',
        '{"ph": "i", "name": "x", "pid": [], "tid": 1}',
    ],
)
def test_a_foreign_trace_is_an_error_of_one_line(tmp_path: Path, line: str):
    (tmp_path / TRACE_FILE).write_text(f"[\n{line}\n]\n")
    with pytest.raises(ConfigError, match=r"trace\.json: "):
        check_trace(tmp_path)

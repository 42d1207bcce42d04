import errno
import json
import math
import os
from pathlib import Path

import pytest

from streamrl.errors import DiskError
from streamrl.files.bounded_read import read_jsonl
from streamrl.telemetry.sinks import JsonlSink
from tests.virtual_time import ManualClock


def started(run_dir, **options):
    sink = JsonlSink(run_dir, clock=ManualClock(1000.0), **options)
    sink.start({})
    return sink


def test_each_step_is_flushed_as_a_line(tmp_path):
    sink = started(tmp_path)
    sink.log_step(1, {"reward/mean": 0.5, "loss/value": math.nan, "policy/ess": math.inf})
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line) == {
        "step": 1,
        "time": 1000.0,
        "reward/mean": 0.5,
        "loss/value": None,
        "policy/ess": None,
    }


def test_events_have_a_separate_file_that_ends_with_the_summary(tmp_path):
    sink = started(tmp_path)
    sink.log_event("drop", {"cause": "timeout", "age_s": math.nan, "last": True})
    sink.close({"steps": 3})
    assert read_jsonl(tmp_path / "events.jsonl") == [
        {"time": 1000.0, "event": "drop", "cause": "timeout", "age_s": None, "last": True},
        {"time": 1000.0, "event": "close", "steps": 3},
    ]


def test_a_resumed_run_repeats_no_step_and_keeps_all_events(tmp_path):
    sink = started(tmp_path)
    for step in range(1, 6):
        sink.log_step(step, {"reward/mean": 0.1})
    sink.log_event("stall", {})
    sink = started(tmp_path, is_resumed=True)
    assert len(read_jsonl(tmp_path / "metrics.jsonl")) == 5, "nothing is cut before a new step"
    sink.log_step(4, {"reward/mean": 0.2})
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    assert [(row["step"], row["reward/mean"]) for row in rows] == [
        (1, 0.1),
        (2, 0.1),
        (3, 0.1),
        (4, 0.2),
    ]
    assert [event["event"] for event in read_jsonl(tmp_path / "events.jsonl")] == ["stall"]


def test_a_line_torn_by_a_crash_is_removed_on_resume(tmp_path):
    started(tmp_path).log_step(1, {"reward/mean": 0.1})
    for name in ("metrics.jsonl", "events.jsonl"):
        with (tmp_path / name).open("a") as file:
            file.write('{"step": 2, "rew')
    sink = started(tmp_path, is_resumed=True)
    sink.log_step(2, {"reward/mean": 0.2})
    sink.log_event("start", {})
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [1, 2]
    assert [event["event"] for event in read_jsonl(tmp_path / "events.jsonl")] == ["start"]


def test_a_full_disk_raises_an_error_with_the_file(tmp_path):
    sink = started(tmp_path)
    full_disk = Path("/dev/full")
    files = sink._files = [full_disk.open("a", buffering=1) for _ in sink._files]
    full = "cannot be written: No space left on device"
    with pytest.raises(DiskError, match=f"^{tmp_path}/metrics.jsonl {full}$"):
        sink.log_step(1, {"reward/mean": 0.5})
    with pytest.raises(DiskError, match=f"^{tmp_path}/events.jsonl {full}$"):
        sink.log_event("failed", {})
    with pytest.raises(DiskError, match=full):
        sink.close({})
    assert all(file.closed for file in files), "both files are closed although neither was flushed"
    sink.close({})


def test_a_full_disk_at_the_start_raises_an_error_with_the_file(tmp_path, monkeypatch):
    def refuse(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(DiskError, match=r"metrics.jsonl cannot be written: No space"):
        started(tmp_path, is_resumed=True)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b'{"step": 1}\nnot json\n{"step": 3}\n', "not a line of JSON"),
        (b'{"step": 1}\n\xd0\xff\n', "'utf-8' codec can't decode"),
    ],
)
def test_a_broken_line_is_an_error_with_its_number(tmp_path: Path, content: bytes, problem: str):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"^{path}:2: {problem}"):
        read_jsonl(path)

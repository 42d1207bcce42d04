"""Sink for `trace.json`: spans of every process for Perfetto (ui.perfetto.dev) or chrome://tracing.

The file is a JSON array in the Trace Event Format, one event per line. Each append overwrites the
closing bracket and writes a new bracket in the same write. So the file can be opened during the run
and after a crash.

Runs can last for days. When the file reaches half of `most_bytes`, it replaces trace.earlier.json,
and a new trace.json starts. Each file can be opened on its own.
"""

import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any

from streamrl.files.atomic_write import open_new_file, wrap_disk_errors
from streamrl.files.bounded_read import open_regular_file, parse_json, read_lines, wrap_file_errors
from streamrl.telemetry.metric_names import MetricsRow
from streamrl.telemetry.sinks import EventFields, MetricsSink, to_json_fields
from streamrl.telemetry.spans import Span

TRACE_FILE = "trace.json"
EARLIER_TRACE_FILE = "trace.earlier.json"
MAX_TRACE_BYTES = 512_000_000
"""Maximum size of trace.json and trace.earlier.json together.

Perfetto still opens this size, about 2 million groups.
"""
_RUN_PROCESS = "run"
_LANES_PER_PROCESS = 1000
_OPENING, _CLOSING = b"[\n", b"\n]\n"
_NAMING_EVENT = b'{"ph": "M"'
MAX_READ_BYTES = 32_000_000
"""Part of a long trace that is analyzed: about 100,000 spans, in 150 MB of memory."""


class TraceSink(MetricsSink):
    """Sink that writes spans, steps and events to trace.json.

    Spans are grouped by process and lane; steps and events are instant events. Times are
    microseconds since the epoch. With `resume`, new events are appended to the existing file;
    otherwise a new file replaces it. Both files together take at most `most_bytes`, plus one write.
    Raises DiskError with the file's name if writing fails.
    """

    def __init__(
        self, run_dir: Path, *, resume: bool = False, most_bytes: float = math.inf
    ) -> None:
        self._path = run_dir / TRACE_FILE
        self._max_part_bytes = most_bytes / 2
        self._is_resumed = resume
        self._file: FileIO | None = None
        self._end_offset = 0
        self._pids: dict[str, int] = {}
        self._tids: set[int] = set()

    def start(self, config: Mapping[str, Any]) -> None:
        """Create trace.json; on resume, keep its events and their process and thread ids."""
        kept = list(_read_events(self._path)) if self._is_resumed else []
        for event in kept:
            if event["name"] == "process_name":
                self._pids[event["args"]["name"]] = event["pid"]
            elif event["name"] == "thread_name":
                self._tids.add(event["tid"])
        with wrap_disk_errors(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if not self._is_resumed:
                self._path.with_name(EARLIER_TRACE_FILE).unlink(missing_ok=True)
        self._open_file(kept)

    def _open_file(self, kept: Sequence[dict[str, Any]] = ()) -> None:
        """Create trace.json, beginning with the events `kept` from the file that it replaces."""
        partial = self._path.with_suffix(".partial")
        with wrap_disk_errors(self._path):
            self._file, self._end_offset = FileIO(open_new_file(partial), "w"), 0
            self._append_events([*kept, *self._make_name_events(_RUN_PROCESS, 0)])
            partial.replace(self._path)

    def _rotate_file(self) -> None:
        self.close({})
        with wrap_disk_errors(self._path):
            self._path.replace(self._path.with_name(EARLIER_TRACE_FILE))
        self._pids.clear()
        self._tids.clear()
        self._open_file()

    def write_spans(self, spans: Iterable[Span]) -> None:
        """Append the closed spans of a drain; a later drain returns the open spans again."""
        if self._end_offset > self._max_part_bytes:
            self._rotate_file()
        events: list[dict[str, Any]] = []
        for span in spans:
            if not span.is_open:
                events += self._make_name_events(span.process, span.lane)
                events.append(self._make_span_event(span))
        self._append_events(events)

    def log_step(self, step: int, row: MetricsRow) -> None:
        """Write the end of a step as an instant event across all processes."""
        self._append_events([self._make_instant_event(f"step {step}", "g", {})])

    def log_event(self, name: str, fields: EventFields) -> None:
        self._append_events([self._make_instant_event(name, "p", fields)])

    def close(self, summary: EventFields) -> None:
        file, self._file = self._file, None
        if file is not None:
            with wrap_disk_errors(self._path), file:
                os.fsync(file.fileno())

    def _get_thread_ids(self, process: str, lane: int) -> dict[str, int]:
        """Return the pid and tid under which Perfetto shows a lane of a process."""
        # Perfetto reserves pid and tid 0 for the kernel and expects a tid to be unique across
        # processes.
        pid = self._pids[process]
        return {"pid": pid, "tid": pid * _LANES_PER_PROCESS + lane}

    def _make_name_events(self, process: str, lane: int) -> list[dict[str, Any]]:
        """Return the metadata events that name a process and a lane, at their first use."""
        names: list[tuple[str, dict[str, Any]]] = []
        if process not in self._pids:
            self._pids[process] = len(self._pids) + 1
            names.append(("process_name", {"name": process}))
            names.append(("process_sort_index", {"sort_index": self._pids[process]}))
        ids = self._get_thread_ids(process, lane)
        if ids["tid"] not in self._tids:
            self._tids.add(ids["tid"])
            names.append(("thread_name", {"name": f"lane {lane}"}))
        return [{"ph": "M", "name": name, **ids, "args": args} for name, args in names]

    def _make_span_event(self, span: Span) -> dict[str, Any]:
        start_us = _to_microseconds(span.start_s)
        duration_us = _to_microseconds(span.end_s) - start_us
        ids = self._get_thread_ids(span.process, span.lane)
        times = {"ts": start_us, "dur": duration_us}
        return {"ph": "X", "name": span.name, **ids, **times, "args": to_json_fields(span.args)}

    def _make_instant_event(self, name: str, scope: str, args: EventFields) -> dict[str, Any]:
        """Return a mark in the trace at the present time; scope "g" is global, "p" a process."""
        ids, ts = self._get_thread_ids(_RUN_PROCESS, 0), _to_microseconds(time.time())
        return {"ph": "i", "name": name, **ids, "ts": ts, "s": scope, "args": to_json_fields(args)}

    def _append_events(self, events: list[dict[str, Any]]) -> None:
        """Write events over the closing bracket of the file, and a new closing bracket."""
        assert self._file is not None, "the trace is not open"
        if not events:
            return
        body = b",\n".join(json.dumps(event).encode() for event in events)
        unwritten = memoryview((b",\n" if self._end_offset else _OPENING) + body + _CLOSING)
        with wrap_disk_errors(self._path):
            self._file.seek(self._end_offset)
            # Unbuffered writes can be partial, for example when the disk fills up.
            while unwritten:
                unwritten = unwritten[self._file.write(unwritten) :]
            self._end_offset = self._file.tell() - len(_CLOSING)


def _to_microseconds(seconds: float) -> int:
    return round(seconds * 1e6)


def read_spans(path: Path, *, most_bytes: int = MAX_READ_BYTES) -> list[Span]:
    """Return the spans in the last `most_bytes` of trace.earlier.json and the trace, in this order.

    Return [] without files. An event torn by a crash is left out.
    """
    earlier, size = path.with_name(EARLIER_TRACE_FILE), path.stat().st_size if path.exists() else 0
    return [
        *_read_last_spans(earlier, most_bytes - size),
        *_read_last_spans(path, most_bytes),
    ]


def _read_last_spans(path: Path, most_bytes: int) -> list[Span]:
    """Return the spans in the last `most_bytes` of a trace; [] without a file.

    Names of processes come from the whole file; other lines before are not parsed.
    """
    if not path.exists():
        return []
    with wrap_file_errors(path):
        first_byte = path.stat().st_size - most_bytes
    processes: dict[int, str] = {}
    spans = []
    for event in _read_events(path, first_byte=first_byte):
        pid = event["pid"]
        if event["name"] == "process_name":
            processes[pid] = event["args"]["name"]
        elif event["ph"] == "X" and pid in processes:
            lane, start_us = event["tid"] % _LANES_PER_PROCESS, event["ts"]
            end_s = (start_us + event["dur"]) / 1e6
            spans.append(
                Span(processes[pid], event["name"], lane, start_us / 1e6, end_s, event["args"])
            )
    return spans


def check_trace(run_dir: Path) -> None:
    """Raise ConfigError if a resumed run cannot continue the trace in its run directory."""
    for _ in _read_events(run_dir / TRACE_FILE):
        pass


def _read_events(path: Path, *, first_byte: int = 0) -> Iterator[dict[str, Any]]:
    """Yield the events of a trace file, without a last line torn by a crash.

    first_byte: before it, only events that name a process or lane are yielded.
    """
    if not path.exists():
        return
    position = 0
    with wrap_file_errors(path), open_regular_file(path) as file:
        for number, line in enumerate(read_lines(file), 1):
            position += len(line)
            if position <= first_byte and _NAMING_EVENT not in line:
                continue
            try:
                event = parse_json(line.decode().rstrip(",\r\n"))
            except json.JSONDecodeError:
                continue
            if isinstance(event, dict):
                if not _is_trace_event(event):
                    raise ValueError(f"line {number}: not a trace event")
                yield event


def _is_trace_event(event: Mapping[str, Any]) -> bool:
    kinds: dict[str, type | tuple[type, ...]] = {"ph": str, "name": str, "pid": int, "tid": int}
    if event.get("ph") in ("X", "M"):
        kinds["args"] = dict
    if event.get("ph") == "X":
        kinds |= {"ts": (int, float), "dur": (int, float)}
    if not all(isinstance(event.get(key), kind) for key, kind in kinds.items()):
        return False
    return event["name"] != "process_name" or isinstance(event.get("args", {}).get("name"), str)

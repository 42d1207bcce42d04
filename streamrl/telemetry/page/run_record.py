"""What a run has recorded so far, for its page: metrics by step, events, config.

    reader = RunReader(run_dir)
    record = reader.read()      # later calls read only what the run has written since

The run may be under way, killed, resumed or finished.
"""

import itertools
import math
import os
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from streamrl.errors import ConfigError
from streamrl.files.bounded_read import (
    open_regular_file,
    parse_json,
    read_lines,
    read_small_text,
    wrap_file_errors,
)
from streamrl.messages import Array
from streamrl.telemetry.metric_names import STALENESS_HISTOGRAM
from streamrl.telemetry.sinks import BASE_EVALUATION, EVENTS_FILE, METRICS_FILE

MAX_BINS = 400
"""Bins of steps between the first and the latest of a run; a screen has about as many columns."""
LATEST_ROWS = 100
LATEST_EVENTS = 4000
LARGEST_METRICS = ("staleness/max", "memory/")
"""Metrics, and prefixes of metrics, of which several steps show the largest value."""
LAST_METRICS = ("ledger/", "drops/")
"""Prefixes of metrics that count since the run began."""


class JsonlTail:
    """Reader of a JSONL file that grows: each call returns the lines that were added.

    A last line without line end is still being written, and left for the next call. A file that was
    replaced, as by a resumed run, is read from its start.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file_id: tuple[int, int] | None = None
        self._offset = 0

    def read(self, forget_rows: Callable[[], None]) -> Iterator[dict[str, Any]]:
        """Yield the new lines; call `forget_rows` before lines that replace those of earlier calls.

        Raises ConfigError with the place of a line that is not a JSON object.
        """
        if not self._path.exists():
            return
        with wrap_file_errors(self._path), open_regular_file(self._path) as file:
            status = os.fstat(file.fileno())
            file_id = (status.st_dev, status.st_ino)
            is_new = self._file_id is not None and (
                file_id != self._file_id or status.st_size < self._offset
            )
            if is_new:
                forget_rows()
            if is_new or self._file_id is None:
                self._file_id, self._offset = file_id, 0
            file.seek(self._offset)
            for line in read_lines(file):
                if not line.endswith(b"\n"):
                    break
                location = f"{self._path}, line at byte {self._offset}"
                self._offset += len(line)
                if line.strip():
                    with wrap_file_errors(location):
                        row = parse_json(line)
                        if not isinstance(row, dict):
                            raise ValueError("not a JSON object")
                    yield row


@dataclass
class RowBins:
    """Metrics rows of a run of any length, in bounded memory.

    The first and the latest rows are whole. Rows between are merged into at most 2 * MAX_BINS rows
    of `size` steps each.
    """

    size: int = 1
    total_s: float = 0.0
    _last_step: int = -1
    _first: list[Mapping[str, Any]] = field(default_factory=list)
    _bins: list[Mapping[str, Any]] = field(default_factory=list)
    _latest: deque[Mapping[str, Any]] = field(default_factory=deque)

    def add_row(self, row: Mapping[str, Any]) -> None:
        """Add the row of a step; of a step that has one, the first row stands."""
        if row["step"] <= self._last_step:
            return
        self._last_step = row["step"]
        self.total_s += row.get("time/step_s") or 0.0
        (self._latest if self._first else self._first).append(row)
        if len(self._latest) < LATEST_ROWS + self.size:
            return
        self._bins.append(merge_rows([self._latest.popleft() for _ in range(self.size)]))
        if len(self._bins) == 2 * MAX_BINS:
            pairs = zip(self._bins[::2], self._bins[1::2], strict=True)
            self._bins, self.size = [merge_rows(pair) for pair in pairs], 2 * self.size

    def list_rows(self) -> list[Mapping[str, Any]]:
        return [*self._first, *self._bins, *self._latest]


def merge_rows(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the row that stands for consecutive rows: means, the largest or the last values."""
    merged: dict[str, Any] = {}
    for name in dict.fromkeys(itertools.chain.from_iterable(rows)):
        values = [value for row in rows if (value := row.get(name)) is not None]
        if not values or len(rows) == 1:
            merged[name] = rows[-1].get(name)
        elif name == STALENESS_HISTOGRAM:
            counts = itertools.zip_longest(*(value["counts"] for value in values), fillvalue=0)
            merged[name] = {"counts": [sum(bins) for bins in counts]}
        elif name.startswith(LARGEST_METRICS):
            merged[name] = max(values)
        elif name in ("step", "time") or name.startswith(LAST_METRICS):
            merged[name] = values[-1]
        elif isinstance(values[-1], int | float):
            merged[name] = statistics.fmean(values)
        else:
            merged[name] = values[-1]
    return merged


@dataclass(frozen=True)
class RunRecord:
    """Metrics and events of a run, as far as they are written.

    name: title on the page. rows: metrics rows by trained step, ascending, as `RowBins` lists them.
    events: in the order of time, of a long run the latest. total_s: time of all steps.
    """

    name: str
    run_dir: Path
    config_text: str
    rows: Sequence[Mapping[str, Any]] = ()
    events: Sequence[Mapping[str, Any]] = ()
    total_s: float = 0.0

    @cached_property
    def steps(self) -> Array:
        """Training steps of `rows`, int64 [S]."""
        return np.array([row["step"] for row in self.rows], np.int64)

    @cached_property
    def end_times(self) -> Array:
        """Times at which the steps were logged, float64 [S], s since the epoch."""
        return np.array([row["time"] for row in self.rows], np.float64)

    @cached_property
    def metric_names(self) -> Sequence[str]:
        """Names of metrics with a value in at least one row, in the order of the rows."""
        names = dict.fromkeys(
            name for row in self.rows for name, value in row.items() if value is not None
        )
        return [name for name in names if name not in ("step", "time")]

    @cached_property
    def step_labels(self) -> list[str]:
        """Steps for which each row stands, in words: "step 3" or "steps 11 to 20"."""
        labels, start = [], int(self.steps[0]) if len(self.steps) else 0
        for last in self.steps.tolist():
            labels.append(f"step {last}" if start == last else f"steps {start} to {last}")
            start = last + 1
        return labels

    def select_names(self, prefix: str) -> list[str]:
        """Return the names of metrics `prefix/<one segment>` that have a value."""
        return [
            name
            for name in self.metric_names
            if name.startswith(prefix) and "/" not in name.removeprefix(prefix)
        ]

    def get_column(self, name: str) -> Array:
        """Return a metric's value per step, float64 [S]; NaN without a value."""
        values = (row.get(name) for row in self.rows)
        return np.array([math.nan if value is None else value for value in values], np.float64)

    def get_staleness_counts(self) -> Array:
        """Return the trained tokens by step and staleness, float64 [S, V]."""
        histograms = [row.get(STALENESS_HISTOGRAM) for row in self.rows]
        counts = [histogram["counts"] if histogram else [] for histogram in histograms]
        table = np.zeros((len(counts), max(map(len, counts), default=0)))
        for row, values in zip(table, counts, strict=True):
            row[: len(values)] = values
        return table

    def get_evaluations(self, name: str) -> tuple[list[int], list[float]]:
        """Return steps and values of an evaluation metric; step 0 is the base model's."""
        base = [e for e in self.events if e.get("event") == BASE_EVALUATION]
        points = [(0, base[0].get(name))] if base else []
        points += [(row["step"], row.get(name)) for row in self.rows]
        known = [(step, value) for step, value in points if value is not None]
        return [step for step, _ in known], [value for _, value in known]

    def find_step_at(self, time_s: float) -> float:
        """Return the step under way at a time, as a fraction: 3.5 is in the middle of step 4."""
        if not len(self.steps):
            return 0.0
        first = self.steps[0] - 1
        start_s = self.end_times[0] - (self.rows[0].get("time/step_s") or 0.0)
        times = np.concatenate([[start_s], self.end_times])
        return float(np.interp(time_s, times, np.concatenate([[first], self.steps])))


class RunReader:
    """Reader of a run directory. Construction raises ConfigError if its config is unreadable."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        path = run_dir / "config.yaml"
        with wrap_file_errors(path):
            self._config_text = read_small_text(path)
        self._metrics_tail = JsonlTail(run_dir / METRICS_FILE)
        self._events_tail = JsonlTail(run_dir / EVENTS_FILE)
        self._forget_rows()
        self._forget_events()

    def read(self, name: str = "") -> RunRecord:
        """Return metrics and events recorded so far, under a name; the default is the folder's.

        Raises ConfigError for a damaged file, or if the run has been deleted.
        """
        if not self.run_dir.exists():
            raise ConfigError(f"{self.run_dir}: deleted since this page was opened")
        for row in self._metrics_tail.read(self._forget_rows):
            if not isinstance(row.get("step"), int):
                raise ConfigError(f"{self.run_dir / METRICS_FILE}: a row without a step")
            self._bins.add_row(row)
        for event in self._events_tail.read(self._forget_events):
            is_base = event.get("event") == BASE_EVALUATION
            (self._base if is_base else self._events).append(event)
        return RunRecord(
            name or self.run_dir.name,
            self.run_dir,
            self._config_text,
            self._bins.list_rows(),
            (*self._base, *self._events),
            self._bins.total_s,
        )

    def _forget_rows(self) -> None:
        self._bins = RowBins()

    def _forget_events(self) -> None:
        self._base: list[Mapping[str, Any]] = []
        self._events: deque[Mapping[str, Any]] = deque(maxlen=LATEST_EVENTS)

"""What a run has recorded so far, for its page: metrics by step, events, config.

    reader = RunReader(run_dir)
    record = reader.read()      # later calls read only what the run has written since

The run may be under way, killed, resumed or finished.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from streamrl.errors import ConfigError
from streamrl.files.bounded_read import (
    open_regular_file,
    parse_json,
    read_small_text,
    wrap_file_errors,
)
from streamrl.messages import Array
from streamrl.telemetry.metric_names import EVALUATE_TIME, STALENESS_HISTOGRAM
from streamrl.telemetry.sinks import BASE_EVALUATION, EVENTS_FILE, METRICS_FILE

CONFIG_FILE = "config.yaml"


class JsonlTail:
    """Reader of a JSONL file that grows: each call returns the lines that were added.

    A last line without line end is still being written, and left for the next call. A file that was
    replaced, as by a resumed run, is read from its start.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file_id: tuple[int, int] | None = None
        self._offset = 0

    def read(self) -> tuple[list[dict[str, Any]], bool]:
        """Return the new lines, and whether they replace those of earlier calls.

        Raises ConfigError with file and position for a line that is not a JSON object.
        """
        if not self._path.exists():
            return [], False
        with wrap_file_errors(self._path), open_regular_file(self._path) as file:
            status = os.fstat(file.fileno())
            file_id = (status.st_dev, status.st_ino)
            is_new = self._file_id is not None and (
                file_id != self._file_id or status.st_size < self._offset
            )
            if is_new or self._file_id is None:
                self._file_id, self._offset = file_id, 0
            file.seek(self._offset)
            content = file.read()
            end = content.rfind(b"\n") + 1
            rows = [_parse_row(line, self._offset) for line in content[:end].splitlines() if line]
            self._offset += end
        return rows, is_new


def _parse_row(line: bytes, offset: int) -> dict[str, Any]:
    try:
        row = parse_json(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"after byte {offset}: not JSON: {error}") from None
    if not isinstance(row, dict):
        raise ValueError(f"after byte {offset}: not a JSON object")
    return row


@dataclass(frozen=True)
class RunRecord:
    """Metrics and events of a run, as far as they are written.

    name: title on the page. rows: a metrics row per trained step, ascending. events: in the
    order of time.
    """

    name: str
    run_dir: Path
    config_text: str
    rows: Sequence[Mapping[str, Any]] = ()
    events: Sequence[Mapping[str, Any]] = ()

    @cached_property
    def steps(self) -> Array:
        """Training steps of `rows`, int64 [S]."""
        return np.array([row["step"] for row in self.rows], np.int64)

    @cached_property
    def end_times(self) -> Array:
        """Times at which the steps were logged, float64 [S], s since the epoch."""
        return np.array([row["time"] for row in self.rows], np.float64)

    @cached_property
    def step_bounds(self) -> Array:
        """Start of the first step and ends of all steps, float64 [S + 1], s since the epoch.

        A step's row is logged after its evaluation, which the next row's time includes.
        """
        waits = np.append(self.get_column(EVALUATE_TIME)[1:], math.nan)
        ends = self.end_times - np.nan_to_num(waits)
        return np.concatenate([ends[:1] - self.get_column("time/step_s")[:1], ends])

    @cached_property
    def metric_names(self) -> Sequence[str]:
        """Names of metrics with a value in at least one row, in the order of the rows."""
        names = dict.fromkeys(
            name for row in self.rows for name, value in row.items() if value is not None
        )
        return [name for name in names if name not in ("step", "time")]

    def has_metric(self, name: str) -> bool:
        return name in self.metric_names

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


@dataclass
class RunReader:
    """Reader of a run directory. Construction raises ConfigError if it holds no run."""

    run_dir: Path
    _config_text: str = field(init=False)
    _rows: dict[int, Mapping[str, Any]] = field(init=False, default_factory=dict)
    _events: list[Mapping[str, Any]] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        path = self.run_dir / CONFIG_FILE
        if not path.is_file():
            raise ConfigError(f"{self.run_dir}: not a run: no {CONFIG_FILE} in it")
        with wrap_file_errors(path):
            self._config_text = read_small_text(path)
        self._metrics_tail = JsonlTail(self.run_dir / METRICS_FILE)
        self._events_tail = JsonlTail(self.run_dir / EVENTS_FILE)

    def read(self, name: str = "") -> RunRecord:
        """Return metrics and events recorded so far, under a name; the default is the folder's.

        Raises ConfigError for a damaged file, or if the run has been deleted.
        """
        if not (self.run_dir / CONFIG_FILE).exists():
            raise ConfigError(f"{self.run_dir}: deleted since this page was opened")
        rows, is_replaced = self._metrics_tail.read()
        if is_replaced:
            self._rows.clear()
        for row in rows:
            if not isinstance(row.get("step"), int):
                raise ConfigError(f"{self.run_dir / METRICS_FILE}: a row without a step")
            self._rows[row["step"]] = row
        events, is_replaced = self._events_tail.read()
        self._events = [*events] if is_replaced else [*self._events, *events]
        ordered = [self._rows[step] for step in sorted(self._rows)]
        events_so_far = tuple(self._events)
        name = name or self.run_dir.name
        return RunRecord(name, self.run_dir, self._config_text, ordered, events_so_far)

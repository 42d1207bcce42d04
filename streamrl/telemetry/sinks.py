"""Base class of the sinks for metrics and events, and the JSONL files of the run directory."""

import json
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from streamrl.errors import ConfigError
from streamrl.files.atomic_write import wrap_disk_errors, write_atomic
from streamrl.files.bounded_read import read_jsonl, read_small_text, wrap_file_errors
from streamrl.telemetry.alerts import ALERT_EVENT
from streamrl.telemetry.metric_names import MetricsRow, to_json_value

if TYPE_CHECKING:
    from streamrl.telemetry.progress import WorkStatus
    from streamrl.telemetry.rollout_log import RecordedGroup
    from streamrl.telemetry.spans import Span

METRICS_FILE = "metrics.jsonl"
EVENTS_FILE = "events.jsonl"
RUN_ID_FILE = "wandb/run_id.txt"
_RUN_ID_PATTERN = re.compile(r"[\w.-]{1,128}", re.ASCII)
BASE_EVALUATION = "base_evaluation"
ALERT_EVENTS = (ALERT_EVENT, "stall", "outage", "silent", "died", "crashed", "failed")
"""Events that trackers send as alerts at once; metrics rows arrive only at the end of a step."""
QUIET_EVENTS = frozenset({"machine", "note", BASE_EVALUATION, "close"})
"""Events that say nothing about how the run went."""
EventFieldValue = str | int | float | bool
EventFields = Mapping[str, EventFieldValue]


class MetricsSink:
    """Receiver of telemetry: `start`, then steps and events, then `close`.

    A sink takes what it shows or stores, and ignores the rest.
    """

    def start(self, config: Mapping[str, Any]) -> None:
        """Open the sink's outputs; `config` is the run's complete configuration."""

    def log_step(self, step: int, row: MetricsRow) -> None:
        """Log the metrics row of a training step."""

    def show_repeated_step(self, step: int, row: MetricsRow) -> None:
        """Show a step that a resumed run repeats, and whose recorded row stands."""

    def log_event(self, name: str, fields: EventFields) -> None:
        """Log an event between steps, such as a start, a crash, a drop or a stall."""

    def log_rollouts(self, step: int, groups: "Sequence[RecordedGroup]") -> None:
        """Log the recorded rollouts of a training step."""

    def write_spans(self, spans: "Iterable[Span]") -> None:
        """Write the closed spans of a drain; a later drain returns the open spans again."""

    def show_status(self, status: "WorkStatus") -> None:
        """Show the work that a run waits for, such as "starting"; empty text removes the status."""

    def close(self, summary: EventFields) -> None:
        """Write pending output and end the sink; `summary` holds facts about the whole run."""


def load_run_id(run_dir: Path) -> str | None:
    """Return the wandb id of the run in this directory; None without any.

    Raises ConfigError if the file with the id is unreadable or invalid.
    """
    path = run_dir / RUN_ID_FILE
    if not path.exists():
        return None
    with wrap_file_errors(path):
        run_id = read_small_text(path).strip()
    if not _RUN_ID_PATTERN.fullmatch(run_id):
        raise ConfigError(f"{path}: {run_id[:40]!r}: must be letters, digits, '.', '-' and '_'")
    return run_id


class JsonlSink(MetricsSink):
    """Sink that writes `metrics.jsonl` and `events.jsonl`, and flushes each line.

    A row is {"step": int, "time": epoch seconds, <name>: value, ...}; NaN and infinities are null.
    An event is {"time": ..., "event": name, <field>: value, ...}. A row of a step
    that the files of a resumed run hold already replaces that row and all later ones, so that no
    step appears twice; until then all rows stay. Events are kept. Raises DiskError with the file's
    name if writing fails.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        is_resumed: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._paths = (run_dir / METRICS_FILE, run_dir / EVENTS_FILE)
        self._is_resumed = is_resumed
        self._last_step = 0
        self._clock = clock
        self._files: list[TextIO] = []

    def start(self, config: Mapping[str, Any]) -> None:
        """Open metrics.jsonl and events.jsonl. Raises ConfigError if they exist without a
        resume."""
        metrics, events = self._paths
        with wrap_disk_errors(metrics.parent):
            metrics.parent.mkdir(parents=True, exist_ok=True)
        if self._is_resumed:
            rows = read_jsonl(metrics)
            self._last_step = max((row["step"] for row in rows), default=0)
            # Leaves out a last line that a crash has torn.
            self._files = [self._replace(metrics, rows), self._replace(events, read_jsonl(events))]
        else:
            if metrics.exists() or events.exists():  # new rows would mix with the old ones
                raise ConfigError(
                    f"{metrics.parent} already holds a run: resume it or name another"
                )
            self._files = [self._replace(path, []) for path in self._paths]

    def _replace(self, path: Path, lines: Iterable[Mapping[str, Any]]) -> TextIO:
        """Write a file anew, and open it for further lines."""
        with wrap_disk_errors(path):
            write_atomic(path, "".join(map(_format_line, lines)))
            return path.open("a", encoding="utf-8", buffering=1)

    def log_step(self, step: int, row: MetricsRow) -> None:
        """Append the row of a training step to metrics.jsonl.

        Step 0, the evaluation of the base model, becomes an event, so that every row is a trained
        step.
        """
        values = {name: to_json_value(value) for name, value in row.items()}
        if step == 0:
            self._write_line(1, {"time": self._clock(), "event": BASE_EVALUATION, **values})
            return
        if step <= self._last_step:
            self._files[0].close()
            rows = read_jsonl(self._paths[0])
            self._files[0] = self._replace(self._paths[0], (r for r in rows if r["step"] < step))
            self._last_step = 0
        self._write_line(0, {"step": step, "time": self._clock(), **values})

    def log_event(self, name: str, fields: EventFields) -> None:
        assert not {"time", "event"} & set(fields), f"reserved field in event {name}"
        self._write_line(1, {"time": self._clock(), "event": name, **to_json_fields(fields)})

    def close(self, summary: EventFields) -> None:
        if not self._files:
            return
        with ExitStack() as closing:  # closes both files even if one fails
            for path, file in zip(self._paths, self._files, strict=True):
                closing.enter_context(wrap_disk_errors(path))
                closing.callback(file.close)
            try:
                self.log_event("close", summary)
            finally:
                self._files = []

    def _write_line(self, index: int, line: Mapping[str, Any]) -> None:
        with wrap_disk_errors(self._paths[index]):
            self._files[index].write(_format_line(line))


def to_json_fields(fields: EventFields) -> dict[str, Any]:
    """Return event fields as JSON: numbers by `to_json_value`, other values unchanged."""
    return {
        name: to_json_value(value)
        if isinstance(value, Real) and not isinstance(value, bool)
        else value
        for name, value in fields.items()
    }


def _format_line(line: Mapping[str, Any]) -> str:
    return json.dumps(line, allow_nan=False) + "\n"

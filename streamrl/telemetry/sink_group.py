"""All sinks of a run as a single object, created from the telemetry section of the config."""

import contextlib
import importlib
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from rich.console import Console

from streamrl.errors import ConfigError, get_message
from streamrl.files.bounded_read import iter_jsonl
from streamrl.telemetry.alerts import ALERT_EVENT, AlertWatch
from streamrl.telemetry.chrome_trace import MAX_TRACE_BYTES, TraceSink
from streamrl.telemetry.config import TelemetryConfig, WandbConfig
from streamrl.telemetry.console import LiveConsole, PlainConsole, RunConsole, RunInfo
from streamrl.telemetry.metric_names import MetricsRow, parse_metrics_row, validate_row
from streamrl.telemetry.progress import WorkStatus
from streamrl.telemetry.rollout_log import RecordedGroup
from streamrl.telemetry.sinks import (
    BASE_EVALUATION,
    EVENTS_FILE,
    METRICS_FILE,
    EventFields,
    EventFieldValue,
    JsonlSink,
    MetricsSink,
    load_run_id,
)
from streamrl.telemetry.spans import Span

LOG_WIDTH = 160
"""Columns of plain lines in a file or pipe."""


class SinkGroup:
    """All sinks of a run: forwards metrics, events and spans, and validates metrics rows."""

    def __init__(
        self,
        sinks: Sequence[MetricsSink],
        *,
        alert_watch: AlertWatch | None = None,
    ) -> None:
        self.sinks = sinks
        self._alert_watch = alert_watch
        self._last_step = -1
        self._open_sinks = ExitStack()
        self._summary: dict[str, EventFieldValue] = {}

    def start(self, config: Mapping[str, Any]) -> None:
        """Start all sinks in order. If a sink fails, close the sinks already started."""
        with ExitStack() as started:
            for sink in self.sinks:
                sink.start(config)
                started.callback(sink.close, self._summary)
            self._open_sinks = started.pop_all()

    def log_step(self, step: int, row: MetricsRow) -> None:
        """Forward the metrics row of a training step to all sinks.

        Raises ValueError for an unknown metric name, or if `step` does not increase. So evaluations
        of a step are part of its row (those of the base model: row of step 0).
        """
        validate_row(row)
        if step <= self._last_step:
            raise ValueError(f"step {step} was reported after step {self._last_step}")
        self._last_step = step
        for sink in self.sinks:
            sink.log_step(step, row)
        for text in self._alert_watch.find_alerts(step, row) if self._alert_watch else ():
            self.log_event(ALERT_EVENT, {"step": step, "text": text})

    def show_repeated_step(self, step: int, row: MetricsRow) -> None:
        """Show a step whose recorded row stands, and log it nowhere."""
        self._last_step = step
        for sink in self.sinks:
            sink.show_repeated_step(step, row)

    def log_event(self, name: str, fields: EventFields) -> None:
        for sink in self.sinks:
            sink.log_event(name, fields)

    def log_rollouts(self, step: int, groups: Sequence[RecordedGroup]) -> None:
        for sink in self.sinks:
            sink.log_rollouts(step, groups)

    def write_spans(self, spans: Sequence[Span]) -> None:
        for sink in self.sinks:
            sink.write_spans(spans)

    def show_status(self, status: WorkStatus) -> None:
        for sink in self.sinks:
            sink.show_status(status)

    def close(self, summary: EventFields) -> None:
        """Close all sinks, the console last, even if some fail. A second call has no effect."""
        self._summary.update(summary)
        self._open_sinks.close()


def make_sink_group(config: TelemetryConfig, run_info: RunInfo) -> SinkGroup:
    """Create the sinks of a telemetry config."""
    run_dir, is_resumed = run_info.run_dir, run_info.resume_step is not None
    # Sinks start in this order and close in reverse. The console starts first, so its summary is
    # printed last. The trace starts last, because it replaces the trace of an earlier run: until
    # then another sink may have refused to start over that run.
    view = make_console(config.console, run_info)
    sinks: list[MetricsSink] = [] if view is None else [view]
    sinks.append(JsonlSink(run_dir, is_resumed=is_resumed))
    if config.wandb.is_enabled:
        try:
            from streamrl.telemetry.wandb_sink import WandbSink
        except Exception as error:  # a library that wandb does not fit raises any
            raise ConfigError(
                f"telemetry.wandb.mode={config.wandb.mode}: wandb cannot be imported:"
                f" {get_message(error)}; telemetry.wandb.mode=disabled runs without it"
            ) from error
        resume_id = load_run_id(run_dir) if is_resumed else None
        sinks.append(WandbSink(run_dir, config.wandb, run_name=run_info.name, resume_id=resume_id))
    sinks.append(TraceSink(run_dir, resume=is_resumed, most_bytes=MAX_TRACE_BYTES))
    return SinkGroup(sinks, alert_watch=AlertWatch(run_info.compares_rollouts))


def preload_wandb(config: WandbConfig) -> None:
    """Start to import wandb in a background thread, if the config uses wandb."""

    def load() -> None:
        with contextlib.suppress(Exception):  # `make_sink_group` raises it
            importlib.import_module("wandb")

    if config.is_enabled:
        threading.Thread(target=load, name="import wandb").start()


def make_console(kind: str, run_info: RunInfo) -> RunConsole | None:
    """Create the console for a value of telemetry.console; None for "none".

    kind: "auto" is live on a terminal that can redraw and shows Unicode, plain elsewhere.
    """
    if kind == "none":
        return None
    console = make_stdout_console()
    can_be_live = console.is_terminal and not console.is_dumb_terminal
    is_live = kind == "live" or (can_be_live and console.encoding.startswith("utf"))
    console_class = LiveConsole if is_live and kind != "plain" else PlainConsole
    run_console: RunConsole = console_class(run_info, console)
    if run_info.resume_step is not None:
        # First values stay those of the run's start.
        for step, row in _read_past_rows(run_info):
            run_console.progress.add_row(step, row)
    return run_console


def make_stdout_console() -> Console:
    """Return a console for standard output; in a file rich would wrap events at column 80."""
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = LOG_WIDTH
    return console


def _read_past_rows(run_info: RunInfo) -> Iterable[tuple[int, MetricsRow]]:
    for line in iter_jsonl(run_info.run_dir / EVENTS_FILE):
        if line.get("event") == BASE_EVALUATION:
            yield 0, {name: value for name, value in line.items() if name.startswith("eval/")}
    for line in iter_jsonl(run_info.run_dir / METRICS_FILE):
        if line["step"] <= (run_info.resume_step or 0):
            yield line["step"], parse_metrics_row(line)

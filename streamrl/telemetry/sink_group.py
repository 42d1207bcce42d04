"""All sinks of a run as a single object, created from the telemetry section of the config."""

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from streamrl.files.atomic_write import wrap_disk_errors
from streamrl.files.bounded_read import iter_jsonl
from streamrl.files.optional_package import import_optional
from streamrl.telemetry.alerts import ALERT_EVENT, AlertWatch
from streamrl.telemetry.chrome_trace import MAX_TRACE_BYTES, TraceSink, check_trace
from streamrl.telemetry.config import TENSORBOARD, TelemetryConfig
from streamrl.telemetry.console import LiveConsole, PlainConsole, RunConsole
from streamrl.telemetry.metric_names import Histogram, MetricsRow, parse_metrics_row, validate_row
from streamrl.telemetry.progress import RunInfo, WorkStatus
from streamrl.telemetry.rollout_log import RecordedGroup
from streamrl.telemetry.sinks import (
    BASE_EVALUATION,
    EVENTS_FILE,
    METRICS_FILE,
    EventFields,
    EventFieldValue,
    JsonlSink,
    MetricsSink,
)
from streamrl.telemetry.spans import Span
from streamrl.telemetry.wandb_sink import WandbSink, load_run_id

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

FOLDER = "tensorboard"
FLUSH_EVERY_S = 30


class TensorboardSink:
    """Sink that writes the metrics of every step to `tensorboard/` of the run directory.

    is_resumed: the run goes on from a checkpoint; TensorBoard hides the steps of earlier processes
    from the first that is logged anew.
    """

    def __init__(self, run_dir: Path, *, is_resumed: bool = False) -> None:
        self._folder = run_dir / FOLDER
        self._should_purge = is_resumed
        self._writer: SummaryWriter | None = None
        self._step = 0

    def start(self, config: Mapping[str, Any]) -> None:
        """Open the event file. Raises ConfigError without the package, and DiskError."""
        import_optional("tensorboard", setting="telemetry.sinks=tensorboard", extra="tensorboard")
        self._writer = self._open_writer()
        text = json.dumps(config, indent=2, default=str)
        self._writer.add_text("config", f"```json\n{text}\n```", self._step)

    def _open_writer(self, purge_step: int | None = None) -> "SummaryWriter":
        from torch.utils.tensorboard import SummaryWriter

        with wrap_disk_errors(self._folder):
            return SummaryWriter(str(self._folder), purge_step=purge_step, flush_secs=FLUSH_EVERY_S)

    def log_step(self, step: int, row: MetricsRow) -> None:
        """Write the values of a step; metrics without a value are left out."""
        assert self._writer is not None, "the sink is not started"
        if self._should_purge:
            self._writer.close()  # type: ignore[no-untyped-call]
            self._writer, self._should_purge = self._open_writer(step), False
        self._step = step
        with wrap_disk_errors(self._folder):
            for name, value in row.items():
                if isinstance(value, Histogram):
                    self._write_histogram(name, value, step)
                elif math.isfinite(value):
                    self._writer.add_scalar(name, float(value), step)

    def _write_histogram(self, name: str, histogram: Histogram, step: int) -> None:
        assert self._writer is not None
        counts, lows = histogram.counts, histogram.edges[:-1]
        values = list(zip(lows, counts, strict=True))
        self._writer.add_histogram_raw(  # type: ignore[no-untyped-call]
            name,
            min=lows[0],
            max=max((low for low, count in values if count), default=lows[0]),
            num=sum(counts),
            sum=sum(low * count for low, count in values),
            sum_squares=sum(low * low * count for low, count in values),
            bucket_limits=list(histogram.edges[1:]),
            bucket_counts=list(counts),
            global_step=step,
        )

    def log_event(self, name: str, fields: EventFields) -> None:
        assert self._writer is not None, "the sink is not started"
        text = "  \n".join(f"{key}: {value}" for key, value in fields.items())
        with wrap_disk_errors(self._folder):
            self._writer.add_text(f"events/{name}", text or name, self._step)

    def close(self, summary: EventFields) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            with wrap_disk_errors(self._folder):
                writer.close()  # type: ignore[no-untyped-call]


LOG_WIDTH = 160
"""Columns of plain lines in a file or pipe."""


class SinkGroup:
    """All sinks of a run: forwards metrics, events and spans, and validates metrics rows."""

    def __init__(
        self,
        sinks: Sequence[MetricsSink],
        *,
        console: RunConsole | None = None,
        trace: TraceSink | None = None,
        alert_watch: AlertWatch | None = None,
    ) -> None:
        # Sinks start in this order and close in reverse. The console starts first, so its summary
        # is printed last. The trace starts last, because it replaces the trace of an earlier run:
        # until then another sink may have refused to start over that run.
        self.sinks: list[MetricsSink] = [s for s in (console, *sinks, trace) if s is not None]
        self.console = console
        self._trace_sink = trace
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
        """Show a step whose recorded row stands on the console, and log it nowhere."""
        self._last_step = step
        if self.console is not None:
            self.console.log_step(step, row)

    def log_event(self, name: str, fields: EventFields) -> None:
        for sink in self.sinks:
            sink.log_event(name, fields)

    def log_rollouts(self, step: int, groups: Sequence[RecordedGroup]) -> None:
        """Forward recorded rollouts to wandb, the only sink with tables."""
        for sink in self.sinks:
            if isinstance(sink, WandbSink):
                sink.log_rollouts(step, groups)

    def write_spans(self, spans: Iterable[Span]) -> None:
        if self._trace_sink is not None:
            self._trace_sink.write_spans(spans)

    def show_status(self, status: WorkStatus) -> None:
        """Show the work that a run waits for on the console; empty text removes the status."""
        if self.console is not None:
            self.console.show_status(status)

    def close(self, summary: EventFields) -> None:
        """Close all sinks, the console last, even if some fail. A second call has no effect."""
        self._summary.update(summary)
        self._open_sinks.close()


def make_sink_group(
    config: TelemetryConfig, run_info: RunInfo, *, console: Console | None = None
) -> SinkGroup:
    """Create the sinks of a telemetry config; `console` defaults to standard output."""
    resumed = run_info.resume_step is not None
    sinks: list[MetricsSink] = [JsonlSink(run_info.run_dir, is_resumed=resumed)]
    if config.uses_wandb:
        resume_id = load_run_id(run_info.run_dir) if resumed else None
        sinks.append(
            WandbSink(run_info.run_dir, config.wandb, run_name=run_info.name, resume_id=resume_id)
        )
    if TENSORBOARD in config.sinks:
        sinks.append(TensorboardSink(run_info.run_dir, is_resumed=resumed))
    return SinkGroup(
        sinks,
        console=make_console(config.console, run_info, console),
        trace=TraceSink(run_info.run_dir, resume=resumed, most_bytes=MAX_TRACE_BYTES),
        alert_watch=AlertWatch(run_info.compares_rollouts),
    )


def check_resumable_sinks(config: TelemetryConfig, run_dir: Path) -> None:
    """Raise ConfigError if a resumed run cannot continue its trace or its wandb run."""
    if config.uses_wandb:
        load_run_id(run_dir)
    check_trace(run_dir)


def make_console(kind: str, run_info: RunInfo, console: Console | None = None) -> RunConsole | None:
    """Create the console for a value of telemetry.console; None for "none".

    kind: "auto" is live on a terminal that can redraw and shows Unicode, plain elsewhere.
    """
    if kind == "none":
        return None
    console = console or make_stdout_console()
    can_be_live = console.is_terminal and not console.is_dumb_terminal
    is_live = kind == "live" or (can_be_live and console.encoding.startswith("utf"))
    run_console = (
        LiveConsole(run_info, console)
        if is_live and kind != "plain"
        else PlainConsole(run_info, console)
    )
    if run_info.resume_step is not None:
        run_console.restore_rows(_read_past_rows(run_info))
    return run_console


def make_stdout_console() -> Console:
    """Return a console for standard output; rich gives a file 80 columns, too few for a step."""
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

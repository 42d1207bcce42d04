"""One telemetry object for a run: its sinks, made from the configuration and told all at once."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console

from streamrl.telemetry.chrome_trace import MAX_TRACE_BYTES, TraceSink, check_trace
from streamrl.telemetry.config import TelemetryConfig
from streamrl.telemetry.console import PlainConsole, RunConsole
from streamrl.telemetry.live_console import LiveConsole
from streamrl.telemetry.metric_names import MetricsRow, parse_metrics_row, validate_row
from streamrl.telemetry.progress import RunInfo
from streamrl.telemetry.sinks import (
    BASE_EVALUATION,
    EVENTS_FILE,
    METRICS_FILE,
    EventFields,
    JsonlSink,
    MetricsSink,
    read_jsonl,
)
from streamrl.telemetry.spans import Span
from streamrl.telemetry.wandb_sink import WandbSink, load_run_id


class SinkGroup:
    """Forwards what a run reports to all of its sinks, checking rows against the contract."""

    def __init__(
        self,
        sinks: Sequence[MetricsSink],
        *,
        console: RunConsole | None = None,
        trace: TraceSink | None = None,
    ) -> None:
        # The console first, to show the start and to print the summary last; the trace last, as it
        # takes the place of a file that another sink may refuse to touch.
        ends = [[console] if console else [], sinks, [trace] if trace else []]
        self.sinks: list[MetricsSink] = [sink for part in ends for sink in part]
        self.console = console
        self._trace_sink = trace
        self._last_step = -1
        self._open_sinks = ExitStack()
        self._summary: EventFields = {}

    def start(self, config: Mapping[str, Any]) -> None:
        """Start all sinks, the console first. If one fails, those already started are closed."""
        with ExitStack() as started:
            for sink in self.sinks:
                sink.start(config)
                started.callback(self._close_sink, sink)
            self._open_sinks = started.pop_all()

    def log_step(self, step: int, row: MetricsRow) -> None:
        """Give a step's one row to all sinks.

        Raises ValueError for a name that is not in the contract and for a step that does not
        ascend: evaluations of a step belong to its row (the base model's to that of step 0).
        """
        validate_row(row)
        if step <= self._last_step:
            raise ValueError(f"step {step} was reported after step {self._last_step}")
        self._last_step = step
        for sink in self.sinks:
            sink.log_step(step, row)

    def log_event(self, name: str, fields: EventFields) -> None:
        """Give an event to all sinks."""
        for sink in self.sinks:
            sink.log_event(name, fields)

    def write_spans(self, spans: Iterable[Span]) -> None:
        """Add drained spans to the trace, if there is one."""
        if self._trace_sink is not None:
            self._trace_sink.write_spans(spans)

    def show_status(self, text: str) -> None:
        """Show on the console what is being waited for; an empty text ends it."""
        if self.console is not None:
            self.console.show_status(text)

    def close(self, summary: EventFields) -> None:
        """Close all sinks, the console last, each also if another fails.

        A second call does nothing.
        """
        self._summary = summary
        self._open_sinks.close()

    def _close_sink(self, sink: MetricsSink) -> None:
        sink.close(self._summary)


def make_sink_group(
    config: TelemetryConfig, facts: RunInfo, *, console: Console | None = None
) -> SinkGroup:
    """The sinks a run's configuration asks for; `console` (standard output) is where it prints."""
    resumed = facts.resume_step is not None
    sinks: list[MetricsSink] = [JsonlSink(facts.run_dir, resume_step=facts.resume_step)]
    if config.wandb.mode != "disabled":
        resume_id = load_run_id(facts.run_dir) if resumed else None
        sinks.append(
            WandbSink(facts.run_dir, config.wandb, run_name=facts.name, resume_id=resume_id)
        )
    trace = None
    if config.trace:
        trace = TraceSink(facts.run_dir, resume=resumed, most_bytes=MAX_TRACE_BYTES)
    return SinkGroup(sinks, console=make_console(config.console, facts, console), trace=trace)


def check_resumable_sinks(config: TelemetryConfig, run_dir: Path) -> None:
    """Raise ConfigError if a run cannot go on with what its sinks have written so far."""
    if config.wandb.mode != "disabled":
        load_run_id(run_dir)
    if config.trace:
        check_trace(run_dir)


def make_console(kind: str, facts: RunInfo, console: Console | None = None) -> RunConsole | None:
    """The console for a `telemetry.console` setting; None for none.

    A live view needs a terminal that can be redrawn and shows Unicode; auto is plain elsewhere.
    """
    if kind == "none":
        return None
    console = console or Console(highlight=False)
    can_be_live = console.is_terminal and not console.is_dumb_terminal
    is_live = kind == "live" or (can_be_live and console.encoding.startswith("utf"))
    made = (
        LiveConsole(facts, console) if is_live and kind != "plain" else PlainConsole(facts, console)
    )
    if facts.resume_step is not None:
        made.restore_rows(_read_past_rows(facts))
    return made


def _read_past_rows(facts: RunInfo) -> Iterable[tuple[int, MetricsRow]]:
    """The base model's evaluation and the rows of metrics.jsonl up to the step that is resumed."""
    for line in read_jsonl(facts.run_dir / EVENTS_FILE):
        if line.get("event") == BASE_EVALUATION:
            yield 0, {name: value for name, value in line.items() if name.startswith("eval/")}
    for line in read_jsonl(facts.run_dir / METRICS_FILE):
        if line["step"] <= (facts.resume_step or 0):
            yield line["step"], parse_metrics_row(line)

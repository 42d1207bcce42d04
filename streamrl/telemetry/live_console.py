"""Live view of a run on a terminal: progress, reward, staleness, stages and events."""

import atexit
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.measure import Measurement
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from streamrl.telemetry.console import RunConsole, format_filter_stats
from streamrl.telemetry.metric_names import MetricsRow
from streamrl.telemetry.progress import (
    DEPTH_PREFIX,
    IDLE_PREFIX,
    RunInfo,
    RunProgress,
    WorkStatus,
    format_duration,
    format_fields,
    format_number,
    render_sparkline,
)
from streamrl.telemetry.progress_line import ACCENT, build_status_row, make_spinner
from streamrl.telemetry.sinks import QUIET_EVENTS, EventFields

REFRESHES_PER_S = 4
_BAR_WIDTH = 20
_SHOWN_EVENTS = 3
SHOWN_EVALS = ("mean_at_k", "pass_at_1")
"""Evaluations with a line in the view: the first that the run has."""


class LiveConsole(RunConsole):
    """Console that keeps a view of the run at the bottom of the terminal and prints lines above.

    `close` removes the view, restores the terminal and prints the summary. If the program exits
    without `close`, atexit restores the terminal.
    """

    def __init__(
        self, run_info: RunInfo, console: Console, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(run_info, console, clock=clock)
        # Lock order: rich.live holds its own lock while it calls `render`, which takes this lock.
        # Printing takes rich's lock, so printing under this lock would deadlock.
        self._lock = threading.Lock()
        self._status = WorkStatus("starting")
        self._status_since = self._last_step_at = self.started_at
        self._latest_events: deque[tuple[float, str, str]] = deque(maxlen=_SHOWN_EVENTS)
        self._spinner = make_spinner(console)
        self._live = Live(
            console=console,
            get_renderable=self.render,
            refresh_per_second=REFRESHES_PER_S,
            transient=True,
        )

    def start(self, config: Mapping[str, Any]) -> None:
        super().start(config)
        self._status_since = self._last_step_at = self.started_at
        self._live.start(refresh=True)
        atexit.register(self._live.stop)

    def show_status(self, status: WorkStatus) -> None:
        with self._lock:
            if status.text != self._status.text:
                self._status_since = self.clock() - status.elapsed_s
            self._status = status

    def log_event(self, name: str, fields: EventFields) -> None:
        with self._lock:
            if name not in QUIET_EVENTS:
                since_start_s = self.clock() - self.started_at
                self._latest_events.append((since_start_s, name, format_fields(fields.items())))
        super().log_event(name, fields)

    def add_row(self, step: int, row: MetricsRow) -> Mapping[str, float]:
        with self._lock:
            self._last_step_at = self.clock()
            if step > 0:
                self._status = WorkStatus("")
            return super().add_row(step, row)

    def close(self, summary: EventFields) -> None:
        self._live.stop()
        atexit.unregister(self._live.stop)
        super().close(summary)

    def render(self) -> RenderableType:
        """Build the view of the run; rich calls this at every refresh."""
        with self._lock:
            parts: list[RenderableType] = [Text(), self._build_header()]
            if self.progress.has_steps:
                parts += [
                    Text(),
                    _build_metrics_grid(self.progress),
                    Text(),
                    _build_stages_grid(self.progress),
                ]
            if self._latest_events:
                parts += [
                    Text(),
                    Text(" events", style="dim"),
                    _build_events_grid(self._latest_events),
                ]
            if self._status.text:
                self._status.set_elapsed(self.clock() - self._status_since)
                row = build_status_row(self._status, self._spinner)
                parts += [Text(), Padding(row, (0, 0, 0, 1))]
            return Group(*parts)

    def _build_header(self) -> RenderableType:
        """Build the top line of the view: name of the run, step, progress bar and remaining
        time."""
        progress = self.progress
        run_info = progress.run_info
        grid = Table.grid(padding=(0, 2, 0, 0), expand=True)
        grid.add_column(no_wrap=True, overflow="ellipsis")
        grid.add_column(no_wrap=True)
        grid.add_column(ratio=1)
        grid.add_column(no_wrap=True, justify="right")
        remaining_s = progress.estimate_remaining_s(self.clock() - self._last_step_at)
        grid.add_row(
            Text(f" {run_info.name}", style=f"bold {ACCENT}"),
            Text(f"step {progress.step}/{run_info.num_steps}"),
            ProgressBar(run_info.num_steps, progress.step, complete_style=ACCENT),
            Text(
                f"{format_duration(remaining_s)} left" if math.isfinite(remaining_s) else "",
                style="dim",
            ),
        )
        return grid


class _SparklineText:
    """A series of numbers for rich, drawn as block characters over the width of the table cell."""

    def __init__(self, values: Sequence[float]) -> None:
        self._values = values

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(render_sparkline(self._values, options.max_width), style=ACCENT)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(min(1, options.max_width), min(len(self._values), options.max_width))


def _build_metrics_grid(progress: RunProgress) -> RenderableType:
    get_value, bound = progress.get, progress.run_info.max_staleness
    grid = Table.grid(padding=(0, 2, 0, 0), expand=True)
    grid.add_column(style="dim", no_wrap=True, min_width=11)
    grid.add_column(style="bold", no_wrap=True, min_width=6, justify="right")
    grid.add_column(ratio=1, no_wrap=True)
    grid.add_row(" reward", format_number(get_value("reward/mean")), _build_trend(progress.rewards))
    for name in [name for name in SHOWN_EVALS if name in progress.evals][:1]:
        values = progress.evals[name]
        grid.add_row(f" eval {name}", format_number(values[-1]), _build_trend(values))
    mean, largest = get_value("staleness/mean"), get_value("staleness/max")
    is_exceeded = largest > bound
    text = f"largest {format_number(largest, 0)}, bound {bound} versions"
    staleness = Table.grid(padding=(0, 2, 0, 0))
    staleness.add_column(width=_BAR_WIDTH)
    staleness.add_column(no_wrap=True)
    share = min(mean / bound, 1.0) if bound and math.isfinite(mean) else 0.0
    staleness.add_row(
        ProgressBar(1.0, share, complete_style=ACCENT, finished_style=ACCENT),
        Text(text, style="bold red" if is_exceeded else "dim"),
    )
    grid.add_row(" staleness", format_number(mean, 2), staleness)
    tokens = format_number(get_value("throughput/tokens_per_s"), 0)
    step_s = format_number(get_value("time/step_s"), 1)
    grid.add_row(" tokens/s", tokens, Text(f"{step_s} s per step", style="dim"))
    if progress.run_info.has_filter:
        filtered_fraction, seconds = format_filter_stats(progress)
        filter_text = f"{seconds} of generation and scoring lost"
        grid.add_row(" filtered", filtered_fraction, Text(filter_text, style="dim"))
    publish_s, pull_s = (
        format_number(get_value(f"weights/{n}"), 2) for n in ("publish_s", "pull_s")
    )
    weights_text = Text(f"publish {publish_s} s, pull {pull_s} s", style="dim")
    grid.add_row(" weights", f"v{format_number(get_value('weights/version'), 0)}", weights_text)
    return grid


def _build_trend(values: Sequence[float]) -> RenderableType:
    """Build a sparkline and the first value of a series."""
    trend = Table.grid(padding=(0, 2, 0, 0))
    trend.add_column()
    trend.add_column(no_wrap=True, style="dim")
    trend.add_row(
        _SparklineText(tuple(values)), f"from {format_number(values[0])}" if values else ""
    )
    return trend


def _build_stages_grid(progress: RunProgress) -> RenderableType:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True, min_width=11)
    grid.add_column(no_wrap=True, min_width=7, justify="right")
    grid.add_column(width=_BAR_WIDTH)
    grid.add_column(no_wrap=True, justify="right", min_width=4)
    grid.add_row(" stage", Text("waiting", style="dim"), Text("busy", style="dim"), "")
    for stage in progress.stages:
        depth, idle = progress.get(DEPTH_PREFIX + stage), progress.get(IDLE_PREFIX + stage)
        busy = min(max(1.0 - idle, 0.0), 1.0)
        is_measured = math.isfinite(idle)
        grid.add_row(
            f" {stage}",
            format_number(depth, 0) if math.isfinite(depth) else "",
            ProgressBar(1.0, busy, complete_style="green", finished_style="green")
            if is_measured
            else "",
            f"{busy:.0%}" if is_measured else "",
        )
    return grid


def _build_events_grid(events: Collection[tuple[float, str, str]]) -> RenderableType:
    """Build the latest events: time since the start, name, fields."""
    grid = Table.grid(padding=(0, 2, 0, 0), expand=True)
    grid.add_column(style="dim", no_wrap=True, min_width=7, justify="right")
    # The fields are cut where they do not fit, never the name.
    longest = max(len(name) for _, name, _ in events)
    grid.add_column(style="yellow", no_wrap=True, min_width=longest)
    grid.add_column(ratio=1)
    for since_start_s, name, text in events:
        shown = Text(text, no_wrap=True, overflow="ellipsis")
        grid.add_row(format_duration(since_start_s), Text(name), shown)
    return grid

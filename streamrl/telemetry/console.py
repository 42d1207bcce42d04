"""Console output of a run: a line per step on a plain console, and a final summary.

The live view of a terminal is in live_console.py. Both consoles print evaluations and events in the
same way.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from streamrl.files.printable_text import make_printable
from streamrl.telemetry.metric_names import MetricsRow
from streamrl.telemetry.progress import (
    DEPTH_PREFIX,
    FILTER_COST_METRICS,
    IDLE_PREFIX,
    PRINT_EVERY_S,
    RunInfo,
    RunProgress,
    WorkStatus,
    format_duration,
    format_fields,
    format_number,
)
from streamrl.telemetry.sinks import EVENTS_FILE, EventFields

EVENTS_PER_STEP = 3
EVENTS_EVERY_S = 30.0
FILE_ONLY_FIELDS = {"objective", "layout", "goes_back"}
"""Fields of events that only a later resume reads (`recorded_rows`)."""
_HEADER_EVERY = 25
_LABEL_WIDTH = 11
_GAP = "  "


@dataclass
class _EventCounter:
    """Number of events of one name since the last step, and of lines printed for these events."""

    count: int = 0
    num_printed: int = 0
    last_printed_s: float = 0.0

    def count_event(self, now: float) -> bool:
        """Count an event; return whether to print it, and if so count a printed line."""
        self.count += 1
        is_power_of_ten = self.count == 10 ** (len(str(self.count)) - 1)
        is_due = (
            self.count <= EVENTS_PER_STEP
            or is_power_of_ten
            or now - self.last_printed_s >= EVENTS_EVERY_S
        )
        if is_due:
            self.num_printed, self.last_printed_s = self.count, now
        return is_due


class RunConsole:
    """Console sink that prints evaluations, events and the summary; a subclass displays the steps.

    Events of one name can be too many to print. A line is printed for the first EVENTS_PER_STEP
    events of a step, then for the 10th, 100th and so on with the count so far, then for an event
    every EVENTS_EVERY_S. The step's end prints the number of events left out.
    """

    def __init__(
        self, run_info: RunInfo, console: Console, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.progress = RunProgress(run_info)
        self.console = console
        self.clock = clock
        self.started_at = clock()
        self._event_counters: dict[str, _EventCounter] = {}

    def start(self, config: Mapping[str, Any]) -> None:
        self.started_at = self.clock()

    def restore_rows(self, rows: Iterable[tuple[int, MetricsRow]]) -> None:
        """Add the rows of a resumed run's earlier steps: first values stay those of its start."""
        for step, row in rows:
            self.progress.add_row(step, row)

    def show_status(self, status: WorkStatus) -> None:
        """Show the work that a run waits for, such as "starting"; empty text removes the status."""

    def log_step(self, step: int, row: MetricsRow) -> None:
        self._print_omitted_events()
        evals = self.add_row(step, row)
        if evals:
            self.print_line("eval", format_fields([("step", step), *evals.items()]), style="green")
        self.show_progress()

    def add_row(self, step: int, row: MetricsRow) -> Mapping[str, float]:
        return self.progress.add_row(step, row)

    def show_progress(self) -> None:
        """Display the latest step; does nothing in this class."""

    def log_event(self, name: str, fields: EventFields) -> None:
        events = self._event_counters.setdefault(name, _EventCounter())
        if events.count_event(self.clock()):
            so_far = f"{events.count:,} so far, the last: "
            shown = [item for item in fields.items() if item[0] not in FILE_ONLY_FIELDS]
            text = format_fields(shown)
            text = text if events.count <= EVENTS_PER_STEP else so_far + text
            self.print_line(name, text, style="yellow")

    def _print_omitted_events(self) -> None:
        for name, events in self._event_counters.items():
            if events.count > events.num_printed:
                more = f"{events.count - events.num_printed:,} more, see {EVENTS_FILE}"
                self.print_line(name, more, style="yellow")
        self._event_counters.clear()

    def close(self, summary: EventFields) -> None:
        """End the display and print the summary of the run.

        If no step was added, print the outcome and the checkpoint instead.
        """
        self._print_omitted_events()
        if self.progress.latest_values:
            wall_s = self.clock() - self.started_at
            self.console.print()
            self.console.print(build_summary_table(self.progress, wall_s, summary))
        elif summary.get("checkpoint"):
            for name in ("outcome", "written"):
                self.print_line(name, str(summary[name]))

    def print_line(self, label: str, text: str, *, style: str = "") -> None:
        grid = Table.grid(padding=(0, 2, 0, 0))
        grid.add_column(no_wrap=True, min_width=_LABEL_WIDTH)
        grid.add_column(overflow="fold")
        grid.add_row(Text(f" {label}", style=style), Text(make_printable(text)))
        self.console.print(grid)


class PlainConsole(RunConsole):
    """Console that prints an aligned line per step, and the header every _HEADER_EVERY steps.

    The output is ASCII. Columns beyond the console's width are left out.
    """

    _steps_shown = 0
    _last_status = ""
    _status_due_at = 0.0

    def start(self, config: Mapping[str, Any]) -> None:
        super().start(config)
        run_info = self.progress.run_info
        resumed = f", resumed after step {self.progress.step}" if run_info.resume_step else ""
        self.print_line(
            run_info.name, f"{run_info.num_steps} steps{resumed}, writing {run_info.run_dir}"
        )

    def show_status(self, status: WorkStatus) -> None:
        """Print a status that is new, and every PRINT_EVERY_S how far it is."""
        now = self.clock()
        if status.text and (status.text != self._last_status or now >= self._status_due_at):
            self.print_line(format_duration(now - self.started_at), status.description)
            self._status_due_at = now + PRINT_EVERY_S
        self._last_status = status.text

    def show_progress(self) -> None:
        progress = self.progress
        if progress.step == 0:
            return
        columns = _select_columns(_build_columns(progress), self.console.width)
        if self._steps_shown % _HEADER_EVERY == 0:
            self._print_line(_format_groups(columns))
            self._print_line(_format_cells(columns, [column.header for column in columns]))
        self._print_line(_format_cells(columns, [column.value for column in columns]))
        self._steps_shown += 1

    def _print_line(self, text: str) -> None:
        self.console.print(Text(text), no_wrap=True, overflow="crop")


@dataclass(frozen=True)
class _Column:
    """Column of the plain console. group: heading over several columns; "" for a column alone.

    rank: columns of the highest rank are the first to be left out where the line is too long.
    """

    group: str
    header: str
    value: str
    rank: int = 0
    min_width: int = 0

    @property
    def width(self) -> int:
        return max(len(self.header), len(self.value), self.min_width)


def _build_columns(progress: RunProgress) -> list[_Column]:
    get_value, run_info = progress.get, progress.run_info
    num_steps = str(run_info.num_steps)
    columns = [
        _Column("", "step", f"{progress.step}/{num_steps}", min_width=2 * len(num_steps) + 1),
        _Column("", "reward", format_number(get_value("reward/mean")), min_width=7),
        _Column("staleness", "mean", format_number(get_value("staleness/mean"), 1)),
        _Column("staleness", "max", format_number(get_value("staleness/max"), 0)),
    ]
    if run_info.has_filter:
        fraction, seconds = format_filter_stats(progress)
        columns += [
            _Column("filtered", "groups", fraction),
            _Column("filtered", "cost", seconds, min_width=6),
        ]
    columns += [
        _Column("groups waiting for", stage, format_number(get_value(DEPTH_PREFIX + stage), 0), 1)
        for stage in progress.stages
        if math.isfinite(get_value(DEPTH_PREFIX + stage))
    ]
    columns += [
        _Column("busy", stage, _format_busy(get_value(IDLE_PREFIX + stage)), 2)
        for stage in progress.stages
    ]
    return [
        *columns,
        _Column("", "tokens/s", format_number(get_value("throughput/tokens_per_s"), 0), 3),
        _Column("", "s/step", format_number(get_value("time/step_s"), 1)),
        _Column("", "left", format_duration(progress.estimate_remaining_s()), min_width=7),
    ]


def _format_busy(idle: float) -> str:
    return f"{max(0.0, 1.0 - idle):.0%}" if math.isfinite(idle) else "-"


def _select_columns(columns: list[_Column], width: int) -> list[_Column]:
    """Return the columns that fit a line; those of the highest rank are left out first."""
    for rank in (3, 2, 1):
        if len(_format_groups(columns)) <= width and _measure_line(columns) <= width:
            break
        columns = [column for column in columns if column.rank != rank]
    return columns


def _measure_line(columns: list[_Column]) -> int:
    return len(_format_cells(columns, [column.header for column in columns]))


def _format_cells(columns: list[_Column], cells: list[str]) -> str:
    padded = (f"{cell:>{c.width}}" for c, cell in zip(columns, cells, strict=True))
    return " " + _GAP.join(padded)


def _format_groups(columns: list[_Column]) -> str:
    """Return the line above the headers: each group's name over its columns."""
    parts = []
    for group, members in itertools.groupby(columns, key=lambda column: column.group):
        for names in [list(members)] if group else [[column] for column in members]:
            width = sum(column.width for column in names) + len(_GAP) * (len(names) - 1)
            parts.append(f"{group:<{width}}")
    return (" " + _GAP.join(parts)).rstrip()


def format_filter_stats(progress: RunProgress) -> tuple[str, str]:
    """Return the fraction of groups filtered in the last step and their cost: "88%", "12.1s"."""
    filtered_fraction = progress.get("filter/share")
    seconds = sum(progress.get(name) for name in FILTER_COST_METRICS)
    text = f"{filtered_fraction:.0%}" if math.isfinite(filtered_fraction) else "-"
    return text, f"{format_number(seconds, 1)} s"


def build_summary_table(progress: RunProgress, wall_s: float, summary: EventFields) -> Table:
    """Build the final table: first and last reward and evaluations, totals.

    The fields of `summary` follow.
    """
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True, min_width=_LABEL_WIDTH)
    table.add_column(overflow="fold")
    rewards, run_info = progress.rewards, progress.run_info
    rows = [("steps", f"{progress.step} of {run_info.num_steps}")]
    if rewards:
        rows.append(("reward", f"{format_number(rewards[0])} -> {format_number(rewards[-1])}"))
    for name, values in progress.evals.items():
        rows.append(("eval", f"{name} {format_number(values[0])} -> {format_number(values[-1])}"))
    since = " since the resume" if run_info.resume_step is not None else ""
    rows.append(("wall time", format_duration(wall_s) + since))
    rows.append(("tokens", f"{progress.num_tokens:,.0f}"))
    rows.append(("filtered", progress.format_filter_line()))
    rows += [(name, str(value)) for name, value in summary.items()]
    for label, text in rows:
        if text:
            table.add_row(Text(f" {label}"), Text(text))
    return table

"""What a run prints: one line per step where output is no terminal, and the final summary anywhere.

The live view of a terminal is in live_console.py; both print evaluations, events and log lines
alike.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from streamrl.telemetry.metric_names import Row
from streamrl.telemetry.progress import (
    DEPTH,
    FILTER_COSTS,
    IDLE,
    Progress,
    RunFacts,
    duration_text,
    fields_text,
    number_text,
)
from streamrl.telemetry.sinks import EVENTS_FILE, Fields

EVENTS_PER_STEP = 3
EVENTS_EVERY_S = 30.0
_HEADER_EVERY = 25
_LABEL_WIDTH = 11
_GAP = "  "


@dataclass
class _Told:
    """The events of one name since the last step: how many, for how many of them there is a line,
    and when the last line was printed, s.
    """

    count: int = 0
    told: int = 0
    at: float = 0.0

    def add(self, now: float) -> bool:
        """Count one more; whether it is to be printed, which is then taken as done."""
        self.count += 1
        is_round = self.count == 10 ** (len(str(self.count)) - 1)
        due = self.count <= EVENTS_PER_STEP or is_round or now - self.at >= EVENTS_EVERY_S
        if due:
            self.told, self.at = self.count, now
        return due


class RunConsole:
    """A sink that talks to a person. This class prints lines; a subclass shows the steps.

    Of the events of one name, the first EVENTS_PER_STEP of a step are printed; then, with how many
    there have been, the 10th, 100th and so on and one every EVENTS_EVERY_S; then how many more.
    """

    def __init__(
        self,
        facts: RunFacts,
        console: Console,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.progress = Progress(facts)
        self.console = console
        self.clock = clock
        self.started_at = clock()
        self._events: dict[str, _Told] = {}

    def start(self, config: Mapping[str, Any]) -> None:
        """Begin the display."""
        self.started_at = self.clock()

    def resume(self, rows: Iterable[tuple[int, Row]]) -> None:
        """Take over the rows of the run's earlier part, so that first values stay the first."""
        for step, row in rows:
            self.progress.add(step, row)

    def status(self, text: str) -> None:
        """Say what is being waited for; an empty text ends it."""

    def step(self, step: int, row: Row) -> None:
        """Show a step."""
        self._print_left_out()
        evals = self.take(step, row)
        if evals:
            self.line("eval", fields_text([("step", step), *evals.items()]), style="green")
        self.show()

    def take(self, step: int, row: Row) -> Mapping[str, float]:
        """Add the row to the progress; returns its evaluations."""
        return self.progress.add(step, row)

    def show(self) -> None:
        """Show the progress, which has just taken a step."""

    def event(self, name: str, fields: Fields) -> None:
        """Print an event, unless this step had enough of its name for now."""
        events = self._events.setdefault(name, _Told())
        if events.add(self.clock()):
            so_far = f"{events.count:,} so far, the last: "
            text = fields_text(fields.items())
            text = text if events.count <= EVENTS_PER_STEP else so_far + text
            self.line(name, text, style="yellow")

    def _print_left_out(self) -> None:
        for name, events in self._events.items():
            if events.count > events.told:
                more = f"{events.count - events.told:,} more, see {EVENTS_FILE}"
                self.line(name, more, style="yellow")
        self._events.clear()

    def close(self, summary: Fields) -> None:
        """End the display and print the summary; of a run without a step, what it left behind."""
        self._print_left_out()
        if self.progress.latest:
            wall_s = self.clock() - self.started_at
            self.console.print()
            self.console.print(summary_table(self.progress, wall_s, summary))
        elif summary.get("checkpoint"):
            for name in ("outcome", "written"):
                self.line(name, str(summary[name]))

    def line(self, label: str, text: str, *, style: str = "") -> None:
        """Print one thing that happened; long text continues below its beginning."""
        grid = Table.grid(padding=(0, 2, 0, 0))
        grid.add_column(no_wrap=True, min_width=_LABEL_WIDTH)
        grid.add_column(overflow="fold")
        grid.add_row(Text(f" {label}", style=style), Text(text))
        self.console.print(grid)


class PlainConsole(RunConsole):
    """One aligned line per step under a header that comes back now and then. ASCII only.

    Columns that do not fit the console's width are left out, the last ones first.
    """

    _steps_shown = 0
    _last_status = ""

    def start(self, config: Mapping[str, Any]) -> None:
        """Print what the run is going to do."""
        super().start(config)
        facts = self.progress.facts
        resumed = f", resumed after step {self.progress.step}" if facts.resume_step else ""
        self.line(facts.name, f"{facts.num_steps} steps{resumed}, writing {facts.run_dir}")

    def status(self, text: str) -> None:
        """Print the status if it changed."""
        if text and text != self._last_status:
            self.line(duration_text(self.clock() - self.started_at), text)
        self._last_status = text

    def show(self) -> None:
        """Print the line of the step; a row with nothing but evaluations has none."""
        progress = self.progress
        if progress.step == 0:
            return
        columns = _columns(progress)
        if self._steps_shown % _HEADER_EVERY == 0:
            self.line("", f"queue and idle of: {', '.join(progress.stages)}")
            self._print_cells([header for header, _, _ in columns], columns)
        self._print_cells([value for _, value, _ in columns], columns)
        self._steps_shown += 1

    def _print_cells(self, cells: list[str], columns: list[tuple[str, str, int]]) -> None:
        text = ""
        for cell, (_, _, width) in zip(cells, columns, strict=True):
            longer = f"{text}{_GAP if text else ' '}{cell:>{width}}"
            if text and len(longer) > self.console.width:
                break
            text = longer
        self.console.print(Text(text), no_wrap=True, overflow="crop")


def _columns(progress: Progress) -> list[tuple[str, str, int]]:
    """Header, value and width of each column of a step's line."""
    get, facts, stages = progress.get, progress.facts, progress.stages
    num_steps = str(facts.num_steps)
    depths = " ".join(f"{number_text(get(DEPTH + stage), 0):>3}" for stage in stages)
    idles = " ".join(f"{number_text(get(IDLE + stage) * 100, 0):>3}" for stage in stages)
    staleness = f"{number_text(get('staleness/mean'), 1)}/{number_text(get('staleness/max'), 0)}"
    filtered = [("filtered", " ".join(filter_texts(progress)), 11)] if facts.has_filter else []
    return [
        ("step", f"{progress.step}/{num_steps}", 2 * len(num_steps) + 1),
        ("reward", number_text(get("reward/mean")), 7),
        ("stale", staleness, 6),
        *filtered,
        ("queue", depths, max(len(depths), 5)),
        ("idle %", idles, max(len(idles), 6)),
        ("tok/s", number_text(get("throughput/tokens_per_s"), 0), 6),
        ("step s", number_text(get("time/step_s"), 1), 6),
        ("left", duration_text(progress.left_s()), 7),
    ]


def filter_texts(progress: Progress) -> tuple[str, str]:
    """The share that was filtered in the last step, and the time it took: "88%", "12.1s"."""
    share = progress.get("filter/share")
    seconds = sum(progress.get(name) for name in FILTER_COSTS)
    return f"{share:.0%}" if math.isfinite(share) else "-", f"{number_text(seconds, 1)}s"


def summary_table(progress: Progress, wall_s: float, summary: Fields) -> Table:
    """First and last reward and evaluations, totals, the ledger, and what the run's end says."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True, min_width=_LABEL_WIDTH)
    table.add_column(overflow="fold")
    rewards, facts = progress.rewards, progress.facts
    rows = [("steps", f"{progress.step} of {facts.num_steps}")]
    if rewards:
        rows.append(("reward", f"{number_text(rewards[0])} -> {number_text(rewards[-1])}"))
    for name, last in progress.last_evals.items():
        first = progress.first_evals[name]
        rows.append(("eval", f"{name} {number_text(first)} -> {number_text(last)}"))
    since = " since the resume" if facts.resume_step is not None else ""
    rows.append(("wall time", duration_text(wall_s) + since))
    rows.append(("tokens", f"{progress.tokens:,.0f}"))
    rows.append(("filtered", progress.filter_line()))
    rows.append(("ledger", progress.ledger_line()))
    rows += [(name, str(value)) for name, value in summary.items()]
    for label, text in rows:
        if text:
            table.add_row(Text(f" {label}"), Text(text))
    return table


class ConsoleLogHandler(logging.Handler):
    """Sends log records through the run's console, so that they do not tear a live display."""

    def __init__(self, console: RunConsole, level: int = logging.WARNING) -> None:
        super().__init__(level)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        """Print the record as a line under its level."""
        style = "red" if record.levelno >= logging.ERROR else "yellow"
        self._console.line(record.levelname.lower(), self.format(record), style=style)

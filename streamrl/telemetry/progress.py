"""Progress of a command's work on standard error: a bar, or a spinner where the total is unknown.

    with show_progress("reading rows") as progress:
        progress.describe("checking", len(rows), "rows")
        for row in rows:
            check(row)
            progress.advance()

On a terminal the line appears after SHOW_AFTER_S and disappears at the end. Elsewhere long work
prints plain lines. A thread draws, so counting costs an addition.
"""

import math
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from streamrl.files.printable_text import make_printable

SHOW_AFTER_S = 2.0
"""Time that work has to take until a terminal shows it."""
PRINT_AFTER_S, PRINT_EVERY_S = 10.0, 30.0
"""Time of the first line about work where output is no terminal, and between further ones."""
REFRESH_S = 0.25
ACCENT = "cyan"
BAR_WIDTH = 20
_Item = TypeVar("_Item")


@dataclass
class WorkStatus:
    """Status of work that takes long, `elapsed_s` after its start; no text: there is none.

    total: how many units there are, of which `completed` are done; None if unknown.
    timeout_s: time that the work may take, for which an interrupted run waits; 0: it does not wait.
    """

    text: str
    total: int | None = None
    unit: str = ""
    completed: int = 0
    elapsed_s: float = 0.0
    timeout_s: float = 0.0

    def advance(self, count: int = 1) -> None:
        self.completed += count

    @property
    def count_text(self) -> str:
        """Count as text: "64 of 512 prompts", "64 prompts"; empty if nothing is counted."""
        if self.total:
            return f"{self.completed:,} of {self.total:,} {self.unit}"
        return f"{self.completed:,} {self.unit}" if self.completed else ""

    @property
    def time_text(self) -> str:
        """Time left as text, "1:04 left"; the time so far while that is unknown."""
        if not self.total or not 0 < self.completed <= self.total:
            return format_duration(self.elapsed_s)
        left_s = self.elapsed_s * (self.total - self.completed) / self.completed
        return f"{format_duration(left_s)} left"

    @property
    def description(self) -> str:
        """Text and count in a line: "evaluating version 3: 64 of 512 prompts"."""
        return ": ".join(filter(None, (self.text, self.count_text)))


class ProgressLine:
    """Line on standard error about work of the caller, drawn between `start` and `close`.

    A line that is not started draws nothing. mode: a value of telemetry.console; "plain" prints
    plain lines on a terminal too, "none" nothing.
    """

    def __init__(self, status: WorkStatus | None = None, *, mode: str = "auto") -> None:
        self._status = status or WorkStatus("")
        self._is_enabled = mode != "none"
        self._console = Console(stderr=True, highlight=False)
        # FORCE_COLOR makes rich take a file for a terminal.
        can_redraw = self._console.file.isatty() and not self._console.is_dumb_terminal
        self._is_plain = mode == "plain" or not can_redraw
        self._delay_s = PRINT_AFTER_S if self._is_plain else SHOW_AFTER_S
        self._phase_started_at = time.monotonic()
        self._due_at = self._phase_started_at + self._delay_s
        self._is_hidden = False
        # Lock order: this lock, then rich's. `render` takes none, as rich calls it under its own.
        self._lock = threading.Lock()
        self._spinner = make_spinner(self._console)
        self._live = Live(
            console=self._console,
            get_renderable=self.render,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
        )
        self._has_ended = threading.Event()

    def start(self) -> None:
        if self._is_enabled:
            threading.Thread(target=self._draw, name="progress", daemon=True).start()

    def close(self) -> None:
        """Remove the line and restore the terminal. A second call has no effect."""
        self._has_ended.set()
        self._hide()

    def describe(self, text: str, total: int | None = None, unit: str = "") -> None:
        """Begin the next phase of the work, of `total` units."""
        now = time.monotonic()
        self._status, self._phase_started_at = WorkStatus(text, total, unit), now
        self._due_at = min(self._due_at, now + self._delay_s)

    def advance(self, count: int = 1) -> None:
        self._status.advance(count)

    def track(self, items: Iterable[_Item], total: int) -> Iterator[_Item]:
        """Yield `items`, and count them."""
        self._status.total = total
        for item in items:
            yield item
            self.advance()

    def print_line(self, text: str) -> None:
        """Print a line on standard output; if that is a terminal, hide the progress meanwhile."""
        with self.paused() if sys.stdout.isatty() else nullcontext():
            sys.stdout.write(f"{text}\n")
            sys.stdout.flush()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Hide the line while the block prints to the terminal; it is due again some time later."""
        self._hide()
        try:
            yield
        finally:
            self._due_at = time.monotonic() + self._delay_s
            self._is_hidden = self._has_ended.is_set()

    def refresh(self) -> None:
        """Show the line if it is due, with the current counts."""
        with self._lock:
            now = time.monotonic()
            self._status.elapsed_s = now - self._phase_started_at
            if self._is_hidden or now < self._due_at:
                return
            if self._is_plain:
                self._due_at = now + PRINT_EVERY_S
                text = f"streamrl: {self._status.description}, {self._status.time_text}"
                print(make_printable(text), file=self._console.file, flush=True)
            else:
                self._live.start()
                self._live.refresh()

    def render(self) -> RenderableType:
        return build_status_row(self._status, self._spinner)

    def _draw(self) -> None:
        while not self._has_ended.wait(REFRESH_S):
            self.refresh()

    def _hide(self) -> None:
        with self._lock:
            self._is_hidden = True
            self._live.stop()


@contextmanager
def show_progress(text: str, *, mode: str = "auto") -> Iterator[ProgressLine]:
    """Show the progress of the block once it takes long. mode: a value of telemetry.console."""
    line = ProgressLine(WorkStatus(text), mode=mode)
    try:
        line.start()
        yield line
    finally:
        line.close()


def make_spinner(console: Console) -> Spinner:
    return Spinner("dots" if console.encoding.startswith("utf") else "line", style=ACCENT)


def build_status_row(status: WorkStatus, spinner: Spinner) -> RenderableType:
    """Build a line of a terminal: text, a bar if the total is known, counts, time left or spent."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    cells: list[RenderableType] = [Text(make_printable(status.text), overflow="ellipsis")]
    if status.total:
        done = min(status.completed, status.total)
        cells.append(ProgressBar(status.total, done, width=BAR_WIDTH, complete_style=ACCENT))
    cells += [Text(text) for text in (status.count_text, status.time_text) if text]
    for _ in cells:
        grid.add_column(no_wrap=True, style="dim")
    grid.add_row(*cells)
    spinner.update(text=grid)
    return spinner


def format_number(value: float, digits: int = 3) -> str:
    """Format a number in few characters: "0.412", "-1.250", "12.3k", "4.6M"; "-" for NaN."""
    if not math.isfinite(value):
        return "-"
    for limit, divisor, letter in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= limit:
            return f"{value / divisor:.1f}{letter}"
    return f"{value:.{digits}f}"


def format_duration(seconds: float) -> str:
    """Format seconds as "0:07", "4:12" or "1:02:03"; "-" for NaN."""
    if not math.isfinite(seconds):
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"

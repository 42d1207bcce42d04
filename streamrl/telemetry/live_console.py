"""The live view of a run on a terminal: progress, reward, staleness, and each stage's queue."""

import atexit
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.measure import Measurement
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from streamrl.telemetry.console import RunConsole, filter_texts
from streamrl.telemetry.metric_names import Row
from streamrl.telemetry.progress import (
    DEPTH,
    IDLE,
    Progress,
    RunFacts,
    duration_text,
    number_text,
    sparkline,
)
from streamrl.telemetry.sinks import Fields

REFRESHES_PER_S = 4
_ACCENT = "cyan"
_BAR_WIDTH = 20


class LiveConsole(RunConsole):
    """Keeps a view of the run at the bottom of the terminal; lines are printed above it.

    `close` takes the view away, gives the terminal back and prints the summary; so does the end of
    the program, should nobody call it.
    """

    def __init__(
        self,
        facts: RunFacts,
        console: Console,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(facts, console, clock=clock)
        # Taken within the display's own lock when it redraws: never print while holding it.
        self._lock = threading.Lock()
        self._status = "starting"
        self._status_since = self._step_at = self.started_at
        self._spinner = Spinner("dots", style=_ACCENT)
        self._live = Live(
            console=console,
            get_renderable=self.render,
            refresh_per_second=REFRESHES_PER_S,
            transient=True,
        )

    def start(self, config: Mapping[str, Any]) -> None:
        """Show the view."""
        super().start(config)
        self._status_since = self._step_at = self.started_at
        self._live.start(refresh=True)
        atexit.register(self._live.stop)

    def status(self, text: str) -> None:
        """Show the status with the time since it began."""
        with self._lock:
            if text != self._status:
                self._status, self._status_since = text, self.clock()

    def take(self, step: int, row: Row) -> Mapping[str, float]:
        """Add the row to the progress; a step ends the status of the start-up."""
        with self._lock:
            self._step_at = self.clock()
            if step > 0:
                self._status = ""
            return super().take(step, row)

    def close(self, summary: Fields) -> None:
        """Take the view away, then print the summary."""
        self._live.stop()
        atexit.unregister(self._live.stop)
        super().close(summary)

    def render(self) -> RenderableType:
        """The view as it is now."""
        with self._lock:
            parts: list[RenderableType] = [Text(), self._header()]
            if self.progress.has_steps:
                parts += [Text(), _metrics(self.progress), Text(), _stages(self.progress)]
            if self._status:
                waited = duration_text(self.clock() - self._status_since)
                self._spinner.update(text=Text(f"{self._status}  {waited}", style="dim"))
                parts += [Text(), Padding(self._spinner, (0, 0, 0, 1))]
            return Group(*parts)

    def _header(self) -> RenderableType:
        progress = self.progress
        facts = progress.facts
        grid = Table.grid(padding=(0, 2, 0, 0), expand=True)
        grid.add_column(no_wrap=True, overflow="ellipsis")
        grid.add_column(no_wrap=True)
        grid.add_column(ratio=1)
        grid.add_column(no_wrap=True, justify="right")
        left = progress.left_s(self.clock() - self._step_at)
        grid.add_row(
            Text(f" {facts.name}", style=f"bold {_ACCENT}"),
            Text(f"step {progress.step}/{facts.num_steps}"),
            ProgressBar(facts.num_steps, progress.step, complete_style=_ACCENT),
            Text(f"{duration_text(left)} left" if math.isfinite(left) else "", style="dim"),
        )
        return grid


class _Sparkline:
    """A series of numbers as blocks, as wide as there is room."""

    def __init__(self, values: Sequence[float]) -> None:
        self._values = values

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(sparkline(self._values, options.max_width), style=_ACCENT)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(min(1, options.max_width), min(len(self._values), options.max_width))


def _metrics(progress: Progress) -> RenderableType:
    """Reward with its course, staleness against its bound, throughput and weights."""
    get, rewards = progress.get, progress.rewards
    bound = progress.facts.max_staleness
    beyond = get("staleness/max") > bound
    grid = Table.grid(padding=(0, 2, 0, 0), expand=True)
    grid.add_column(style="dim", no_wrap=True, min_width=11)
    grid.add_column(style="bold", no_wrap=True, min_width=6, justify="right")
    grid.add_column(ratio=1, no_wrap=True)
    course = Table.grid(padding=(0, 2, 0, 0))
    course.add_column()
    course.add_column(no_wrap=True, style="dim")
    ends = f"from {number_text(rewards[0])}" if rewards else ""
    course.add_row(_Sparkline(tuple(rewards)), ends)
    grid.add_row(" reward", number_text(get("reward/mean")), course)
    worst = f"max {number_text(get('staleness/max'), 0)}, bound {bound}"
    grid.add_row(
        " staleness",
        number_text(get("staleness/mean"), 2),
        Text(worst, style="bold red" if beyond else "dim"),
    )
    tokens = number_text(get("throughput/tokens_per_s"), 0)
    step_s = number_text(get("time/step_s"), 1)
    grid.add_row(" tokens/s", tokens, Text(f"{step_s} s per step", style="dim"))
    if progress.facts.has_filter:
        share, seconds = filter_texts(progress)
        factor = number_text(get("filter/oversample"), 1)
        taken = f"{seconds} of generation and scoring, {factor} prompts for a place"
        grid.add_row(" filtered", share, Text(taken, style="dim"))
    publish_s, pull_s = (number_text(get(f"weights/{n}"), 2) for n in ("publish_s", "pull_s"))
    moved = Text(f"publish {publish_s} s, pull {pull_s} s", style="dim")
    grid.add_row(" weights", f"v{number_text(get('weights/version'), 0)}", moved)
    return grid


def _stages(progress: Progress) -> RenderableType:
    """How many groups wait for each stage, and how idle it is."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True, min_width=11)
    grid.add_column(no_wrap=True, min_width=6, justify="right")
    grid.add_column(width=_BAR_WIDTH)
    grid.add_column(no_wrap=True, justify="right", min_width=4)
    grid.add_row("", Text("queue", style="dim"), Text("idle", style="dim"), "")
    for stage in progress.stages:
        depth, idle = progress.get(DEPTH + stage), progress.get(IDLE + stage)
        bar = ProgressBar(1.0, min(idle, 1.0), complete_style="yellow", finished_style="yellow")
        known = math.isfinite(idle)
        grid.add_row(
            f" {stage}",
            number_text(depth, 0) if math.isfinite(depth) else "",
            bar if known else "",
            f"{idle:.0%}" if known else "",
        )
    return grid

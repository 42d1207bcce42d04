"""Console output of a run: a live view on a terminal, a line per step elsewhere, and a summary.

Both consoles print evaluations and events in the same way.
"""

import atexit
import itertools
import math
import statistics
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from streamrl.files.printable_text import make_printable
from streamrl.telemetry.metric_names import (
    DEPTH_PREFIX,
    IDLE_PREFIX,
    Histogram,
    MetricsRow,
    choose_objective,
    select_prefixed,
)
from streamrl.telemetry.progress import (
    ACCENT,
    BAR_WIDTH,
    PRINT_EVERY_S,
    WorkStatus,
    build_status_row,
    format_duration,
    format_number,
    make_spinner,
)
from streamrl.telemetry.sinks import EVENTS_FILE, EventFields, MetricsSink

EVENTS_PER_STEP = 3
FILE_ONLY_FIELDS = {"objective", "layout", "goes_back"}
"""Fields of events that only a later resume reads (`recorded_rows`)."""
SHOWN_EVALS = ("mean_at_k", "pass_at_1")
"""Evaluations with a line in the view: the first that the run has."""
REFRESHES_PER_S = 4
EVAL_PREFIX = "eval/"
FILTER_COST_METRICS = ("filter/generate_s", "filter/score_s")
SPARKLINE_BLOCKS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
_RECENT_STEPS = 10
_LABEL_WIDTH = 11


@dataclass(frozen=True)
class RunInfo:
    """Facts about a run that are known before its first step.

    num_steps: steps of the whole run.
    max_staleness: in versions.
    resume_step: last step of the checkpoint of a resumed run, else None.
    has_filter: whether a group filter is configured.
    compares_rollouts: whether the algorithm learns from differences within a group alone.
    """

    name: str
    run_dir: Path
    num_steps: int
    max_staleness: int
    resume_step: int | None = None
    has_filter: bool = False
    compares_rollouts: bool = False


@dataclass
class RunProgress:
    """Latest metrics of a run, and its objective and evaluations so far.

    objective: label and metric, as `choose_objective` returns them. evals: values of each
    evaluation, by name without `eval/`.
    recent_step_s: latest step times, in seconds.
    """

    run_info: RunInfo
    step: int = 0
    latest_values: dict[str, float] = field(default_factory=dict)
    objective: tuple[str, str] = ("reward", "reward/mean")
    objectives: list[float] = field(default_factory=list)
    evals: dict[str, list[float]] = field(default_factory=dict)
    stages: list[str] = field(default_factory=list)
    num_tokens: float = 0.0
    recent_step_s: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT_STEPS))

    def __post_init__(self) -> None:
        self.step = self.run_info.resume_step or 0

    def add_row(self, step: int, row: MetricsRow) -> dict[str, float]:
        """Add the metrics row of a step; return the row's evaluations by name, without `eval/`.

        Confidence intervals and evaluations of a subset of the prompts go to the other sinks only.
        """
        numbers = {n: float(v) for n, v in row.items() if not isinstance(v, Histogram)}
        self.step = step
        self.latest_values.update(numbers)
        self.objective = choose_objective(numbers)
        value = numbers.get(self.objective[1], math.nan)
        if math.isfinite(value):
            self.objectives.append(value)
        step_s = numbers.get("time/step_s", math.nan)
        if math.isfinite(step_s):
            self.recent_step_s.append(step_s)
            tokens = numbers.get("throughput/tokens_per_s", 0.0) * step_s
            self.num_tokens += tokens if math.isfinite(tokens) else 0.0
        self._collect_stages(numbers)
        evals = {
            name: value
            for name, value in select_prefixed(numbers, EVAL_PREFIX).items()
            if "/" not in name
        }
        for name, value in evals.items():
            self.evals.setdefault(name, []).append(value)
        return evals

    def _collect_stages(self, numbers: Mapping[str, float]) -> None:
        # idle/ before queue/depth/, so that generate, which has no queue, comes first.
        for prefix in (IDLE_PREFIX, DEPTH_PREFIX):
            for stage in select_prefixed(numbers, prefix):
                if stage not in self.stages:
                    self.stages.append(stage)

    @property
    def has_steps(self) -> bool:
        """Whether a trained step has been added; evaluations of the base model come before."""
        return bool(self.recent_step_s)

    def get(self, name: str) -> float:
        """Return the latest value of a metric; NaN without a value."""
        return self.latest_values.get(name, math.nan)

    def format(self, name: str, digits: int = 3) -> str:
        """Return the latest value of a metric in few characters."""
        return format_number(self.get(name), digits)

    def estimate_remaining_s(self, since_step_s: float = 0.0) -> float:
        """Estimate the seconds until the last step ends, from the median of recent step times.

        `since_step_s` is the time since the latest step ended. NaN before the first step.
        """
        if not self.recent_step_s:
            return math.nan
        steps_left = max(self.run_info.num_steps - self.step, 0)
        total_s = steps_left * statistics.median(self.recent_step_s)
        return max(total_s - since_step_s, 0.0)


def render_sparkline(values: Sequence[float], width: int) -> str:
    """Render a series as a line of at most `width` block characters.

    A longer series is cut into equal pieces, of which the means are shown. The lowest value is the
    lowest block; a constant series is drawn at the bottom.
    """
    count = min(len(values), max(width, 0))
    cuts = [i * len(values) // count for i in range(count + 1)] if count else [0]
    means = [statistics.fmean(values[a:b]) for a, b in itertools.pairwise(cuts)]
    low, high = min(means, default=0.0), max(means, default=0.0)
    # Divided first: the inverse of a tiny range would be infinite.
    shares = [(mean - low) / (high - low) if high > low else 0.0 for mean in means]
    return "".join(SPARKLINE_BLOCKS[round(s * (len(SPARKLINE_BLOCKS) - 1))] for s in shares)


def format_fields(fields: Iterable[tuple[str, object]]) -> str:
    """Format names and values in one line: "step=3 cause=timeout"; floats with three digits.

    A field `text` is shown without its name.
    """
    texts = ((name, f"{v:.3f}" if isinstance(v, float) else str(v)) for name, v in fields)
    return "  ".join(text if name == "text" else f"{name}={text}" for name, text in texts)


class RunConsole(MetricsSink):
    """Console sink that prints evaluations, events and the summary; a subclass displays the steps.

    Events of one name can be too many to print: a line is printed for the first EVENTS_PER_STEP of
    a step, and at its end the number of those left out.
    """

    def __init__(self, run_info: RunInfo, console: Console) -> None:
        self.progress = RunProgress(run_info)
        self.console = console
        self.started_at = time.monotonic()
        self._num_events = Counter[str]()

    def start(self, config: Mapping[str, Any]) -> None:
        self.started_at = time.monotonic()

    def log_step(self, step: int, row: MetricsRow) -> None:
        self._print_omitted_events()
        evals = self.add_row(step, row)
        if evals:
            self.print_line("eval", format_fields([("step", step), *evals.items()]), style="green")
        self.show_progress()

    show_repeated_step = log_step

    def add_row(self, step: int, row: MetricsRow) -> Mapping[str, float]:
        return self.progress.add_row(step, row)

    def show_progress(self) -> None:
        """Display the latest step; does nothing in this class."""

    def log_event(self, name: str, fields: EventFields) -> None:
        self._num_events[name] += 1
        if self._num_events[name] <= EVENTS_PER_STEP:
            text = format_fields(f for f in fields.items() if f[0] not in FILE_ONLY_FIELDS)
            self.print_line(name, text, style="yellow")

    def _print_omitted_events(self) -> None:
        for name, count in self._num_events.items():
            if count > EVENTS_PER_STEP:
                more = f"{count - EVENTS_PER_STEP:,} more, see {EVENTS_FILE}"
                self.print_line(name, more, style="yellow")
        self._num_events.clear()

    def close(self, summary: EventFields) -> None:
        """End the display and print the summary of the run.

        If no step was added, print the outcome and the checkpoint instead.
        """
        self._print_omitted_events()
        if self.progress.latest_values:
            self.console.print()
            for label, text in self._list_summary(summary):
                self.print_line(label, text, style="dim")
        elif summary.get("checkpoint"):
            for name in ("outcome", "written"):
                self.print_line(name, str(summary[name]))

    def _list_summary(self, summary: EventFields) -> list[tuple[str, str]]:
        """Return first and last reward and evaluations, totals, and the fields of `summary`."""
        progress, run_info = self.progress, self.progress.run_info
        series = [(progress.objective[0], "", progress.objectives)] * bool(progress.objectives)
        series += [("eval", f"{name} ", values) for name, values in progress.evals.items()]
        since = " since the resume" if run_info.resume_step is not None else ""
        filtered, trained = progress.get("ledger/filtered"), progress.get("ledger/trained")
        rows = [("steps", f"{progress.step} of {run_info.num_steps}")]
        rows += [
            (label, f"{name}{format_number(values[0])} -> {format_number(values[-1])}")
            for label, name, values in series
        ]
        rows.append(("wall time", format_duration(time.monotonic() - self.started_at) + since))
        rows.append(("tokens", f"{progress.num_tokens:,.0f}"))
        if filtered > 0:
            share = filtered / (filtered + trained)
            rows.append(("filtered", f"{filtered:,.0f} groups ({share:.0%})"))
        return [*rows, *((name, str(value)) for name, value in summary.items())]

    def print_line(self, label: str, text: str, *, style: str = "") -> None:
        grid = Table.grid(padding=(0, 2, 0, 0))
        grid.add_column(no_wrap=True, min_width=_LABEL_WIDTH)
        grid.add_column(overflow="fold")
        grid.add_row(Text(f" {label}", style=style), Text(make_printable(text)))
        self.console.print(grid)


def format_filter_stats(progress: RunProgress) -> tuple[str, str]:
    """Return the fraction of groups filtered in the last step and their cost: "88%", "12.1 s"."""
    seconds = sum(progress.get(name) for name in FILTER_COST_METRICS)
    return format_share(progress.get("filter/share")), f"{format_number(seconds, 1)} s"


def format_solved(progress: RunProgress) -> tuple[str, str]:
    """Return the shares of prompts whose rollouts were all right, and all wrong, in a step."""
    all_right, all_wrong = (progress.get(f"rollout/all_{name}_frac") for name in ("right", "wrong"))
    return format_share(all_right), format_share(all_wrong)


def format_share(value: float) -> str:
    return f"{min(max(value, 0.0), 1.0):.0%}" if math.isfinite(value) else "-"


class PlainConsole(RunConsole):
    """Console that prints a line per step, in ASCII."""

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
        now = time.monotonic()
        if status.text and (status.text != self._last_status or now >= self._status_due_at):
            self.print_line(format_duration(now - self.started_at), status.description)
            self._status_due_at = now + PRINT_EVERY_S
        self._last_status = status.text

    def show_progress(self) -> None:
        if self.progress.step > 0:
            self.console.print(Text(_format_step(self.progress)), soft_wrap=True)


def _format_step(progress: RunProgress) -> str:
    """Format the latest step in a line."""
    get, run_info = progress.format, progress.run_info
    solved, (objective, metric) = format_solved(progress), progress.objective
    parts = [
        f" step {progress.step}/{run_info.num_steps}",
        f"{objective} {get(metric)}",
        *([f"right: all {solved[0]}, none {solved[1]}"] * (objective == "reward")),
        f"length {get('rollout/length_mean', 0)}",
        f"entropy {get('policy/entropy', 2)}",
        f"probability {get('rollout/probability_mean', 2)}",
        f"staleness {get('staleness/mean', 1)}, largest {get('staleness/max', 0)}",
        f"{get('time/step_s', 1)} s/step",
        f"{format_duration(progress.estimate_remaining_s())} left",
        f"{get('throughput/tokens_per_s', 0)} tokens/s",
    ]
    if run_info.has_filter:
        parts.insert(2, "filtered {}, {}".format(*format_filter_stats(progress)))
    waiting = [
        f"{stage} {format_number(depth, 0)}"
        for stage in progress.stages
        if math.isfinite(depth := progress.get(DEPTH_PREFIX + stage))
    ]
    busy = [f"{s} {format_share(1.0 - progress.get(IDLE_PREFIX + s))}" for s in progress.stages]
    return "  ".join([*parts, f"waiting: {', '.join(waiting)}", f"busy: {', '.join(busy)}"])


class LiveConsole(RunConsole):
    """Console that keeps a view of the run at the bottom of the terminal and prints lines above.

    `close` removes the view, restores the terminal and prints the summary. If the program exits
    without `close`, atexit restores the terminal.
    """

    def __init__(self, run_info: RunInfo, console: Console) -> None:
        super().__init__(run_info, console)
        # Lock order: rich.live holds its own lock while it calls `render`, which takes this lock.
        # Printing takes rich's lock, so printing under this lock would deadlock.
        self._lock = threading.Lock()
        self._status = WorkStatus("starting")
        self._status_since = self._last_step_at = self.started_at
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
                self._status_since = time.monotonic() - status.elapsed_s
            self._status = status

    def add_row(self, step: int, row: MetricsRow) -> Mapping[str, float]:
        with self._lock:
            self._last_step_at = time.monotonic()
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
                parts += [Text(), _build_metrics_grid(self.progress)]
                parts += [Text(), _build_stages_grid(self.progress)]
            if self._status.text:
                self._status.elapsed_s = time.monotonic() - self._status_since
                row = build_status_row(self._status, self._spinner)
                parts += [Text(), Padding(row, (0, 0, 0, 1))]
            return Group(*parts)

    def _build_header(self) -> RenderableType:
        """Build the top line of the view: name of the run, step, progress bar, time left."""
        progress, run_info = self.progress, self.progress.run_info
        grid = Table.grid(padding=(0, 2, 0, 0), expand=True)
        grid.add_column(no_wrap=True, overflow="ellipsis", style=f"bold {ACCENT}")
        grid.add_column(no_wrap=True)
        grid.add_column(ratio=1)
        grid.add_column(no_wrap=True, justify="right", style="dim")
        left_s = progress.estimate_remaining_s(time.monotonic() - self._last_step_at)
        grid.add_row(
            Text(f" {run_info.name}"),
            f"step {progress.step}/{run_info.num_steps}",
            ProgressBar(run_info.num_steps, progress.step, complete_style=ACCENT),
            f"{format_duration(left_s)} left" if math.isfinite(left_s) else "",
        )
        return grid


def _build_metrics_grid(progress: RunProgress) -> RenderableType:
    bound = progress.run_info.max_staleness
    grid = Table.grid(padding=(0, 2, 0, 0), expand=True)
    grid.add_column(style="dim", no_wrap=True, min_width=_LABEL_WIDTH)
    grid.add_column(style="bold", no_wrap=True, min_width=6, justify="right")
    grid.add_column(no_wrap=True, width=BAR_WIDTH)
    grid.add_column(no_wrap=True, ratio=1, style="dim")
    label, metric = progress.objective
    grid.add_row(f" {label}", progress.format(metric), *_draw_trend(progress.objectives))
    for name in [name for name in SHOWN_EVALS if name in progress.evals][:1]:
        values = progress.evals[name]
        grid.add_row(f" eval {name}", format_number(values[-1]), *_draw_trend(values))
    all_right, all_wrong = format_solved(progress)
    grid.add_row(" all right", all_right, "", f"{all_wrong} of the prompts all wrong")
    names = ("policy/entropy", "rollout/probability_mean", "rollout/length_mean")
    entropy, probability, length = (progress.format(name, 2) for name in names)
    grid.add_row(" entropy", entropy, "", f"token probability {probability}, length {length}")
    mean, largest = progress.get("staleness/mean"), progress.get("staleness/max")
    bar = _draw_bar(mean / bound if bound else 0.0, ACCENT)
    limit = f"largest {format_number(largest, 0)}, bound {bound} versions"
    note = Text(limit, style="bold red" if largest > bound else "")
    grid.add_row(" staleness", format_number(mean, 2), bar, note)
    tokens = progress.format("throughput/tokens_per_s", 0)
    grid.add_row(" tokens/s", tokens, "", f"{progress.format('time/step_s', 1)} s per step")
    if progress.run_info.has_filter:
        share, seconds = format_filter_stats(progress)
        grid.add_row(" filtered", share, "", f"{seconds} of generation and scoring lost")
    publish_s, pull_s = (progress.format(f"weights/{name}", 2) for name in ("publish_s", "pull_s"))
    version = f"v{progress.format('weights/version', 0)}"
    grid.add_row(" weights", version, "", f"publish {publish_s} s, pull {pull_s} s")
    return grid


def _draw_trend(values: Sequence[float]) -> tuple[Text, str]:
    """Return a sparkline and the first value of a series."""
    line = Text(render_sparkline(values, BAR_WIDTH), style=ACCENT)
    return line, f"from {format_number(values[0])}" if values else ""


def _draw_bar(share: float, style: str) -> RenderableType:
    if not math.isfinite(share):
        return ""
    return ProgressBar(1.0, min(max(share, 0.0), 1.0), complete_style=style, finished_style=style)


def _build_stages_grid(progress: RunProgress) -> RenderableType:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True, min_width=_LABEL_WIDTH)
    grid.add_column(no_wrap=True, min_width=7, justify="right")
    grid.add_column(width=BAR_WIDTH)
    grid.add_column(no_wrap=True, justify="right", min_width=4)
    grid.add_row(" stage", Text("waiting", style="dim"), Text("busy", style="dim"), "")
    for stage in progress.stages:
        depth, busy = progress.get(DEPTH_PREFIX + stage), 1.0 - progress.get(IDLE_PREFIX + stage)
        waiting = format_number(depth, 0) if math.isfinite(depth) else ""
        share = format_share(busy) if math.isfinite(busy) else ""
        grid.add_row(f" {stage}", waiting, _draw_bar(busy, "green"), share)
    return grid

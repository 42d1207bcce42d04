"""Progress of a run for the console, computed from metrics rows, and formats of numbers and time.

Functions return plain values and strings, ASCII except for `render_sparkline`.
"""

import itertools
import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from streamrl.telemetry.metric_names import Histogram, MetricsRow

DEPTH_PREFIX, IDLE_PREFIX, EVAL_PREFIX = "queue/depth/", "idle/", "eval/"
FILTER_COST_METRICS = ("filter/generate_s", "filter/score_s")
SPARKLINE_BLOCKS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
SHOW_AFTER_S = 2.0
"""Time that work has to take until a terminal shows it."""
PRINT_EVERY_S = 30.0
"""Time between two lines about the same work, where output is no terminal."""
_RECENT_STEPS = 10


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
    """Latest metrics of a run, and its rewards and evaluations so far.

    evals: values of each evaluation, by name without `eval/`.
    recent_step_s: latest step times, in seconds.
    """

    run_info: RunInfo
    step: int = 0
    latest_values: dict[str, float] = field(default_factory=dict)
    rewards: list[float] = field(default_factory=list)
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
        reward = numbers.get("reward/mean", math.nan)
        if math.isfinite(reward):
            self.rewards.append(reward)
        step_s = numbers.get("time/step_s", math.nan)
        if math.isfinite(step_s):
            self.recent_step_s.append(step_s)
            tokens = numbers.get("throughput/tokens_per_s", 0.0) * step_s
            self.num_tokens += tokens if math.isfinite(tokens) else 0.0
        self._collect_stages(numbers)
        evals = {
            name: value
            for name, value in select_prefix(numbers, EVAL_PREFIX).items()
            if "/" not in name
        }
        for name, value in evals.items():
            self.evals.setdefault(name, []).append(value)
        return evals

    def _collect_stages(self, numbers: Mapping[str, float]) -> None:
        # idle/ before queue/depth/, so that generate, which has no queue, comes first.
        for prefix in (IDLE_PREFIX, DEPTH_PREFIX):
            for stage in select_prefix(numbers, prefix):
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


def select_prefix(numbers: Mapping[str, float], prefix: str) -> dict[str, float]:
    """Return the values whose names start with a prefix, by the rest of the name."""
    return {n.removeprefix(prefix): v for n, v in numbers.items() if n.startswith(prefix)}


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


def format_fields(fields: Iterable[tuple[str, object]]) -> str:
    """Format names and values in one line: "step=3 cause=timeout"; floats with three digits.

    A field `text` is shown without its name.
    """
    texts = ((name, f"{v:.3f}" if isinstance(v, float) else str(v)) for name, v in fields)
    return "  ".join(text if name == "text" else f"{name}={text}" for name, text in texts)

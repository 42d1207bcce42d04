"""What a simulation has found: times, rates, idle time, staleness, and rows as a run logs them."""

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import median

from streamrl.buffer.books.ledger import LedgerCounts
from streamrl.dataflow import CallKind, Dataflow
from streamrl.placement.workload import Workload
from streamrl.simulator.replicas.failures import NodeCrash
from streamrl.stream.protocols import StepResult
from streamrl.stream.step_metrics import StageActivity, StepFacts, compute_step_metrics
from streamrl.telemetry.chrome_trace import TraceSink
from streamrl.telemetry.metric_names import Histogram, find_missing_metrics
from streamrl.telemetry.sinks import JsonlSink
from streamrl.telemetry.spans import Span, compute_idle_fraction

MetricsRow = Mapping[str, float | Histogram]
NAN = math.nan
_UNSIMULATED_METRICS = ("queue/bytes", "journal/bytes", "journal/fsync_s")
"""Metrics of the real queue that a step's row would have as 0."""


# Not shown: whoever does, as asyncio of what a coroutine returns, would show every span.
@dataclass(frozen=True, repr=False)
class SimulationResult:
    """A run as it would be. Times are s since its beginning; means leave out
    `warm_up` steps, and the last `cool_down`, in which nothing is generated any more.
    first_ends: when each step was made first, which a crash may have undone.

    outcomes: of each step, the last time it was made. step_ends: when that was. depths: by stage,
    how many groups wait for it, each time that changes. by_process: what each process did.
    processes: by role, who they are. crashes: what failed, and what that took along. parts: that
    the run has, of which one was simulated; its rate is that of all of them.
    """

    dataflow: Dataflow
    workload: Workload
    max_staleness: int
    outcomes: Sequence[StepResult]
    step_ends: Sequence[float]
    queue_depths: Mapping[str, Sequence[tuple[float, int]]]
    spans_by_process: Mapping[str, Sequence[Span]]
    process_names: Mapping[str, Sequence[str]]
    crashes: Sequence[NodeCrash]
    first_step_ends: Sequence[float]
    warm_up_steps: int
    cool_down_steps: int = 0
    num_parts: int = 1

    def exclude_steps(self, warm_up: int, cool_down: int = 0) -> "SimulationResult":
        """The same with so many steps left out of all means; one is always counted."""
        most = len(self.step_ends) - 1
        first = min(warm_up, most)
        return replace(self, warm_up_steps=first, cool_down_steps=min(cool_down, most - first))

    @property
    def _steady_slice(self) -> slice:
        return slice(self.warm_up_steps, len(self.step_ends) - self.cool_down_steps)

    @property
    def step_durations_s(self) -> list[float]:
        """How long each step took, from the end of the one before."""
        starts = [0.0, *self.step_ends]
        return [end - start for start, end in zip(starts, self.step_ends, strict=False)]

    @property
    def mean_step_s(self) -> float:
        """The mean; what is lost in a crash, and made again, counts."""
        start, end = self._steady_interval
        return (end - start) / len(self.step_ends[self._steady_slice])

    @property
    def median_step_s(self) -> float:
        """The median."""
        return median(self.step_durations_s[self._steady_slice])

    @property
    def _steady_interval(self) -> tuple[float, float]:
        start = self.first_step_ends[self.warm_up_steps - 1] if self.warm_up_steps else 0.0
        return start, self.step_ends[self._steady_slice][-1]

    @property
    def tokens_per_s(self) -> float:
        """Sampled tokens that were trained, of the whole cluster."""
        start, end = self._steady_interval
        return self.num_parts * sum(self.tokens_by_staleness.values()) / (end - start)

    @cached_property
    def tokens_by_staleness(self) -> Counter[int]:
        """Trained tokens by their staleness in versions."""
        found: Counter[int] = Counter()
        for outcome in self.outcomes[self._steady_slice]:
            for group in outcome.groups:
                for version, tokens in group.info.version_tokens:
                    found[outcome.version - version] += tokens
        return found

    @property
    def staleness_mean(self) -> float:
        """Of a trained token."""
        return (
            sum(age * count for age, count in self.tokens_by_staleness.items())
            / self.tokens_by_staleness.total()
        )

    @property
    def staleness_max(self) -> int:
        """The largest of a trained token."""
        return max(self.tokens_by_staleness)

    @cached_property
    def idle_fractions(self) -> Mapping[str, float]:
        """By stage, the part of the time its processes did not compute, as in idle/<stage>."""
        start, end = self._steady_interval
        return {
            stage: compute_idle_fraction(
                one.spans, start=start, end=end, num_processes=one.num_processes
            )
            for stage, one in self._collect_activity(self.spans).items()
        }

    @property
    def ledger(self) -> LedgerCounts:
        """At the end."""
        return self.outcomes[-1].ledger_counts

    @property
    def spans(self) -> Sequence[Span]:
        """What all processes did."""
        return [span for own in self.spans_by_process.values() for span in own]

    @property
    def lost_tokens(self) -> int:
        """Tokens that were sampled and lost in crashes."""
        return sum(crash.lost_tokens for crash in self.crashes)

    @property
    def repeated_steps(self) -> int:
        """Steps that were made more than once."""
        return sum(crash.repeated_steps for crash in self.crashes)

    @cached_property
    def metrics_rows(self) -> Sequence[MetricsRow]:
        """Of each step, as metrics.jsonl has them; NaN for what cannot be known."""
        starts = [0.0, *self.step_ends[:-1]]
        parts: list[list[Span]] = [[] for _ in starts]
        for span in self.spans:
            first = bisect_right(self.step_ends, span.start_s)
            for step in range(first, min(bisect_left(self.step_ends, span.end_s) + 1, len(starts))):
                parts[step].append(span)
        return [
            self._make_row(outcome, self._collect_activity(spans), start, end)
            for outcome, spans, start, end in zip(
                self.outcomes, parts, starts, self.step_ends, strict=True
            )
        ]

    def write_run_files(self, run_dir: Path) -> None:
        """Leave trace.json and metrics.jsonl there, as a run does, but that times are virtual.

        Raises ConfigError if a run is there already, DiskError if the disk refuses.
        """
        now = 0.0

        def clock() -> float:
            return now

        sinks = (JsonlSink(run_dir, clock=clock), TraceSink(run_dir, clock=clock))
        for sink in sinks:
            sink.start({})
        sinks[1].write_spans(self.spans)
        for outcome, row, end in zip(self.outcomes, self.metrics_rows, self.step_ends, strict=True):
            now = end
            for sink in sinks:
                sink.log_step(outcome.version + 1, row)
        for sink in sinks:
            sink.close({})

    def _collect_activity(self, spans: Sequence[Span]) -> dict[str, StageActivity]:
        """By stage. What is of no stage in particular, as a pull, counts to the first of a role."""
        role_of = {name: role for role, names in self.process_names.items() for name in names}
        own: dict[str, list[Span]] = {role: [] for role in self.process_names}
        for span in spans:
            own[role_of[span.process]].append(span)
        found = {}
        for role, calls in self.dataflow.calls_by_role.items():
            stages = [call.stage for call in calls]
            for stage in stages:
                others = [other for other in stages if other != stage]
                chosen = [
                    span
                    for span in own[role]
                    if span.name == stage or (stage == stages[0] and span.name not in others)
                ]
                kind = calls[0].kind.value
                found[stage] = StageActivity(kind, role, len(self.process_names[role]), chosen)
        return found

    def _make_row(
        self,
        outcome: StepResult,
        activity: Mapping[str, StageActivity],
        start_s: float,
        end_s: float,
    ) -> MetricsRow:
        prompt_tokens = self.workload.rounded_prompt_tokens
        lengths = [n - prompt_tokens for group in outcome.groups for n in group.info.lengths]
        most = self.workload.lengths.max_tokens
        known = {
            "weights/version": float(outcome.version + 1),
            **dict.fromkeys(_UNSIMULATED_METRICS, NAN),
        }
        row = compute_step_metrics(
            StepFacts(
                version=outcome.version,
                groups=outcome.groups,
                metric_sums={
                    "rollouts": len(lengths),
                    "sampled_sum": sum(lengths),
                    "sampled_max": max(lengths),
                    "truncated_sum": sum(length >= most for length in lengths),
                    "score_sum": NAN,
                    "score_squared_sum": NAN,
                },
                metrics=known,
                queue_stats=outcome.queue_stats,
                ledger_counts=outcome.ledger_counts,
                activity=activity,
                start_s=start_s,
                end_s=end_s,
                max_staleness=self.max_staleness,
                filter_tally=outcome.filter_tally,
            )
        )
        return {**row, **dict.fromkeys(find_missing_metrics(row), NAN)}


def name_processes(dataflow: Dataflow, counts: Mapping[str, int]) -> dict[str, list[str]]:
    """By role, what its processes are called: a trained model is one, whatever its ranks."""
    names = {}
    for role, calls in dataflow.calls_by_role.items():
        if calls[0].kind is CallKind.TRAIN:
            names[role] = [role]
        else:
            names[role] = [f"{role}-{i}" for i in range(counts[role])]
    return names

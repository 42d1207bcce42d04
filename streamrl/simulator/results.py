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
from streamrl.dataflow import Dataflow, Kind
from streamrl.placement.workload import Workload
from streamrl.simulator.replicas.failures import Crash
from streamrl.stream.protocols import StepOutcome
from streamrl.stream.step_metrics import Activity, StepFacts, step_row
from streamrl.telemetry.chrome_trace import TraceSink
from streamrl.telemetry.metric_names import Histogram, missing_names
from streamrl.telemetry.sinks import JsonlSink
from streamrl.telemetry.spans import Span, idle_fraction

Row = Mapping[str, float | Histogram]
NAN = math.nan
_UNKNOWN = ("queue/bytes", "journal/bytes", "journal/fsync_s")
"""Metrics of the real queue that a step's row would have as 0."""


# Not shown: whoever does, as asyncio of what a coroutine returns, would show every span.
@dataclass(frozen=True, repr=False)
class Simulated:
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
    outcomes: Sequence[StepOutcome]
    step_ends: Sequence[float]
    depths: Mapping[str, Sequence[tuple[float, int]]]
    by_process: Mapping[str, Sequence[Span]]
    processes: Mapping[str, Sequence[str]]
    crashes: Sequence[Crash]
    first_ends: Sequence[float]
    warm_up: int
    cool_down: int = 0
    parts: int = 1

    def without(self, warm_up: int, cool_down: int = 0) -> "Simulated":
        """The same with so many steps left out of all means; one is always counted."""
        most = len(self.step_ends) - 1
        first = min(warm_up, most)
        return replace(self, warm_up=first, cool_down=min(cool_down, most - first))

    @property
    def _counted(self) -> slice:
        return slice(self.warm_up, len(self.step_ends) - self.cool_down)

    @property
    def steps_s(self) -> list[float]:
        """How long each step took, from the end of the one before."""
        starts = [0.0, *self.step_ends]
        return [end - start for start, end in zip(starts, self.step_ends, strict=False)]

    @property
    def step_s(self) -> float:
        """The mean; what is lost in a crash, and made again, counts."""
        start, end = self._window
        return (end - start) / len(self.step_ends[self._counted])

    @property
    def step_s_median(self) -> float:
        """The median."""
        return median(self.steps_s[self._counted])

    @property
    def _window(self) -> tuple[float, float]:
        start = self.first_ends[self.warm_up - 1] if self.warm_up else 0.0
        return start, self.step_ends[self._counted][-1]

    @property
    def tokens_per_s(self) -> float:
        """Sampled tokens that were trained, of the whole cluster."""
        start, end = self._window
        return self.parts * sum(self.staleness.values()) / (end - start)

    @cached_property
    def staleness(self) -> Counter[int]:
        """Trained tokens by their staleness in versions."""
        found: Counter[int] = Counter()
        for outcome in self.outcomes[self._counted]:
            for group in outcome.groups:
                for version, tokens in group.info.version_tokens:
                    found[outcome.version - version] += tokens
        return found

    @property
    def staleness_mean(self) -> float:
        """Of a trained token."""
        return sum(age * count for age, count in self.staleness.items()) / self.staleness.total()

    @property
    def staleness_max(self) -> int:
        """The largest of a trained token."""
        return max(self.staleness)

    @cached_property
    def idle(self) -> Mapping[str, float]:
        """By stage, the part of the time its processes did not compute, as in idle/<stage>."""
        start, end = self._window
        return {
            stage: idle_fraction(one.spans, start=start, end=end, num_processes=one.num_processes)
            for stage, one in self._activity(self.spans).items()
        }

    @property
    def ledger(self) -> LedgerCounts:
        """At the end."""
        return self.outcomes[-1].ledger

    @property
    def spans(self) -> Sequence[Span]:
        """What all processes did."""
        return [span for own in self.by_process.values() for span in own]

    @property
    def lost_tokens(self) -> int:
        """Tokens that were sampled and lost in crashes."""
        return sum(crash.lost_tokens for crash in self.crashes)

    @property
    def steps_again(self) -> int:
        """Steps that were made more than once."""
        return sum(crash.steps_again for crash in self.crashes)

    @cached_property
    def rows(self) -> Sequence[Row]:
        """Of each step, as metrics.jsonl has them; NaN for what cannot be known."""
        starts = [0.0, *self.step_ends[:-1]]
        parts: list[list[Span]] = [[] for _ in starts]
        for span in self.spans:
            first = bisect_right(self.step_ends, span.start_s)
            for step in range(first, min(bisect_left(self.step_ends, span.end_s) + 1, len(starts))):
                parts[step].append(span)
        return [
            self._row(outcome, self._activity(spans), start, end)
            for outcome, spans, start, end in zip(
                self.outcomes, parts, starts, self.step_ends, strict=True
            )
        ]

    def write(self, run_dir: Path) -> None:
        """Leave trace.json and metrics.jsonl there, as a run does, but that times are virtual.

        Raises ConfigError if a run is there already, DiskError if the disk refuses.
        """
        now = 0.0

        def clock() -> float:
            return now

        sinks = (JsonlSink(run_dir, clock=clock), TraceSink(run_dir, clock=clock))
        for sink in sinks:
            sink.start({})
        sinks[1].spans(self.spans)
        for outcome, row, end in zip(self.outcomes, self.rows, self.step_ends, strict=True):
            now = end
            for sink in sinks:
                sink.step(outcome.version + 1, row)
        for sink in sinks:
            sink.close({})

    def _activity(self, spans: Sequence[Span]) -> dict[str, Activity]:
        """By stage. What is of no stage in particular, as a pull, counts to the first of a role."""
        role_of = {name: role for role, names in self.processes.items() for name in names}
        own: dict[str, list[Span]] = {role: [] for role in self.processes}
        for span in spans:
            own[role_of[span.process]].append(span)
        found = {}
        for role, calls in self.dataflow.roles.items():
            stages = [call.stage for call in calls]
            for stage in stages:
                others = [other for other in stages if other != stage]
                chosen = [
                    span
                    for span in own[role]
                    if span.name == stage or (stage == stages[0] and span.name not in others)
                ]
                kind = calls[0].kind.value
                found[stage] = Activity(kind, role, len(self.processes[role]), chosen)
        return found

    def _row(
        self, outcome: StepOutcome, activity: Mapping[str, Activity], start_s: float, end_s: float
    ) -> Row:
        prompt_tokens = self.workload.whole_prompt_tokens
        lengths = [n - prompt_tokens for group in outcome.groups for n in group.info.lengths]
        most = self.workload.lengths.most
        known = {"weights/version": float(outcome.version + 1), **dict.fromkeys(_UNKNOWN, NAN)}
        row = step_row(
            StepFacts(
                version=outcome.version,
                groups=outcome.groups,
                sums={
                    "rollouts": len(lengths),
                    "sampled_sum": sum(lengths),
                    "sampled_max": max(lengths),
                    "truncated_sum": sum(length >= most for length in lengths),
                    "score_sum": NAN,
                    "score_squared_sum": NAN,
                },
                metrics=known,
                queue=outcome.queue,
                ledger=outcome.ledger,
                activity=activity,
                start_s=start_s,
                end_s=end_s,
                max_staleness=self.max_staleness,
                filtered=outcome.filtered,
            )
        )
        return {**row, **dict.fromkeys(missing_names(row), NAN)}


def process_names(dataflow: Dataflow, counts: Mapping[str, int]) -> dict[str, list[str]]:
    """By role, what its processes are called: a trained model is one, whatever its ranks."""
    names = {}
    for role, calls in dataflow.roles.items():
        if calls[0].kind is Kind.TRAIN:
            names[role] = [role]
        else:
            names[role] = [f"{role}-{i}" for i in range(counts[role])]
    return names

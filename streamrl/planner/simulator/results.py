"""Results of a simulation: step times, rates, idle time and staleness."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean

from streamrl.buffer.run_log import LedgerCounts
from streamrl.dataflow import Dataflow
from streamrl.planner.simulator.replicas import ProcessRecorder
from streamrl.stream.protocols import StepResult
from streamrl.stream.step_metrics import StageActivity
from streamrl.telemetry.spans import Span, compute_idle_fraction


# repr=False: asyncio's debug logging formats the result of a coroutine, and this repr would format
# every span.
@dataclass(frozen=True, repr=False)
class SimulationResult:
    """Outcome of a simulated run. Times are seconds since the start of the run.

    Means leave out the first `warm_up_steps` steps and the last `cool_down_steps`, in which the
    generators have no prompts left.

    process_names: by role.
    num_parts: number of equal parts of the run, of which only one was simulated; `tokens_per_s`
        covers all.
    """

    dataflow: Dataflow
    outcomes: Sequence[StepResult]
    step_ends: Sequence[float]
    recorders: Mapping[str, ProcessRecorder]
    process_names: Mapping[str, Sequence[str]]
    warm_up_steps: int
    cool_down_steps: int = 0
    num_parts: int = 1

    def exclude_steps(self, warm_up: int, cool_down: int = 0) -> "SimulationResult":
        """Return the result with the first `warm_up` and last `cool_down` steps left out of means.

        At least one step remains in the means.
        """
        max_excluded = len(self.step_ends) - 1
        first = min(warm_up, max_excluded)
        return replace(
            self, warm_up_steps=first, cool_down_steps=min(cool_down, max_excluded - first)
        )

    @property
    def _steady_slice(self) -> slice:
        return slice(self.warm_up_steps, len(self.step_ends) - self.cool_down_steps)

    @property
    def mean_step_s(self) -> float:
        start, end = self._steady_interval
        return (end - start) / len(self.step_ends[self._steady_slice])

    @property
    def _steady_interval(self) -> tuple[float, float]:
        start = self.step_ends[self.warm_up_steps - 1] if self.warm_up_steps else 0.0
        return start, self.step_ends[self._steady_slice][-1]

    @property
    def tokens_per_s(self) -> float:
        """Sampled tokens that the whole cluster trains per second."""
        start, end = self._steady_interval
        return self.num_parts * sum(self.tokens_by_staleness.values()) / (end - start)

    @cached_property
    def tokens_by_staleness(self) -> Counter[int]:
        counts: Counter[int] = Counter()
        for outcome in self.outcomes[self._steady_slice]:
            for group in outcome.groups:
                for version, tokens in group.info.version_tokens:
                    counts[outcome.version - version] += tokens
        return counts

    @property
    def queue_depths(self) -> dict[str, float]:
        """Mean number of groups that wait for each stage."""
        means = [outcome.queue_stats.depth for outcome in self.outcomes[self._steady_slice]]
        return {stage: fmean(depth[stage] for depth in means) for stage in means[0]}

    @property
    def staleness_mean(self) -> float:
        return (
            sum(age * count for age, count in self.tokens_by_staleness.items())
            / self.tokens_by_staleness.total()
        )

    @property
    def staleness_max(self) -> int:
        return max(self.tokens_by_staleness)

    @cached_property
    def idle_fractions(self) -> Mapping[str, float]:
        """Fraction of time in which a stage's processes do not compute, by stage; idle/<stage>."""
        start, end = self._steady_interval
        return {
            stage: compute_idle_fraction(
                activity.spans, start=start, end=end, num_processes=activity.num_processes
            )
            for stage, activity in self._collect_activity().items()
        }

    @property
    def ledger(self) -> LedgerCounts:
        return self.outcomes[-1].ledger_counts

    @property
    def spans(self) -> Sequence[Span]:
        return [span for recorder in self.recorders.values() for span in recorder.list_spans()]

    def _collect_activity(self) -> dict[str, StageActivity]:
        """Return, by stage, the spans and processes from which idle time is computed.

        Spans that belong to no stage, such as pulls, count for the first stage of their role.
        """
        role_of = {name: role for role, names in self.process_names.items() for name in names}
        spans_by_role: dict[str, list[Span]] = {role: [] for role in self.process_names}
        for span in self.spans:
            spans_by_role[role_of[span.process]].append(span)
        activity = {}
        for role, calls in self.dataflow.calls_by_role.items():
            stages = [call.stage for call in calls]
            for stage in stages:
                others = [other for other in stages if other != stage]
                stage_spans = [
                    span
                    for span in spans_by_role[role]
                    if span.name == stage or (stage == stages[0] and span.name not in others)
                ]
                kind = calls[0].kind.value
                activity[stage] = StageActivity(
                    kind, role, len(self.process_names[role]), stage_spans
                )
        return activity

"""Fit `StageTimings`, the time of every operation in a run's placement, to the spans of a run."""

import statistics
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from streamrl.config.role_counts import count_actors
from streamrl.dataflow import FILTER_COLUMN, GENERATE_CALL, GREEDY_CALL, POLICY, CallKind, ModelCall
from streamrl.planner.calibration.fit_decode import (
    DECODE_COEFFICIENTS,
    DecodeReplay,
    fit_decode,
    replace_coefficients,
)
from streamrl.planner.calibration.robust_fit import CoefficientEstimate, fit_line, fit_median
from streamrl.planner.calibration.run_trace import RunTrace
from streamrl.planner.calibration.sampled_groups import split_gaps
from streamrl.planner.problem.stage_timings import (
    GeneratorTiming,
    ScoreTiming,
    StageTimings,
    TrainTiming,
    WeightsTiming,
)
from streamrl.telemetry.spans import Span

PLANNING_SPANS = ("plan", "look")
SHARED_UNDELAYED_FRACTION = 0.1
"""Fraction of measurements, the shortest, taken to contain no waiting, where devices are shared."""
UNDELAYED_FRACTION = 0.5
"""The same fraction where generation runs ahead on separate devices.

Pulls use SHARED_UNDELAYED_FRACTION: a generator notices a version only at the end of a decode step,
and that wait is no part of the pull.
"""


@dataclass(frozen=True)
class FittedTimings:
    """Timings fitted to a run, and the estimate of each coefficient by dotted name."""

    timings: StageTimings
    estimates: Mapping[str, CoefficientEstimate]


def fit_timings(trace: RunTrace, base: StageTimings) -> FittedTimings:
    """Fit timings to the spans of a run.

    base: timings of the run by a cost model. The fit keeps the generator's memory and compute terms
        of a decode step, fits the overhead on top, and fits all other coefficients from scratch.
    """
    return _TimingFitter(trace, base).fit_all()


class _TimingFitter:
    """State of a fit of timings to a run; `_estimates` collects the coefficients."""

    def __init__(self, trace: RunTrace, base: StageTimings) -> None:
        self._trace = trace
        self._base_timings = base
        self._config = trace.config
        self._estimates: dict[str, CoefficientEstimate] = {}
        self._replica_counts = {
            role: count for role, (_, count) in count_actors(self._config).items()
        }

    def fit_all(self) -> FittedTimings:
        dataflow = self._config.dataflow
        train = {role: self._fit_train(role) for role in dataflow.trained_roles}
        timings = StageTimings(
            self._fit_generator(),
            {call.stage: self._fit_score(call) for call in dataflow.select_calls(CallKind.SCORE)},
            train,
            weights={
                call.stage: self._fit_weights(call)
                for call in dataflow.ordered_calls
                if call.followed_role and call.stage in self._base_timings.weights
            },
            hop_s=self._fit_hop(),
            step_s=self._add_estimate("step_s", fit_median(self._collect_step_gaps())),
        )
        return FittedTimings(timings, self._estimates)

    def _add_estimate(self, name: str, estimate: CoefficientEstimate) -> float:
        """Record the estimate of a coefficient under a dotted name; return its value."""
        self._estimates[name] = estimate
        return estimate.value

    def _select_spans(self, role: str, *names: str) -> list[Span]:
        """Return the spans of these names in a role's processes, from the first steady step on."""
        prefix = "trainer" if role == POLICY else role
        return [
            span
            for process, spans in self._trace.spans_by_process.items()
            for span in spans
            if process.rpartition("-")[0] == prefix and span.name in names
        ]

    # Generators.

    def _fit_generator(self) -> GeneratorTiming:
        by_process = defaultdict(list)
        for group in self._trace.engine_requests:
            by_process[group.process].append(group)
        pulls = self._select_spans(GENERATE_CALL.role, "pull")
        replays = [
            replay
            for process, groups in by_process.items()
            for replay in DecodeReplay.from_process(
                groups, [s.end_s for s in pulls if s.process == process]
            )
        ]
        base = self._base_timings.generator
        rows = [step.row for step in self._trace.steps]
        pauses = [row["weights/pause_s"] for row in rows if row.get("weights/pause_s") is not None]
        pause_s = statistics.median(pauses) if pauses else 0.0
        sampling = fit_decode(replays, base, pause_s=pause_s)
        values = [
            self._add_estimate(f"generator.{name}", estimate)
            for name, estimate in zip(DECODE_COEFFICIENTS, sampling, strict=True)
        ]
        begin_s = self._add_estimate("generator.begin_s", fit_median(self._collect_begin_delays()))
        return replace(replace_coefficients(base, values), begin_s=begin_s)

    def _collect_begin_delays(self) -> list[float]:
        """Return delays, in seconds, from a prompt's admission to the start of sampling.

        Counts only prompts whose generator already had the required version, or, if these are too
        few, the shortest delays. With an environment counts only the shortest of either: a prompt
        whose episodes are open may still wait for a decode slot.
        """
        pulls = sorted(self._select_spans(GENERATE_CALL.role, "pull"), key=lambda span: span.end_s)
        release_times = self._list_release_times()
        delays, undelayed = [], []
        for group in self._trace.generated_groups:
            if group.stage == GENERATE_CALL.stage:
                num_released = bisect_right(release_times, group.start_s)
                ready_s = max(
                    group.admitted_s, release_times[num_released - 1] if num_released else 0.0
                )
                delays.append(max(0.0, group.start_s - ready_s - group.reset_s))
                version = group.admitted_version
                version_pulls = (
                    s for s in pulls if s.process == group.process and _parse_version(s) >= version
                )
                if next((s.end_s for s in version_pulls), 0.0) <= group.admitted_s:
                    undelayed.append(delays[-1])
        has_enough = len(undelayed) >= SHARED_UNDELAYED_FRACTION * len(delays)
        if has_enough and not self._config.environment.is_enabled:
            return self._select_shortest(undelayed)
        shortest = sorted(undelayed if has_enough else delays)
        return shortest[: max(1, round(SHARED_UNDELAYED_FRACTION * len(shortest)))]

    def _list_release_times(self) -> list[float]:
        """Return when trained models released shared devices; empty without shared devices."""
        if not self._config.placement.shared_pools:
            return []
        trained = self._config.dataflow.trained_roles
        spans = [
            s
            for role in trained
            for s in self._select_spans(role, "train", "update", *PLANNING_SPANS)
        ]
        return sorted(span.end_s for span in spans)

    def _select_shortest(
        self, seconds: Sequence[float], *, ahead: float = UNDELAYED_FRACTION
    ) -> list[float]:
        """Return the shortest measurements, which are assumed to contain no waiting.

        ahead: fraction to return if generation runs ahead on devices of its own.
        """
        if self._config.placement.shared_pools:
            fraction = SHARED_UNDELAYED_FRACTION
        elif self._config.pipeline.max_steps_ahead:
            fraction = ahead
        else:
            fraction = 1.0
        return sorted(seconds)[: max(1, round(fraction * len(seconds)))] if seconds else []

    # Scorers.

    def _fit_score(self, call: ModelCall) -> ScoreTiming:
        base = self._base_timings.score[call.stage]
        episodes = list(_group_overlapping(self._select_spans(call.role, call.stage)))
        rows, seconds = [], []
        for spans in episodes:
            rollouts = sum(float(span.args["rollouts"]) for span in spans)
            tokens = sum(float(span.args["tokens"]) for span in spans)
            rows.append((float(len(spans)), rollouts, tokens))
            end_s = max(span.end_s for span in spans)
            seconds.append(end_s - spans[0].start_s)
        has_model = base.token_s > 0
        features = rows if has_model else [row[:2] for row in rows]
        fit = fit_line(features, seconds)
        prefix = f"score.{call.stage}"
        return ScoreTiming(
            replicas=self._replica_counts[call.role],
            batch=self._config.scorer.max_groups,
            batch_s=self._add_estimate(f"{prefix}.batch_s", fit[0]),
            rollout_s=self._add_estimate(f"{prefix}.rollout_s", fit[1]),
            token_s=self._add_estimate(f"{prefix}.token_s", fit[2]) if has_model else 0.0,
        )

    # Trainers.

    def _fit_train(self, role: str) -> TrainTiming:
        trainer = self._config.get_trainer_config(role)
        spans = self._select_spans(role, "train")
        spans = [span for span in spans if span.args.get("tokens")]
        rows = [(1.0, float(span.args["tokens"])) for span in spans]
        fit = fit_line(rows, [span.end_s - span.start_s for span in spans])
        updates = fit_median(
            [span.end_s - span.start_s for span in self._select_spans(role, "update")]
        )
        prefix = f"train.{role}"
        return TrainTiming(
            dp_size=trainer.dp_size,
            micro_batch_s=self._add_estimate(f"{prefix}.micro_batch_s", fit[0]),
            token_s=self._add_estimate(f"{prefix}.token_s", fit[1]),
            update_s=self._add_estimate(f"{prefix}.update_s", updates),
            step_s=self._add_estimate(
                f"{prefix}.step_s", fit_median(self._collect_planning_times(role))
            ),
            round_s=self._add_estimate(
                f"{prefix}.round_s", fit_median(self._collect_round_gaps(role))
            ),
        )

    @property
    def _trains_whole_steps(self) -> bool:
        return self._config.algorithm_settings.scope == "step"

    def _collect_round_gaps(self, role: str) -> list[float]:
        """Return the seconds to dispatch a training round and read its groups.

        If rounds start as groups arrive, only the gap before an update contains no waiting.
        """
        work = [s for s in self._select_spans(role, "train", "update") if s.process.endswith("-0")]
        waiting_names = () if self._trains_whole_steps else ("train",)
        return [
            max(0.0, after.start_s - before.end_s)
            for before, after in pairwise(work)
            if before.name == "train" and after.name not in waiting_names
        ]

    def _collect_planning_times(self, role: str) -> list[float]:
        spans = [s for s in self._select_spans(role, *PLANNING_SPANS) if s.process.endswith("-0")]
        return [
            sum(
                span.end_s - span.start_s
                for span in spans
                if step.start_s <= span.start_s < step.end_s
            )
            for step in self._trace.steps
        ]

    # Weights, and gaps between stages.

    def _fit_weights(self, call: ModelCall) -> WeightsTiming:
        """Fit the seconds to publish and pull a version, for a stage that follows a trained
        model."""
        followed = (
            call.followed_role
            if call.followed_role in self._config.dataflow.trained_roles
            else POLICY
        )
        published = {_parse_version(s): s for s in self._select_spans(followed, "publish")}
        pulled = self._select_spans(call.role, "pull")
        ends = {step.version + 1: step.end_s for step in self._trace.steps}
        shares_devices = bool(self._config.placement.shared_pools)
        publish_times, pull_times = [], []
        for version, span in published.items():
            start_s = span.start_s if shares_devices else ends.get(version, span.start_s)
            publish_times.append(max(0.0, span.end_s - start_s))
        for span in pulled:
            publish_span = published.get(_parse_version(span))
            start_s = span.start_s
            if publish_span is not None and not shares_devices:
                start_s = min(start_s, publish_span.end_s)
            pull_times.append(span.end_s - start_s)
        prefix = f"weights.{call.stage}"
        publish_s = self._add_estimate(
            f"{prefix}.publish_s", fit_median(self._select_shortest(publish_times))
        )
        pull_s = self._add_estimate(
            f"{prefix}.pull_s",
            fit_median(self._select_shortest(pull_times, ahead=SHARED_UNDELAYED_FRACTION)),
        )
        pauses = [
            s.row["weights/pause_s"] for s in self._trace.steps if s.row.get("weights/pause_s")
        ]
        pause_s = min(
            pull_s,
            self._add_estimate(f"{prefix}.pause_s", fit_median(self._select_shortest(pauses))),
        )
        return WeightsTiming(publish_s, pull_s, pause_s)

    def _fit_hop(self) -> float:
        """Fit the seconds between dependent stages: the mean over score and train stages."""
        # A stage that needs the filter's verdict waits for the filter besides the generated group.
        calls = [
            c
            for c in self._config.dataflow.select_calls(CallKind.SCORE)
            if FILTER_COLUMN not in c.needs
        ]
        kinds = [self._collect_score_hops(call) for call in calls]
        if not self._config.pipeline.max_steps_ahead:
            kinds.append(self._collect_train_hops())
        fits = [fit_median(gaps) for gaps in map(self._select_shortest, kinds) if gaps]
        if not fits:
            return self._add_estimate("hop_s", CoefficientEstimate(0.0))
        estimate = CoefficientEstimate(
            statistics.fmean(fit.value for fit in fits),
            max(fit.error for fit in fits),
            sum(fit.count for fit in fits),
            max(fit.residual for fit in fits),
        )
        return self._add_estimate("hop_s", estimate)

    def _collect_score_hops(self, call: ModelCall) -> list[float]:
        """Return the seconds from a group's last token to its scoring, where the scorer was idle.

        Assumes that groups are scored in the order in which they finish.
        """
        source = GREEDY_CALL.stage if "greedy_ids" in call.needs else GENERATE_CALL.stage
        ends = deque(sorted(o.end_s for o in self._trace.generated_groups if o.stage == source))
        hops, busy_until = [], float("-inf")
        for span in self._select_spans(call.role, call.stage):
            group_ends = [ends.popleft() for _ in range(int(span.args["groups"])) if ends]
            if group_ends and busy_until <= group_ends[0] <= span.start_s:
                hops.append(span.start_s - group_ends[0])
            busy_until = max(busy_until, span.end_s)
        return hops

    def _collect_train_hops(self) -> list[float]:
        """Return the seconds from a step's last score to its last training round, on policy."""
        calls = self._config.dataflow.select_calls(CallKind.SCORE)
        scored = sorted(s.end_s for c in calls for s in self._select_spans(c.role, c.stage))
        work = [
            s
            for s in self._select_spans(POLICY, "train", *PLANNING_SPANS)
            if s.process.endswith("-0")
        ]
        round_s, hops = fit_median(self._collect_round_gaps(POLICY)).value, []
        for step in self._trace.steps:
            ends = [end for end in scored if step.start_s <= end < step.end_s]
            later_spans = [s for s in work if ends and ends[-1] <= s.start_s < step.end_s]
            running = any(s.start_s < ends[-1] < s.end_s for s in work) if ends else True
            # Of several rounds, the first may hold only groups that were ready earlier.
            is_last = self._trains_whole_steps or sum(s.name == "train" for s in later_spans) == 1
            if later_spans and is_last and not running:
                hops.append(max(0.0, later_spans[0].start_s - ends[-1] - round_s))
        return hops

    def _collect_step_gaps(self) -> list[float]:
        """Return the seconds from a step's last update to the next admission of prompts."""
        admitted = sorted({group.admitted_s for group in self._trace.generated_groups})
        updates = [span.end_s for span in self._select_spans(POLICY, "update")]
        gaps = []
        for step in self._trace.steps:
            last_update_s = max((end for end in updates if end <= step.end_s), default=None)
            next_admissions = [
                admitted_s
                for admitted_s in admitted
                if step.end_s <= admitted_s < step.end_s + step.step_s
            ]
            if last_update_s is not None:
                gaps.append(
                    (min(next_admissions) if next_admissions else step.end_s) - last_update_s
                )
        return gaps


def _parse_version(span: Span) -> int:
    return int(span.args["version"])


def _group_overlapping(spans: Iterable[Span]) -> Iterable[list[Span]]:
    """Yield lists of overlapping spans of a process: batches that it held at the same time."""
    by_process = defaultdict(list)
    for span in sorted(spans, key=lambda span: span.start_s):
        by_process[span.process].append(span)
    for process_spans in by_process.values():
        yield from split_gaps(process_spans)

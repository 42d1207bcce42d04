"""Fit `StageTimings`, the time of every operation in a run's placement, to the spans of a run.

Linear fits are robust: a few outliers have little effect. Spans show when a group was sampled, but
not its single decode steps. So the fit replays the groups through the simulator's engine model and
searches the coefficients for which each group finishes when it did.
"""

import statistics
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from streamrl.config.role_counts import count_actors
from streamrl.dataflow import FILTER_COLUMN, GENERATE_CALL, GREEDY_CALL, POLICY, CallKind, ModelCall
from streamrl.messages import Array
from streamrl.planner.calibration.run_trace import GeneratedGroup, RunTrace
from streamrl.planner.problem.stage_timings import (
    GeneratorTiming,
    ScoreTiming,
    StageTimings,
    TrainTiming,
    WeightsTiming,
)
from streamrl.planner.simulator.simulated_engine import SimulatedEngine
from streamrl.telemetry.spans import Span

OUTLIER_SCALE = 0.1
"""Residuals above this fraction of the median measurement count less (soft L1 loss)."""
INITIAL_NOISE = 0.1
"""Assumed relative error of a measurement before the first fit."""
MIN_NOISE = 1e-3


MAX_RELATIVE_ERROR = 0.3
"""A coefficient counts as known if its standard error is at most this fraction of its value."""


@dataclass(frozen=True)
class CoefficientEstimate:
    """A fitted coefficient, 0 or more, with its uncertainty.

    error: standard error.
    count: number of measurements.
    residual: median absolute residual of the fit over the median measurement.
    """

    value: float
    error: float = 0.0
    count: int = 0
    residual: float = 0.0

    @property
    def is_known(self) -> bool:
        """Whether the measurements determine this coefficient, not only its sum with others."""
        return self.count > 0 and self.error <= MAX_RELATIVE_ERROR * self.value


def fit_line(
    features: Sequence[Sequence[float]], seconds: Sequence[float]
) -> list[CoefficientEstimate]:
    """Fit measured seconds as a sum of features times coefficients.

    features: a row per measurement.
    """
    rows, measured = np.asarray(features, np.float64), np.asarray(seconds, np.float64)
    sizes = np.maximum(rows.mean(axis=0), 1e-300)
    return fit_parts(lambda parts: rows / sizes @ parts, measured, sizes)


def fit_parts(
    predict: Callable[[Array], Array], measured: Array, sizes: Array
) -> list[CoefficientEstimate]:
    """Fit how measured times divide into parts, where `predict(parts)` gives the times.

    Each part is in seconds; dividing a part by its entry of `sizes` gives a coefficient.

    Example: measured group times of 10 s with a typical size of 1000 decode steps; a part of 8 s
    gives a coefficient of 8 ms per step.

    The fit alternates between solving and estimating the noise: the median absolute deviation times
    1.4826, which is the standard deviation for normal errors. Standard errors come from the inverse
    of J^T J at the solution.
    """
    scale = max(float(np.median(measured)), 1e-12)
    equal_parts = np.full(len(sizes), 1 / len(sizes))

    def compute_residuals(x: Array) -> Array:
        """Return the residuals, relative to the median measurement."""
        residuals: Array = (predict(x * scale) - measured) / scale
        return residuals

    parts, noise = equal_parts, INITIAL_NOISE
    for _ in range(3):
        solution = _solve_parts(compute_residuals, parts, equal_parts, noise)
        parts = solution.x
        residuals = np.abs(predict(parts * scale) - measured)
        noise = min(INITIAL_NOISE, max(MIN_NOISE, 1.4826 * float(np.median(residuals)) / scale))
    parts, spread, jacobian = parts * scale, float(np.median(residuals)), solution.jac
    covariance = np.linalg.pinv(jacobian.T @ jacobian)
    errors = 1.4826 * spread * np.sqrt(np.maximum(np.diag(covariance), 0.0))
    pairs = zip((parts / sizes).tolist(), (errors / sizes).tolist(), strict=True)
    return [
        CoefficientEstimate(value, error, len(measured), spread / scale) for value, error in pairs
    ]


def _solve_parts(
    compute_residuals: Callable[[Array], Array], start: Array, equal_parts: Array, noise: float
) -> Any:
    """Minimize the residuals plus a ridge term toward equal parts, weighted by the noise.

    If all measurements have the same size, only the ridge term separates the parts.
    """
    # Imported late: scipy.optimize takes 0.4 s, and most commands fit nothing.
    from scipy.optimize import least_squares

    return least_squares(
        lambda parts: np.concatenate(
            [compute_residuals(parts), noise * len(equal_parts) * (parts - equal_parts)]
        ),
        np.maximum(start, 1e-6),
        bounds=(0.0, np.inf),
        loss="soft_l1",
        f_scale=OUTLIER_SCALE,
        diff_step=1e-3,
        xtol=1e-6,
        ftol=1e-9,
        max_nfev=12,
    )


def fit_median(seconds: Sequence[float]) -> CoefficientEstimate:
    """Fit a single coefficient: the median of measured seconds, with its standard error."""
    if not len(seconds):
        return CoefficientEstimate(0.0)
    median = float(np.median(seconds))
    deviation = float(np.median(np.abs(np.asarray(seconds) - median)))
    error = 1.4826 * deviation / np.sqrt(len(seconds))
    residual = deviation / median if median else 0.0
    return CoefficientEstimate(median, float(error), len(seconds), residual)


MAX_GROUPS = 3200
"""Groups of a replica that are replayed, the last ones: more do not improve the fit."""
DECODE_COEFFICIENTS = ("step_s", "rollout_s", "prefill_token_s", "group_s")


class PausableClock:
    """A clock that stops during pauses, given as (start, end) in seconds."""

    def __init__(self, pauses: Iterable[tuple[float, float]]) -> None:
        edges: list[float] = []
        for start, end in sorted(pauses):
            if edges and start <= edges[-1]:
                edges[-1] = max(edges[-1], end)
            else:
                edges += (start, end)
        lengths = np.diff(edges)
        lengths[1::2] = 0.0
        self._edges, self._paused_s = np.array(edges), np.concatenate([[0.0], np.cumsum(lengths)])

    def read_at(self, times: Array) -> Array:
        if not len(self._edges):
            return times
        return np.asarray(times - np.interp(times, self._edges, self._paused_s))


@dataclass(frozen=True)
class DecodeReplay:
    """Measured times of a replica's groups, ordered by begin, without the replica's pauses.

    complete_mask: whether all concurrent groups of a group are in the replay, so that it counts.
    load_times: when the replica loaded versions.
    """

    begin_times: Array
    end_times: Array
    prompt_tokens: Sequence[int]
    lengths: Sequence[Sequence[int]]
    complete_mask: Array
    load_times: Array

    @classmethod
    def from_process(
        cls, groups: Sequence[GeneratedGroup], loads: Sequence[float]
    ) -> "DecodeReplay":
        """Return the measured times of a generator process.

        groups: groups of the process, ordered by begin.
        loads: times at which the process loaded versions.
        """
        # A gap in the span of a group means that the whole replica was paused.
        clock = PausableClock(
            (before[1], after[0]) for group in groups for before, after in pairwise(group.intervals)
        )
        left_out, groups = groups[:-MAX_GROUPS], groups[-MAX_GROUPS:]
        alone_s = max((group.end_s for group in left_out), default=-np.inf)
        start_s, end_s = groups[0].start_s, max(group.end_s for group in groups)
        return cls(
            clock.read_at(np.array([group.start_s for group in groups])),
            clock.read_at(np.array([group.end_s for group in groups])),
            [group.prompt_tokens for group in groups],
            [group.lengths for group in groups],
            np.array([group.start_s >= alone_s for group in groups]),
            clock.read_at(np.array([load for load in loads if start_s < load < end_s])),
        )

    def replay_groups(self, timing: GeneratorTiming, *, pause_s: float) -> Array:
        """Return the time at which each group finishes in the engine model with these timings.

        pause_s: time to load a version.
        """
        engine: SimulatedEngine[int] = SimulatedEngine(timing)
        end_times = np.zeros(len(self.begin_times))

        def advance(until: float) -> None:
            """Simulate the engine until this time, and note when groups finish."""
            while engine.has_event_by(until) and not engine.is_empty:
                event_s = engine.next_event_s
                for group in engine.advance_to(event_s):
                    end_times[group.key] = event_s

        loads = deque(self.load_times.tolist())
        for key, begin in enumerate(self.begin_times.tolist()):
            while loads and loads[0] <= begin:
                advance(loads[0])
                engine.load_version(0, pause_s, loads.popleft())
            advance(begin)
            engine.add_group(key, self.prompt_tokens[key], self.lengths[key], begin)
        for load in loads:
            advance(load)
            engine.load_version(0, pause_s, load)
        advance(np.inf)
        return end_times

    def compute_typical_work(self) -> Array:
        """Return the median work of the engine while a group is sampled, float64 [4].

        The entries are decode steps, decode steps times running rollouts, prefilled tokens, groups.
        The last three include concurrent groups.
        """
        steps = np.array([max(lengths) for lengths in self.lengths])
        # Of the groups so far, ordered by begin, those that have ended do not run any more.
        by_end = np.argsort(self.end_times)
        num_ended = np.searchsorted(self.end_times[by_end], self.begin_times, side="right")
        groups = np.arange(1, len(steps) + 1) - num_ended
        sizes = np.array([len(lengths) for lengths in self.lengths])
        rollouts = np.cumsum(sizes) - np.append(0, np.cumsum(sizes[by_end]))[num_ended]
        work = [steps, rollouts * steps, rollouts * np.array(self.prompt_tokens), groups]
        medians: Array = np.median(work, axis=1)
        return medians


def fit_decode(
    replays: Sequence[DecodeReplay], start: GeneratorTiming, *, pause_s: float
) -> list[CoefficientEstimate]:
    """Fit the generator coefficients DECODE_COEFFICIENTS, in this order, to replays of a run.

    start: timing that supplies all other terms of a decode step.
    pause_s: time in which a generator pauses to load a version.

    prefill_token_s has a lower bound: the compute time of a prompt token in `start`. Without the
        bound, where groups come and go all the time, a fit can shift the prefill time into the
        other coefficients.

    If `start` recomputes running rollouts at each load, recomputing costs `prefill_token_s` per
    token.
    """
    sizes = np.array([replay.compute_typical_work() for replay in replays]).mean(axis=0)
    measured = np.concatenate(
        [(replay.end_times - replay.begin_times)[replay.complete_mask] for replay in replays]
    )
    lower_bounds = np.zeros(len(DECODE_COEFFICIENTS))
    lower_bounds[DECODE_COEFFICIENTS.index("prefill_token_s")] = min(
        start.compute_rollout_s, start.prefill_token_s
    )

    def predict(parts: Array) -> Array:
        """Return the predicted time of each group that counts."""
        timing = replace_coefficients(start, (lower_bounds + parts / sizes).tolist())
        durations = [
            replay.replay_groups(timing, pause_s=pause_s) - replay.begin_times for replay in replays
        ]
        masks = [replay.complete_mask for replay in replays]
        return np.concatenate([d[mask] for d, mask in zip(durations, masks, strict=True)])

    fit = fit_parts(predict, measured, sizes)
    return [
        replace(estimate, value=bound + estimate.value)
        for bound, estimate in zip(lower_bounds.tolist(), fit, strict=True)
    ]


def replace_coefficients(start: GeneratorTiming, values: Sequence[float]) -> GeneratorTiming:
    changed = dict(zip(DECODE_COEFFICIENTS, values, strict=True))
    if start.recompute_token_s:
        changed["recompute_token_s"] = changed["prefill_token_s"]
    return replace(start, **changed)  # type: ignore[arg-type]


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
        for group in self._trace.generated_groups:
            by_process[group.process].append(group)
        pulls = self._select_spans(GENERATE_CALL.role, "pull")
        replays = [
            DecodeReplay.from_process(groups, [s.end_s for s in pulls if s.process == process])
            for process, groups in by_process.items()
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
        """Return the shortest delays, in seconds, from a prompt's admission to its sampling.

        Longer ones contain waits for the version, for a decode slot or for shared devices.
        """
        release_times, delays = self._list_release_times(), []
        for group in self._trace.generated_groups:
            if group.stage == GENERATE_CALL.stage:
                num_released = bisect_right(release_times, group.start_s)
                released_s = release_times[num_released - 1] if num_released else 0.0
                delays.append(max(0.0, group.start_s - max(group.admitted_s, released_s)))
        return sorted(delays)[: max(1, round(SHARED_UNDELAYED_FRACTION * len(delays)))]

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

    def _collect_round_gaps(self, role: str) -> list[float]:
        """Return the seconds to dispatch a training round and read its groups.

        If rounds start as groups arrive, only the gap before an update contains no waiting.
        """
        work = [s for s in self._select_spans(role, "train", "update") if s.process.endswith("-0")]
        waiting_names = () if self._config.algorithm_settings.scope == "step" else ("train",)
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
        trained = self._config.dataflow.trained_roles
        followed = call.followed_role if call.followed_role in trained else POLICY
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
        """Fit the seconds from a sampled group to its scoring, over all scoring stages."""
        # A stage that needs the filter's verdict waits for the filter besides the generated group.
        hops = [
            hop_s
            for call in self._config.dataflow.select_calls(CallKind.SCORE)
            if FILTER_COLUMN not in call.needs
            for hop_s in self._collect_score_hops(call)
        ]
        return self._add_estimate("hop_s", fit_median(self._select_shortest(hops)))

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

    def _collect_step_gaps(self) -> list[float]:
        """Return the seconds from a step's last update to the next admission of prompts."""
        admitted = sorted({group.admitted_s for group in self._trace.generated_groups})
        updates = [span.end_s for span in self._select_spans(POLICY, "update")]
        gaps = []
        for step in self._trace.steps:
            last_update_s = max((end for end in updates if end <= step.end_s), default=None)
            until_s = step.end_s + step.step_s
            following = (at_s for at_s in admitted if step.end_s <= at_s < until_s)
            if last_update_s is not None:
                gaps.append(next(following, step.end_s) - last_update_s)
        return gaps


def _parse_version(span: Span) -> int:
    return int(span.args["version"])


def _group_overlapping(spans: Iterable[Span]) -> Iterable[list[Span]]:
    """Yield lists of overlapping spans of a process: batches that it held at the same time."""
    by_process = defaultdict(list)
    for span in sorted(spans, key=lambda span: span.start_s):
        by_process[span.process].append(span)
    for process_spans in by_process.values():
        batches, end_s = [process_spans[:1]], process_spans[0].end_s
        for span in process_spans[1:]:
            if span.start_s >= end_s:
                batches.append([])
            batches[-1].append(span)
            end_s = max(end_s, span.end_s)
        yield from batches

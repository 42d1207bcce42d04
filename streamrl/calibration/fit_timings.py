"""From what was measured to `StageTimings`: how long everything takes in the placement of a run.

Where a run was made on one machine's few cores its busy processes slow one another down: what is
fitted is what each would take alone, and `StageTimings.cores` says how many cores there are. What
the queue and the books compute beside them is in no span: `StageTimings.bookkeeping_s` is what the
run says of it.
"""

import statistics
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from streamrl.calibration.cpu_clocks import WorkClock
from streamrl.calibration.fit_decode import (
    DECODE_COEFFICIENTS,
    DecodeReplay,
    fit_decode,
    replace_coefficients,
)
from streamrl.calibration.robust_fit import RobustFit, fit_line, fit_median
from streamrl.calibration.run_trace import RunTrace
from streamrl.config.role_counts import count_actors
from streamrl.dataflow import FILTER_COLUMN, GENERATE_CALL, GREEDY_CALL, POLICY, CallKind, ModelCall
from streamrl.placement import (
    GeneratorTiming,
    ScoreTiming,
    StageTimings,
    TrainTiming,
    WeightsTiming,
)
from streamrl.telemetry.spans import Span

WAITING_SPANS = ("pull", "publish", "publish_reference", "save")
"""Spans in which a process mostly waits for others, or for a disk."""
PLANNING_SPANS = ("plan", "look")
CROWDING = 0.04
"""A process that trains a small model takes so much more of a core for each one beside it: 4 %, 7 %
and 13 % with one, two and three, on two cores."""
SHARED_UNDELAYED_FRACTION = 0.1
"""Which part of what was measured nothing stood in the way of, where devices are shared."""
UNDELAYED_FRACTION = 0.5
"""Likewise, where devices are not, but generation goes on meanwhile. Of pulls it is EASY: who
samples hears of a version at the end of a decode step, which is no part of how long they take.
"""
MAX_RELATIVE_ERROR = 0.3
"""A coefficient is known if its standard error is a smaller part of it than this."""


@dataclass(frozen=True)
class CoefficientEstimate:
    """A coefficient: its standard error, of how many measurements, and how far they are off it."""

    value: float
    error: float
    count: int
    residual: float

    @property
    def is_known(self) -> bool:
        """Whether the measurements say what it is: else they only say what it makes with others."""
        return self.count > 0 and self.error <= MAX_RELATIVE_ERROR * self.value


@dataclass(frozen=True)
class FittedTimings:
    """The timings of a run, and what each coefficient rests on, by its dotted name."""

    timings: StageTimings
    estimates: Mapping[str, CoefficientEstimate]


def fit_timings(measured: RunTrace, base: StageTimings) -> FittedTimings:
    """What a run's spans say.

    base: its timings by a cost model. Of the generators what a decode step takes to read and to
    compute is kept, and what it takes on top of that is fitted; so are all other coefficients.
    """
    return _TimingFitter(measured, base).fit_all()


class _TimingFitter:
    """One fit; `found` grows."""

    def __init__(self, measured: RunTrace, base: StageTimings) -> None:
        self._trace = measured
        self._base_timings = base
        self._config = measured.config
        self._estimates: dict[str, CoefficientEstimate] = {}
        busy = [
            [(span.start_s, span.end_s) for span in own if span.name not in WAITING_SPANS]
            for own in measured.spans_by_process.values()
        ]
        machine = measured.machine
        self._work_clock = WorkClock(
            busy, cores=machine.available_cores, beside=machine.queue, crowding=CROWDING
        )
        self._replica_counts = {
            role: count for role, (_, count) in count_actors(self._config).items()
        }

    def fit_all(self) -> FittedTimings:
        """All of it."""
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
            cores=self._trace.machine.available_cores,
            bookkeeping_s=self._trace.machine.queue * self._trace.mean_group_s,
            crowding=CROWDING,
        )
        return FittedTimings(timings, self._estimates)

    def _add_estimate(self, name: str, fit: RobustFit, index: int = 0) -> float:
        value = fit.coefficients[index]
        self._estimates[name] = CoefficientEstimate(
            value, fit.standard_errors[index], fit.num_measurements, fit.residual
        )
        return value

    def _measure_work_s(self, span: Span) -> float:
        return self._work_clock.measure_work(span.start_s, span.end_s)

    def _select_spans(self, role: str, *names: str) -> list[Span]:
        """Of the processes of a role, since the first of the steps."""
        prefix = "trainer" if role == POLICY else role
        return [
            span
            for process, own in self._trace.spans_by_process.items()
            for span in own
            if process.rpartition("-")[0] == prefix and span.name in names
        ]

    # Generators.

    def _fit_generator(self) -> GeneratorTiming:
        by_process = defaultdict(list)
        for one in self._trace.generated_groups:
            by_process[one.process].append(one)
        pulls = self._select_spans(GENERATE_CALL.role, "pull")
        asked = [
            part
            for process, own in by_process.items()
            for part in DecodeReplay.from_process(
                own, [s.end_s for s in pulls if s.process == process], self._work_clock
            )
        ]
        base, pause_s = self._base_timings.generator, self._measure_pause_s()
        sampling = fit_decode(asked, base, pause_s=pause_s)
        values = [
            self._add_estimate(f"generator.{name}", sampling, index)
            for index, name in enumerate(DECODE_COEFFICIENTS)
        ]
        begin_s = self._add_estimate("generator.begin_s", fit_median(self._collect_begin_delays()))
        return replace(replace_coefficients(base, values), begin_s=begin_s)

    def _measure_pause_s(self) -> float:
        """How long a generator samples nothing as it takes up a version."""
        return self._trace.compute_median("weights/pause_s") or 0.0

    def _collect_begin_delays(self) -> list[float]:
        """From a prompt that may be sampled to when it is, where neither room nor version lack."""
        pulls = sorted(self._select_spans(GENERATE_CALL.role, "pull"), key=lambda span: span.end_s)
        given_back = self._list_release_times()
        found, free = [], []
        for one in self._trace.generated_groups:
            if one.stage == GENERATE_CALL.stage:
                before = bisect_right(given_back, one.start_s)
                since = max(one.admitted_s, given_back[before - 1] if before else 0.0)
                found.append(max(0.0, one.start_s - since))
                version = one.admitted_version
                held = (
                    s for s in pulls if s.process == one.process and _parse_version(s) >= version
                )
                if next((s.end_s for s in held), 0.0) <= one.admitted_s:
                    free.append(found[-1])
        if len(free) >= SHARED_UNDELAYED_FRACTION * len(found):
            return self._select_shortest(free)
        return (
            sorted(found)[: max(1, round(SHARED_UNDELAYED_FRACTION * len(found)))] if found else []
        )

    def _list_release_times(self) -> list[float]:
        """When a trained model last computed, so that others could have the devices they share."""
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
        """Those that nothing stood in the way of: this part, where generation is ahead."""
        if self._config.placement.shared_pools:
            part = SHARED_UNDELAYED_FRACTION
        elif self._config.pipeline.max_steps_ahead:
            part = ahead
        else:
            part = 1.0
        return sorted(seconds)[: max(1, round(part * len(seconds)))] if seconds else []

    # Scorers.

    def _fit_score(self, call: ModelCall) -> ScoreTiming:
        base = self._base_timings.score[call.stage]
        episodes = list(_group_overlapping(self._select_spans(call.role, call.stage)))
        rows, seconds = [], []
        for spans in episodes:
            rollouts = sum(float(span.args["rollouts"]) for span in spans)
            tokens = sum(float(span.args["tokens"]) for span in spans)
            rows.append((float(len(spans)), rollouts, tokens))
            last = max(span.end_s for span in spans)
            seconds.append(self._work_clock.measure_work(spans[0].start_s, last))
        has_model = base.token_s > 0
        features = rows if has_model else [row[:2] for row in rows]
        found = fit_line(features, seconds)
        place = f"score.{call.stage}"
        return ScoreTiming(
            replicas=self._replica_counts[call.role],
            batch=self._config.scorer.max_groups,
            batch_s=self._add_estimate(f"{place}.batch_s", found, 0),
            rollout_s=self._add_estimate(f"{place}.rollout_s", found, 1),
            token_s=self._add_estimate(f"{place}.token_s", found, 2) if has_model else 0.0,
        )

    # Trainers.

    def _fit_train(self, role: str) -> TrainTiming:
        trainer = self._config.get_trainer_config(role)
        spans = self._select_spans(role, "train")
        spans = [span for span in spans if span.args.get("tokens")]
        rows = [(1.0, float(span.args["tokens"])) for span in spans]
        found = fit_line(rows, [self._measure_work_s(span) for span in spans])
        updates = fit_median(
            [self._measure_work_s(span) for span in self._select_spans(role, "update")]
        )
        place = f"train.{role}"
        return TrainTiming(
            dp_size=trainer.dp_size,
            micro_batch_s=self._add_estimate(f"{place}.micro_batch_s", found, 0),
            token_s=self._add_estimate(f"{place}.token_s", found, 1),
            update_s=self._add_estimate(f"{place}.update_s", updates),
            step_s=self._add_estimate(
                f"{place}.step_s", fit_median(self._collect_planning_times(role))
            ),
            round_s=self._add_estimate(
                f"{place}.round_s", fit_median(self._collect_round_gaps(role))
            ),
        )

    @property
    def _trains_whole_steps(self) -> bool:
        """Whether nothing of a step is trained before all of it is there."""
        return self._config.algorithm_settings.scope == "step"

    def _collect_round_gaps(self, role: str) -> list[float]:
        """From a round to what follows it at once: to ask for it, and to read its groups.

        Where rounds are made as groups come, only an update is known to wait for nothing else.
        """
        work = [s for s in self._select_spans(role, "train", "update") if s.process.endswith("-0")]
        waits = () if self._trains_whole_steps else ("train",)
        return [
            max(0.0, self._work_clock.measure_work(before.end_s, behind.start_s))
            for before, behind in pairwise(work)
            if before.name == "train" and behind.name not in waits
        ]

    def _collect_planning_times(self, role: str) -> list[float]:
        """Of each step, on the first rank."""
        spans = [s for s in self._select_spans(role, *PLANNING_SPANS) if s.process.endswith("-0")]
        return [
            sum(
                self._measure_work_s(span)
                for span in spans
                if step.start_s <= span.start_s < step.end_s
            )
            for step in self._trace.steps
        ]

    # Versions, and what is between the stages.

    def _fit_weights(self, call: ModelCall) -> WeightsTiming:
        followed = (
            call.followed_role
            if call.followed_role in self._config.dataflow.trained_roles
            else POLICY
        )
        published = {_parse_version(s): s for s in self._select_spans(followed, "publish")}
        pulled = self._select_spans(call.role, "pull")
        ends = {step.version + 1: step.end_s for step in self._trace.steps}
        shares = bool(self._config.placement.shared_pools)
        publish, pull = [], []
        for version, span in published.items():
            since = span.start_s if shares else ends.get(version, span.start_s)
            publish.append(max(0.0, span.end_s - since))
        for span in pulled:
            source = published.get(_parse_version(span))
            since = span.start_s
            if source is not None and not shares:
                since = min(since, source.end_s)
            pull.append(span.end_s - since)
        place = f"weights.{call.stage}"
        publish_s = self._add_estimate(
            f"{place}.publish_s", fit_median(self._select_shortest(publish))
        )
        pull_s = self._add_estimate(
            f"{place}.pull_s",
            fit_median(self._select_shortest(pull, ahead=SHARED_UNDELAYED_FRACTION)),
        )
        paused = [
            s.row["weights/pause_s"] for s in self._trace.steps if s.row.get("weights/pause_s")
        ]
        pause_s = min(
            pull_s,
            self._add_estimate(f"{place}.pause_s", fit_median(self._select_shortest(paused))),
        )
        return WeightsTiming(publish_s, pull_s, pause_s)

    def _fit_hop(self) -> float:
        """From a stage to the next, where that one waits for it: the mean of both kinds of hops."""
        # Others wait for the verdict of a filter on what is generated.
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
            self._estimates["hop_s"] = CoefficientEstimate(0.0, 0.0, 0, 0.0)
            return 0.0
        value = statistics.fmean(fit.coefficients[0] for fit in fits)
        error = max(fit.standard_errors[0] for fit in fits)
        residual = max(fit.residual for fit in fits)
        self._estimates["hop_s"] = CoefficientEstimate(
            value, error, sum(fit.num_measurements for fit in fits), residual
        )
        return value

    def _collect_score_hops(self, call: ModelCall) -> list[float]:
        """From a group's last token to when it is scored, by who had nothing to do.

        Groups are scored in the order in which they are done, as many at once as a span says.
        """
        source = GREEDY_CALL.stage if "greedy_ids" in call.needs else GENERATE_CALL.stage
        ends = deque(sorted(o.end_s for o in self._trace.generated_groups if o.stage == source))
        found, busy_until = [], float("-inf")
        for span in self._select_spans(call.role, call.stage):
            own = [ends.popleft() for _ in range(int(span.args["groups"])) if ends]
            if own and busy_until <= own[0] <= span.start_s:
                found.append(self._work_clock.measure_work(own[0], span.start_s))
            busy_until = max(busy_until, span.end_s)
        return found

    def _collect_train_hops(self) -> list[float]:
        """From a step's last score to its last round, on policy, where nothing else is scored."""
        calls = self._config.dataflow.select_calls(CallKind.SCORE)
        scored = sorted(s.end_s for c in calls for s in self._select_spans(c.role, c.stage))
        work = [
            s
            for s in self._select_spans(POLICY, "train", *PLANNING_SPANS)
            if s.process.endswith("-0")
        ]
        round_s, found = fit_median(self._collect_round_gaps(POLICY)).coefficients[0], []
        for step in self._trace.steps:
            ends = [end for end in scored if step.start_s <= end < step.end_s]
            behind = [s for s in work if ends and ends[-1] <= s.start_s < step.end_s]
            running = any(s.start_s < ends[-1] < s.end_s for s in work) if ends else True
            # One of several may be of groups that were there before.
            is_last = self._trains_whole_steps or sum(s.name == "train" for s in behind) == 1
            if behind and is_last and not running:
                hop_s = self._work_clock.measure_work(ends[-1], behind[0].start_s)
                found.append(max(0.0, hop_s - round_s))
        return found

    def _collect_step_gaps(self) -> list[float]:
        """From the last update to when prompts come in again."""
        admitted = sorted({one.admitted_s for one in self._trace.generated_groups})
        updates = [span.end_s for span in self._select_spans(POLICY, "update")]
        found = []
        for step in self._trace.steps:
            last = max((end for end in updates if end <= step.end_s), default=None)
            again = [at for at in admitted if step.end_s <= at < step.end_s + step.step_s]
            if last is not None:
                found.append((min(again) if again else step.end_s) - last)
        return found


def _parse_version(span: Span) -> int:
    return int(span.args["version"])


def _group_overlapping(spans: Iterable[Span]) -> Iterable[list[Span]]:
    """Spans of a process that overlap, together: it had them all at once."""
    by_process = defaultdict(list)
    for span in spans:
        by_process[span.process].append(span)
    for own in by_process.values():
        together: list[Span] = []
        until = float("-inf")
        for span in sorted(own, key=lambda span: span.start_s):
            if together and span.start_s >= until:
                yield together
                together = []
            together.append(span)
            until = max(until, span.end_s)
        if together:
            yield together

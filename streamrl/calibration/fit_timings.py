"""From what was measured to `Timings`: how long everything takes in the placement of a run.

Where a run was made on one machine's few cores its busy processes slow one another down: what is
fitted is what each would take alone, and `Timings.cores` says how many cores there are. What the
queue and the books compute beside them is in no span: `Timings.books_s` is what the run says of it.
"""

import statistics
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from streamrl.calibration.cpu_clocks import WorkClock
from streamrl.calibration.fit_decode import COEFFICIENTS, Asked, fit_sampling, sampled_with
from streamrl.calibration.robust_fit import Fit, fit_line, fit_median
from streamrl.calibration.run_trace import Measured
from streamrl.config.role_counts import counts
from streamrl.dataflow import GENERATE, GREEDY, POLICY, VERDICT, Call, Kind
from streamrl.placement import (
    GeneratorTiming,
    ScoreTiming,
    Timings,
    TrainTiming,
    WeightsTiming,
)
from streamrl.telemetry.spans import Span

WAITING = ("pull", "publish", "publish_reference", "save")
"""Spans in which a process mostly waits for others, or for a disk."""
PLANNING = ("plan", "look")
CROWDING = 0.04
"""A process that trains a small model takes so much more of a core for each one beside it: 4 %, 7 %
and 13 % with one, two and three, on two cores."""
EASY = 0.1
"""Which part of what was measured nothing stood in the way of, where devices are shared."""
FREE = 0.5
"""Likewise, where devices are not, but generation goes on meanwhile. Of pulls it is EASY: who
samples hears of a version at the end of a decode step, which is no part of how long they take.
"""
TOLD_APART = 0.3
"""A coefficient is known if its standard error is a smaller part of it than this."""


@dataclass(frozen=True)
class Found:
    """A coefficient: its standard error, of how many measurements, and how far they are off it."""

    value: float
    error: float
    count: int
    residual: float

    @property
    def is_known(self) -> bool:
        """Whether the measurements say what it is: else they only say what it makes with others."""
        return self.count > 0 and self.error <= TOLD_APART * self.value


@dataclass(frozen=True)
class Fitted:
    """The timings of a run, and what each coefficient rests on, by its dotted name."""

    timings: Timings
    found: Mapping[str, Found]


def fit(measured: Measured, base: Timings) -> Fitted:
    """What a run's spans say.

    base: its timings by a cost model. Of the generators what a decode step takes to read and to
    compute is kept, and what it takes on top of that is fitted; so are all other coefficients.
    """
    return _Fitting(measured, base).run()


class _Fitting:
    """One fit; `found` grows."""

    def __init__(self, measured: Measured, base: Timings) -> None:
        self._run = measured
        self._base = base
        self._config = measured.config
        self._found: dict[str, Found] = {}
        busy = [
            [(span.start_s, span.end_s) for span in own if span.name not in WAITING]
            for own in measured.by_process.values()
        ]
        machine = measured.machine
        self._clock = WorkClock(busy, cores=machine.left, beside=machine.queue, crowding=CROWDING)
        self._counts = {role: count for role, (_, count) in counts(self._config).items()}

    def run(self) -> Fitted:
        """All of it."""
        dataflow = self._config.dataflow
        train = {role: self._train(role) for role in dataflow.trained}
        timings = Timings(
            self._generator(),
            {call.stage: self._score(call) for call in dataflow.of_kind(Kind.SCORE)},
            train,
            weights={
                call.stage: self._weights(call)
                for call in dataflow.ordered
                if call.follows and call.stage in self._base.weights
            },
            hop_s=self._hop(),
            step_s=self._note("step_s", fit_median(self._between_steps())),
            cores=self._run.machine.left,
            books_s=self._run.machine.queue * self._run.group_s,
            crowding=CROWDING,
        )
        return Fitted(timings, self._found)

    def _note(self, name: str, fit: Fit, index: int = 0) -> float:
        value = fit.values[index]
        self._found[name] = Found(value, fit.errors[index], fit.count, fit.residual)
        return value

    def _worked(self, span: Span) -> float:
        return self._clock.between(span.start_s, span.end_s)

    def _spans(self, role: str, *names: str) -> list[Span]:
        """Of the processes of a role, since the first of the steps."""
        prefix = "trainer" if role == POLICY else role
        return [
            span
            for process, own in self._run.by_process.items()
            for span in own
            if process.rpartition("-")[0] == prefix and span.name in names
        ]

    # Generators.

    def _generator(self) -> GeneratorTiming:
        by_process = defaultdict(list)
        for one in self._run.sampled:
            by_process[one.process].append(one)
        pulls = self._spans(GENERATE.role, "pull")
        asked = [
            part
            for process, own in by_process.items()
            for part in Asked.parts(
                own, [s.end_s for s in pulls if s.process == process], self._clock
            )
        ]
        base, pause_s = self._base.generator, self._pause_s()
        sampling = fit_sampling(asked, base, pause_s=pause_s)
        values = [
            self._note(f"generator.{name}", sampling, index)
            for index, name in enumerate(COEFFICIENTS)
        ]
        begin_s = self._note("generator.begin_s", fit_median(self._begins()))
        return replace(sampled_with(base, values), begin_s=begin_s)

    def _pause_s(self) -> float:
        """How long a generator samples nothing as it takes up a version."""
        return self._run.median("weights/pause_s") or 0.0

    def _begins(self) -> list[float]:
        """From a prompt that may be sampled to when it is, where neither room nor version lack."""
        pulls = sorted(self._spans(GENERATE.role, "pull"), key=lambda span: span.end_s)
        given_back = self._given_back()
        found, free = [], []
        for one in self._run.sampled:
            if one.stage == GENERATE.stage:
                before = bisect_right(given_back, one.start_s)
                since = max(one.admitted_s, given_back[before - 1] if before else 0.0)
                found.append(max(0.0, one.start_s - since))
                version = one.admitted_version
                held = (s for s in pulls if s.process == one.process and _version(s) >= version)
                if next((s.end_s for s in held), 0.0) <= one.admitted_s:
                    free.append(found[-1])
        if len(free) >= EASY * len(found):
            return self._least(free)
        return sorted(found)[: max(1, round(EASY * len(found)))] if found else []

    def _given_back(self) -> list[float]:
        """When a trained model last computed, so that others could have the devices they share."""
        if not self._config.placement.shared:
            return []
        trained = self._config.dataflow.trained
        spans = [s for role in trained for s in self._spans(role, "train", "update", *PLANNING)]
        return sorted(span.end_s for span in spans)

    def _least(self, seconds: Sequence[float], *, ahead: float = FREE) -> list[float]:
        """Those that nothing stood in the way of: this part, where generation is ahead."""
        if self._config.placement.shared:
            part = EASY
        elif self._config.pipeline.lead:
            part = ahead
        else:
            part = 1.0
        return sorted(seconds)[: max(1, round(part * len(seconds)))] if seconds else []

    # Scorers.

    def _score(self, call: Call) -> ScoreTiming:
        base = self._base.score[call.stage]
        episodes = list(_episodes(self._spans(call.role, call.stage)))
        rows, seconds = [], []
        for spans in episodes:
            rollouts = sum(float(span.args["rollouts"]) for span in spans)
            tokens = sum(float(span.args["tokens"]) for span in spans)
            rows.append((float(len(spans)), rollouts, tokens))
            last = max(span.end_s for span in spans)
            seconds.append(self._clock.between(spans[0].start_s, last))
        has_model = base.token_s > 0
        features = rows if has_model else [row[:2] for row in rows]
        found = fit_line(features, seconds)
        place = f"score.{call.stage}"
        return ScoreTiming(
            replicas=self._counts[call.role],
            batch=self._config.scorer.max_groups,
            batch_s=self._note(f"{place}.batch_s", found, 0),
            rollout_s=self._note(f"{place}.rollout_s", found, 1),
            token_s=self._note(f"{place}.token_s", found, 2) if has_model else 0.0,
        )

    # Trainers.

    def _train(self, role: str) -> TrainTiming:
        trainer = self._config.trainer_of(role)
        spans = self._spans(role, "train")
        spans = [span for span in spans if span.args.get("tokens")]
        rows = [(1.0, float(span.args["tokens"])) for span in spans]
        found = fit_line(rows, [self._worked(span) for span in spans])
        updates = fit_median([self._worked(span) for span in self._spans(role, "update")])
        place = f"train.{role}"
        return TrainTiming(
            shares=trainer.num_shares,
            micro_batch_s=self._note(f"{place}.micro_batch_s", found, 0),
            token_s=self._note(f"{place}.token_s", found, 1),
            update_s=self._note(f"{place}.update_s", updates),
            step_s=self._note(f"{place}.step_s", fit_median(self._planning(role))),
            round_s=self._note(f"{place}.round_s", fit_median(self._round_gaps(role))),
        )

    @property
    def _takes_whole_steps(self) -> bool:
        """Whether nothing of a step is trained before all of it is there."""
        return self._config.settings.scope == "step"

    def _round_gaps(self, role: str) -> list[float]:
        """From a round to what follows it at once: to ask for it, and to read its groups.

        Where rounds are made as groups come, only an update is known to wait for nothing else.
        """
        work = [s for s in self._spans(role, "train", "update") if s.process.endswith("-0")]
        waits = () if self._takes_whole_steps else ("train",)
        return [
            max(0.0, self._clock.between(before.end_s, behind.start_s))
            for before, behind in pairwise(work)
            if before.name == "train" and behind.name not in waits
        ]

    def _planning(self, role: str) -> list[float]:
        """Of each step, on the first rank."""
        spans = [s for s in self._spans(role, *PLANNING) if s.process.endswith("-0")]
        return [
            sum(self._worked(span) for span in spans if step.start_s <= span.start_s < step.end_s)
            for step in self._run.steps
        ]

    # Versions, and what is between the stages.

    def _weights(self, call: Call) -> WeightsTiming:
        followed = call.follows if call.follows in self._config.dataflow.trained else POLICY
        published = {_version(s): s for s in self._spans(followed, "publish")}
        pulled = self._spans(call.role, "pull")
        ends = {step.version + 1: step.end_s for step in self._run.steps}
        shares = bool(self._config.placement.shared)
        publish, pull = [], []
        for version, span in published.items():
            since = span.start_s if shares else ends.get(version, span.start_s)
            publish.append(max(0.0, span.end_s - since))
        for span in pulled:
            source = published.get(_version(span))
            since = span.start_s
            if source is not None and not shares:
                since = min(since, source.end_s)
            pull.append(span.end_s - since)
        place = f"weights.{call.stage}"
        publish_s = self._note(f"{place}.publish_s", fit_median(self._least(publish)))
        pull_s = self._note(f"{place}.pull_s", fit_median(self._least(pull, ahead=EASY)))
        paused = [s.row["weights/pause_s"] for s in self._run.steps if s.row.get("weights/pause_s")]
        pause_s = min(pull_s, self._note(f"{place}.pause_s", fit_median(self._least(paused))))
        return WeightsTiming(publish_s, pull_s, pause_s)

    def _hop(self) -> float:
        """From a stage to the next, where that one waits for it: the mean of both kinds of hops."""
        # Others wait for the verdict of a filter on what is generated.
        calls = [c for c in self._config.dataflow.of_kind(Kind.SCORE) if VERDICT not in c.needs]
        kinds = [self._to_score(call) for call in calls]
        if not self._config.pipeline.lead:
            kinds.append(self._to_train())
        fits = [fit_median(gaps) for gaps in map(self._least, kinds) if gaps]
        if not fits:
            self._found["hop_s"] = Found(0.0, 0.0, 0, 0.0)
            return 0.0
        value = statistics.fmean(fit.values[0] for fit in fits)
        error = max(fit.errors[0] for fit in fits)
        residual = max(fit.residual for fit in fits)
        self._found["hop_s"] = Found(value, error, sum(fit.count for fit in fits), residual)
        return value

    def _to_score(self, call: Call) -> list[float]:
        """From a group's last token to when it is scored, by who had nothing to do.

        Groups are scored in the order in which they are done, as many at once as a span says.
        """
        source = GREEDY.stage if "greedy_ids" in call.needs else GENERATE.stage
        ends = deque(sorted(o.end_s for o in self._run.sampled if o.stage == source))
        found, busy_until = [], float("-inf")
        for span in self._spans(call.role, call.stage):
            own = [ends.popleft() for _ in range(int(span.args["groups"])) if ends]
            if own and busy_until <= own[0] <= span.start_s:
                found.append(self._clock.between(own[0], span.start_s))
            busy_until = max(busy_until, span.end_s)
        return found

    def _to_train(self) -> list[float]:
        """From a step's last score to its last round, on policy, where nothing else is scored."""
        calls = self._config.dataflow.of_kind(Kind.SCORE)
        scored = sorted(s.end_s for c in calls for s in self._spans(c.role, c.stage))
        work = [s for s in self._spans(POLICY, "train", *PLANNING) if s.process.endswith("-0")]
        round_s, found = fit_median(self._round_gaps(POLICY)).values[0], []
        for step in self._run.steps:
            ends = [end for end in scored if step.start_s <= end < step.end_s]
            behind = [s for s in work if ends and ends[-1] <= s.start_s < step.end_s]
            running = any(s.start_s < ends[-1] < s.end_s for s in work) if ends else True
            # One of several may be of groups that were there before.
            is_last = self._takes_whole_steps or sum(s.name == "train" for s in behind) == 1
            if behind and is_last and not running:
                hop_s = self._clock.between(ends[-1], behind[0].start_s)
                found.append(max(0.0, hop_s - round_s))
        return found

    def _between_steps(self) -> list[float]:
        """From the last update to when prompts come in again."""
        admitted = sorted({one.admitted_s for one in self._run.sampled})
        updates = [span.end_s for span in self._spans(POLICY, "update")]
        found = []
        for step in self._run.steps:
            last = max((end for end in updates if end <= step.end_s), default=None)
            again = [at for at in admitted if step.end_s <= at < step.end_s + step.step_s]
            if last is not None:
                found.append((min(again) if again else step.end_s) - last)
        return found


def _version(span: Span) -> int:
    return int(span.args["version"])


def _episodes(spans: Iterable[Span]) -> Iterable[list[Span]]:
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

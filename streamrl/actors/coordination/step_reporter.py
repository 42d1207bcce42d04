"""Turns finished steps into reports, beside the stream and never in its way."""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean
from typing import Any

from streamrl.actors.actor_context import ActorReport
from streamrl.actors.coordination.driver_events import Feed, StepReport
from streamrl.actors.transport.ray_calls import call
from streamrl.algorithms import step_normaliser, summarise
from streamrl.algorithms.math.step_metrics import SHARED_PREFIX, summarise_critic
from streamrl.config import RunConfig
from streamrl.dataflow import CRITIC, CRITICS, POLICY, Call, Kind
from streamrl.errors import ActorLostError, DeadlineError
from streamrl.rewards.metric_means import with_means
from streamrl.stream.protocols import StepOutcome
from streamrl.stream.step_metrics import Activity, StepFacts, step_row
from streamrl.telemetry.cpu_usage import CoreMeter, machine_time, process_time
from streamrl.telemetry.metric_names import check_row
from streamrl.telemetry.spans import Span


@dataclass(frozen=True)
class RoleActors:
    """The actors of one role and their names; `calls` are what all of them serve.

    Replicas may join and leave while the run goes on.
    """

    calls: Sequence[Call]
    names: list[str]
    actors: list[Any]

    @property
    def role(self) -> str:
        """What they hold."""
        return self.calls[0].role

    @property
    def kind(self) -> Kind:
        """What they do with it."""
        return self.calls[0].kind

    def join(self, name: str, actor: Any) -> None:
        """One more."""
        self.names.append(name)
        self.actors.append(actor)

    def leave(self, name: str) -> None:
        """One less, if it is there."""
        if name in self.names:
            place = self.names.index(name)
            del self.names[place], self.actors[place]


@dataclass(frozen=True)
class Snapshot:
    """What was read at the end of a step, before the next one changed it."""

    outcome: StepOutcome
    weights: Mapping[str, float]
    evaluation: Mapping[str, float]


DRAIN_EVERY_S = 0.2
"""Actors are asked what they did at most this often, s; quicker steps are reported together."""
DRAIN_TIMEOUT_S = 3.0
"""Longest that the report of a step waits for an actor, s: one that hangs must not hold it up."""
SAMPLES_KEPT = 200
"""Most scored texts that wait for their groups to be trained."""


class Reporter:
    """Drains the actors after each step, computes the step's row and posts it."""

    def __init__(
        self, config: RunConfig, roles: Sequence[RoleActors], feed: Feed, *, start_s: float
    ) -> None:
        self._config = config
        self._roles = roles
        self._feed = feed
        self._window_start = start_s
        self._spans: dict[str, list[Span]] = {role.role: [] for role in roles}
        self._samples: list[Mapping[str, Any]] = []
        self._counts: Counter[str] = Counter()
        self._peaks: dict[str, float] = {}
        self._meters = {name: CoreMeter() for name in ("machine", "stages", "queue")}
        self._cores: dict[str, float] = {}
        self._drained_at = 0.0
        self._snapshots: asyncio.Queue[Snapshot] = asyncio.Queue()

    def begin_step(self, start_s: float) -> None:
        """Count what comes from `start_s` on, epoch seconds, to the next step."""
        self._window_start = start_s

    def note(self, snapshot: Snapshot) -> None:
        """A step has ended; its report follows in its own time."""
        self._snapshots.put_nowait(snapshot)

    async def run(self) -> None:
        """Report every noted step, without end."""
        clock = asyncio.get_running_loop().time
        while True:
            snapshots = [await self._snapshots.get()]
            await asyncio.sleep(max(0.0, self._drained_at + DRAIN_EVERY_S - clock()))
            self._drained_at = clock()
            while not self._snapshots.empty():
                snapshots.append(self._snapshots.get_nowait())
            reports = await self._drain()
            self._measure(reports, shards_s=snapshots[-1].outcome.queue.cpu_s)
            spans = self._keep(reports)
            for snapshot in snapshots:
                self._report(snapshot, spans)
                self._snapshots.task_done()
                spans = []

    async def idle(self) -> None:
        """Wait until every noted step is reported; for ever if `run` has failed."""
        await self._snapshots.join()

    async def finish(self, running: "asyncio.Task[None]") -> None:
        """Wait until every noted step is reported by `running`, the task of `run`; end it."""
        joined = asyncio.create_task(self.idle())
        await asyncio.wait({joined, running}, return_when=asyncio.FIRST_COMPLETED)
        if not joined.done():
            running.result()
        running.cancel()

    def _report(self, snapshot: Snapshot, spans: Sequence[Span]) -> None:
        outcome = snapshot.outcome
        # A wall clock may be set back; the step's length is then next to nothing, not negative.
        end_s = max(outcome.ended_at, self._window_start + 1e-3)
        row = step_row(
            StepFacts(
                version=outcome.version,
                groups=outcome.groups,
                sums=next(made.sums for made in outcome.made.values() if made.sums),
                metrics=self._metrics(snapshot),
                queue=outcome.queue,
                ledger=outcome.ledger,
                activity=self._activity(),
                start_s=self._window_start,
                end_s=end_s,
                max_staleness=self._config.pipeline.max_staleness,
                filtered=outcome.filtered,
            )
        )
        check_row(row)
        self._window_start = end_s
        samples = self._samples_of(outcome)
        self._feed.post(StepReport(outcome.version + 1, row, spans, samples))

    def _samples_of(self, outcome: StepOutcome) -> list[Mapping[str, Any]]:
        """The samples of the step's groups. Those of groups that were dropped age out."""
        trained = {group.uid for group in outcome.groups}
        found = [sample for sample in self._samples if sample["uid"] in trained]
        others = [sample for sample in self._samples if sample["uid"] not in trained]
        self._samples = others[-SAMPLES_KEPT:]
        return found

    async def _drain(self) -> dict[str, list[ActorReport]]:
        """What every actor did since the last step, by role."""
        asked = {
            role.role: [
                asyncio.ensure_future(self._ask(name, actor))
                for name, actor in zip(role.names, role.actors, strict=True)
            ]
            for role in self._roles
        }
        return {role: list(await asyncio.gather(*replies)) for role, replies in asked.items()}

    @staticmethod
    async def _ask(name: str, actor: Any) -> ActorReport:
        """What one actor did. What a dead one did is lost; others see to it."""
        try:
            report = await call(actor.drain.remote(), f"{name}.drain", DRAIN_TIMEOUT_S)
        except (ActorLostError, DeadlineError):
            return ActorReport(name, (), process_time={})
        assert isinstance(report, ActorReport)
        return report

    def _measure(self, reports: Mapping[str, Sequence[ActorReport]], *, shards_s: float) -> None:
        """The cores that were kept busy since the last drain, by whom."""
        times: dict[str, dict[str, float]] = {
            "machine": machine_time(),
            "stages": {},
            "queue": {**process_time(), "shards": shards_s},
        }
        for part in chain.from_iterable(reports.values()):
            times["stages"] |= part.process_time
        now = asyncio.get_running_loop().time()
        for name, meter in self._meters.items():
            self._cores[f"cpu/{name}"] = meter.cores(times[name], now)

    def _keep(self, reports: Mapping[str, Sequence[ActorReport]]) -> list[Span]:
        """Keep what was drained for the windows and steps to come; returns the spans that ended.

        A span that is open now comes again with the next drain.
        """
        for role, parts in reports.items():
            ended = [span for span in self._spans[role] if not span.is_open]
            self._spans[role] = ended + [span for part in parts for span in part.spans]
        parts = [part for role in reports.values() for part in role]
        self._samples += [sample for part in parts for sample in part.samples]
        for part in parts:
            self._counts.update(part.counts)
            for phase, peak_mb in part.peaks_mb.items():
                name = f"memory/{phase}_mb"
                self._peaks[name] = max(self._peaks.get(name, 0.0), peak_mb)
        return [span for part in parts for span in part.spans if not span.is_open]

    def _activity(self) -> dict[str, Activity]:
        """What reaches into the window, by stage; what ended before it is forgotten.

        What actors do for no stage in particular, as a pull, counts to the first of theirs.
        """
        activity = {}
        for role in self._roles:
            spans = [s for s in self._spans[role.role] if s.end_s > self._window_start]
            self._spans[role.role] = spans
            first, *others = [call.stage for call in role.calls]
            parts = {first: [span for span in spans if span.name not in others]}
            parts |= {stage: [span for span in spans if span.name == stage] for stage in others}
            for stage, own in parts.items():
                activity[stage] = Activity(role.kind.value, role.role, len(role.actors), own)
        return activity

    def _metrics(self, snapshot: Snapshot) -> dict[str, float]:
        made, settings = snapshot.outcome.made, self._config.settings
        sums = made[POLICY].sums
        metrics = summarise(sums, step_normaliser(settings, sums))
        shared = {
            name.removeprefix(SHARED_PREFIX): value
            for name, value in sums.items()
            if name.startswith(SHARED_PREFIX)
        }
        if shared:
            metrics |= summarise_critic(shared, CRITIC)
        dials = dict(snapshot.outcome.dials)
        metrics["policy/kl_coef"] = dials.pop("kl_coef", settings.kl_coef)
        metrics |= {f"dial/{name}": value for name, value in dials.items()}
        for role in made:
            if role in CRITICS.values():
                metrics |= summarise_critic(made[role].sums, role)
            metrics |= _mean(made[role].updates)
        counts, self._counts = with_means(self._counts), Counter()
        peaks, self._peaks = self._peaks, {}
        measured = {**counts, **peaks, **self._cores}
        return {**metrics, **measured, **snapshot.weights, **snapshot.evaluation}


def _mean(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each metric over the rows that have it."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: fmean(row[name] for row in rows if name in row) for name in names}

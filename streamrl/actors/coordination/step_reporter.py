"""Turns finished steps into reports, beside the stream and never in its way."""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean
from typing import Any

from streamrl.actors.actor_context import ActorReport
from streamrl.actors.coordination.driver_events import DriverEvents, StepReport
from streamrl.actors.transport.ray_calls import await_reply
from streamrl.algorithms import step_loss_denominator, summarise_policy
from streamrl.algorithms.math.step_metrics import SHARED_CRITIC_PREFIX, summarise_critic
from streamrl.config import RunConfig
from streamrl.dataflow import CRITIC, CRITIC_BY_COLUMN, POLICY, CallKind, ModelCall
from streamrl.errors import ActorLostError, DeadlineError
from streamrl.rewards.metric_means import sums_to_means
from streamrl.stream.protocols import StepResult
from streamrl.stream.step_metrics import StageActivity, StepFacts, compute_step_metrics
from streamrl.telemetry.cpu_usage import CoreMeter, read_machine_time, read_process_time
from streamrl.telemetry.metric_names import validate_row
from streamrl.telemetry.spans import Span


@dataclass(frozen=True)
class RoleActors:
    """The actors of one role and their names; `calls` are what all of them serve.

    Replicas may join and leave while the run goes on.
    """

    calls: Sequence[ModelCall]
    names: list[str]
    actors: list[Any]

    @property
    def role(self) -> str:
        """What they hold."""
        return self.calls[0].role

    @property
    def kind(self) -> CallKind:
        """What they do with it."""
        return self.calls[0].kind

    def add_replica(self, name: str, actor: Any) -> None:
        """One more."""
        self.names.append(name)
        self.actors.append(actor)

    def remove_replica(self, name: str) -> None:
        """One less, if it is there."""
        if name in self.names:
            place = self.names.index(name)
            del self.names[place], self.actors[place]


@dataclass(frozen=True)
class StepSnapshot:
    """What was read at the end of a step, before the next one changed it."""

    outcome: StepResult
    weights: Mapping[str, float]
    evaluation: Mapping[str, float]


DRAIN_EVERY_S = 0.2
"""Actors are asked what they did at most this often, s; quicker steps are reported together."""
DRAIN_TIMEOUT_S = 3.0
"""Longest that the report of a step waits for an actor, s: one that hangs must not hold it up."""
MAX_PENDING_SAMPLES = 200
"""Most scored texts that wait for their groups to be trained."""


class StepReporter:
    """Drains the actors after each step, computes the step's row and posts it."""

    def __init__(
        self, config: RunConfig, roles: Sequence[RoleActors], feed: DriverEvents, *, start_s: float
    ) -> None:
        self._config = config
        self._roles = roles
        self._driver_events = feed
        self._window_start = start_s
        self._spans: dict[str, list[Span]] = {role.role: [] for role in roles}
        self._samples: list[Mapping[str, Any]] = []
        self._counts: Counter[str] = Counter()
        self._memory_peaks: dict[str, float] = {}
        self._core_meters = {name: CoreMeter() for name in ("machine", "stages", "queue")}
        self._busy_cores: dict[str, float] = {}
        self._drained_at = 0.0
        self._snapshots: asyncio.Queue[StepSnapshot] = asyncio.Queue()

    def begin_step(self, start_s: float) -> None:
        """Count what comes from `start_s` on, epoch seconds, to the next step."""
        self._window_start = start_s

    def add_step(self, snapshot: StepSnapshot) -> None:
        """A step has ended; its report follows in its own time."""
        self._snapshots.put_nowait(snapshot)

    async def report_steps(self) -> None:
        """Report every noted step, without end."""
        clock = asyncio.get_running_loop().time
        while True:
            snapshots = [await self._snapshots.get()]
            await asyncio.sleep(max(0.0, self._drained_at + DRAIN_EVERY_S - clock()))
            self._drained_at = clock()
            while not self._snapshots.empty():
                snapshots.append(self._snapshots.get_nowait())
            reports = await self._drain_actors()
            self._measure_cores(reports, shards_s=snapshots[-1].outcome.queue_stats.cpu_s)
            spans = self._record_reports(reports)
            for snapshot in snapshots:
                self._post_step(snapshot, spans)
                self._snapshots.task_done()
                spans = []

    async def wait_until_idle(self) -> None:
        """Wait until every noted step is reported; for ever if `run` has failed."""
        await self._snapshots.join()

    async def finish_reporting(self, running: "asyncio.Task[None]") -> None:
        """Wait until every noted step is reported by `running`, the task of `run`; end it."""
        joined = asyncio.create_task(self.wait_until_idle())
        await asyncio.wait({joined, running}, return_when=asyncio.FIRST_COMPLETED)
        if not joined.done():
            running.result()
        running.cancel()

    def _post_step(self, snapshot: StepSnapshot, spans: Sequence[Span]) -> None:
        outcome = snapshot.outcome
        # A wall clock may be set back; the step's length is then next to nothing, not negative.
        end_s = max(outcome.ended_at, self._window_start + 1e-3)
        row = compute_step_metrics(
            StepFacts(
                version=outcome.version,
                groups=outcome.groups,
                metric_sums=next(
                    made.metric_sums
                    for made in outcome.results_by_role.values()
                    if made.metric_sums
                ),
                metrics=self._compute_metrics(snapshot),
                queue_stats=outcome.queue_stats,
                ledger_counts=outcome.ledger_counts,
                activity=self._collect_activity(),
                start_s=self._window_start,
                end_s=end_s,
                max_staleness=self._config.pipeline.max_staleness,
                filter_tally=outcome.filter_tally,
            )
        )
        validate_row(row)
        self._window_start = end_s
        samples = self._pop_samples(outcome)
        self._driver_events.post_report(StepReport(outcome.version + 1, row, spans, samples))

    def _pop_samples(self, outcome: StepResult) -> list[Mapping[str, Any]]:
        """The samples of the step's groups. Those of groups that were dropped age out."""
        trained = {group.uid for group in outcome.groups}
        found = [sample for sample in self._samples if sample["uid"] in trained]
        others = [sample for sample in self._samples if sample["uid"] not in trained]
        self._samples = others[-MAX_PENDING_SAMPLES:]
        return found

    async def _drain_actors(self) -> dict[str, list[ActorReport]]:
        """What every actor did since the last step, by role."""
        asked = {
            role.role: [
                asyncio.ensure_future(self._drain_actor(name, actor))
                for name, actor in zip(role.names, role.actors, strict=True)
            ]
            for role in self._roles
        }
        return {role: list(await asyncio.gather(*replies)) for role, replies in asked.items()}

    @staticmethod
    async def _drain_actor(name: str, actor: Any) -> ActorReport:
        """What one actor did. What a dead one did is lost; others see to it."""
        try:
            report = await await_reply(
                actor.collect_report.remote(), f"{name}.drain", DRAIN_TIMEOUT_S
            )
        except (ActorLostError, DeadlineError):
            return ActorReport(name, (), process_time={})
        assert isinstance(report, ActorReport)
        return report

    def _measure_cores(
        self, reports: Mapping[str, Sequence[ActorReport]], *, shards_s: float
    ) -> None:
        """The cores that were kept busy since the last drain, by whom."""
        times: dict[str, dict[str, float]] = {
            "machine": read_machine_time(),
            "stages": {},
            "queue": {**read_process_time(), "shards": shards_s},
        }
        for part in chain.from_iterable(reports.values()):
            times["stages"] |= part.process_time
        now = asyncio.get_running_loop().time()
        for name, meter in self._core_meters.items():
            self._busy_cores[f"cpu/{name}"] = meter.measure_cores(times[name], now)

    def _record_reports(self, reports: Mapping[str, Sequence[ActorReport]]) -> list[Span]:
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
                self._memory_peaks[name] = max(self._memory_peaks.get(name, 0.0), peak_mb)
        return [span for part in parts for span in part.spans if not span.is_open]

    def _collect_activity(self) -> dict[str, StageActivity]:
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
                activity[stage] = StageActivity(role.kind.value, role.role, len(role.actors), own)
        return activity

    def _compute_metrics(self, snapshot: StepSnapshot) -> dict[str, float]:
        made, settings = snapshot.outcome.results_by_role, self._config.algorithm_settings
        sums = made[POLICY].metric_sums
        metrics = summarise_policy(sums, step_loss_denominator(settings, sums))
        shared = {
            name.removeprefix(SHARED_CRITIC_PREFIX): value
            for name, value in sums.items()
            if name.startswith(SHARED_CRITIC_PREFIX)
        }
        if shared:
            metrics |= summarise_critic(shared, CRITIC)
        dials = dict(snapshot.outcome.adaptive_params)
        metrics["policy/kl_coef"] = dials.pop("kl_coef", settings.kl_coef)
        metrics |= {f"dial/{name}": value for name, value in dials.items()}
        for role in made:
            if role in CRITIC_BY_COLUMN.values():
                metrics |= summarise_critic(made[role].metric_sums, role)
            metrics |= _average_metrics(made[role].update_metrics)
        counts, self._counts = sums_to_means(self._counts), Counter()
        peaks, self._memory_peaks = self._memory_peaks, {}
        measured = {**counts, **peaks, **self._busy_cores}
        return {**metrics, **measured, **snapshot.weights, **snapshot.evaluation}


def _average_metrics(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each metric over the rows that have it."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: fmean(row[name] for row in rows if name in row) for name in names}

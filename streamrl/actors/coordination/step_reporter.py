"""Step reporter: turns finished training steps into reports, concurrently with the stream."""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from streamrl.actors.actor_context import ActorReport
from streamrl.actors.coordination.driver_events import DriverEvents, RolloutReport, StepReport
from streamrl.actors.coordination.role_actors import RoleActors
from streamrl.actors.transport.ray_calls import call_actor
from streamrl.algorithms import summarize_policy
from streamrl.algorithms.math.training_metrics import SHARED_CRITIC_PREFIX, summarize_critic
from streamrl.config.run_config import RunConfig
from streamrl.dataflow import CRITIC, CRITIC_BY_COLUMN, POLICY
from streamrl.errors import ActorLostError, DeadlineError
from streamrl.rewards.metric_means import sums_to_means
from streamrl.stream.protocols import StepResult
from streamrl.stream.step_metrics import (
    StageActivity,
    StepFacts,
    average_metrics,
    compute_step_metrics,
)
from streamrl.telemetry.rollout_log import RecordedGroup
from streamrl.telemetry.spans import Span

FinishedStep = tuple[StepResult, Mapping[str, float]]
DRAIN_EVERY_S = 0.2
"""Minimum interval between two drains of the actors; faster steps share a drain."""
DRAIN_TIMEOUT_S = 3.0
"""Longest time by which a slow actor delays the metrics row of a step."""
LAST_DRAIN_TIMEOUT_S = 10.0
"""Longest wait for a slow actor's rollouts before a checkpoint and at the end of the run."""
MAX_PENDING_STEPS = 4
"""Training steps whose number of recorded groups is kept until the groups are trained."""


class StepReporter:
    """Collects the activity of all actors after each step and posts the metrics row of the step."""

    def __init__(
        self, config: RunConfig, roles: Sequence[RoleActors], events: DriverEvents
    ) -> None:
        self._config = config
        self._roles = roles
        self._driver_events = events
        self._window_start = 0.0
        self._spans: dict[str, list[Span]] = {role.role: [] for role in roles}
        self._recorded: dict[str, RecordedGroup] = {}
        self._advantages: dict[str, dict[int, float]] = {}
        #: Calls of actors that did not answer a drain in time, by name; a later drain takes them.
        self._open_calls: dict[str, asyncio.Task[ActorReport]] = {}
        #: Uids of trained steps whose rollouts are not posted yet, since a call is open.
        self._unposted: dict[int, list[str]] = {}
        self._counts: Counter[str] = Counter()
        self._memory_peaks: dict[str, float] = {}
        pipeline = config.pipeline
        self._max_pending = (MAX_PENDING_STEPS + pipeline.max_staleness) * pipeline.groups_per_step
        self._drained_at = 0.0
        self._steps: asyncio.Queue[FinishedStep] = asyncio.Queue()

    def start(self) -> "asyncio.Task[None]":
        """Report the steps of `add_step` from now on; return the task, which ends only by an error.

        Every wait for reports raises that error.
        """
        self._reporting = asyncio.create_task(self._report_steps())
        return self._reporting

    def begin_step(self, start_s: float) -> None:
        """Set the time at which the next training step begins, in epoch seconds."""
        self._window_start = start_s

    def add_step(self, outcome: StepResult, metrics: Mapping[str, float]) -> None:
        """Queue a finished step. metrics: those of the coordinator, which the next step changes."""
        self._steps.put_nowait((outcome, metrics))

    async def _report_steps(self) -> None:
        """Report queued steps forever; steps that finish close together share a drain of actors."""
        clock = asyncio.get_running_loop().time
        while True:
            steps = [await self._steps.get()]
            await asyncio.sleep(max(0.0, self._drained_at + DRAIN_EVERY_S - clock()))
            self._drained_at = clock()
            while not self._steps.empty():
                steps.append(self._steps.get_nowait())
            spans = self._record_reports(await self._drain_actors())
            for step in steps:
                self._post_step(*step, spans)
                self._post_rollouts()
                self._steps.task_done()
                spans = []

    async def wait_until_idle(self) -> None:
        """Wait until every queued step is reported, with the rollouts of slow actors."""
        joining = asyncio.create_task(self._steps.join())
        await asyncio.wait({joining, self._reporting}, return_when=asyncio.FIRST_COMPLETED)
        if not joining.done():
            joining.cancel()
            self._reporting.result()
        if self._open_calls:
            await asyncio.wait(self._open_calls.values(), timeout=LAST_DRAIN_TIMEOUT_S)
            self._record_reports(await self._drain_actors())
        self._post_rollouts(is_last=True)

    async def finish_reporting(self) -> None:
        """Wait until all queued steps are reported, then stop reporting."""
        await self.wait_until_idle()
        self._reporting.cancel()
        for call in self._open_calls.values():
            call.cancel()

    def _post_step(
        self, outcome: StepResult, metrics: Mapping[str, float], spans: Sequence[Span]
    ) -> None:
        """Compute the metrics row of a step and send it to the driver, with spans for the trace."""
        # If the wall clock is set back, the step's length is tiny instead of negative.
        end_s = max(outcome.ended_at, self._window_start + 1e-3)
        row = compute_step_metrics(
            StepFacts(
                outcome,
                metric_sums=next(
                    result.metric_sums
                    for result in outcome.results_by_role.values()
                    if result.metric_sums
                ),
                metrics={**self._compute_metrics(outcome), **metrics},
                activity=self._collect_activity(),
                start_s=self._window_start,
                end_s=end_s,
                max_staleness=self._config.pipeline.max_staleness,
            )
        )
        self._window_start = end_s
        self._driver_events.post_report(
            StepReport(outcome.version + 1, row, spans, outcome.is_repeated)
        )
        self._unposted[outcome.version + 1] = [group.uid for group in outcome.groups]

    def _post_rollouts(self, *, is_last: bool = False) -> None:
        """Send the recorded groups of each trained step to the driver, once no call is open.

        is_last: do not wait for open calls.
        """
        is_late = len(self._unposted) > MAX_PENDING_STEPS
        if self._open_calls and not is_late and not is_last:
            return
        for step, uids in self._unposted.items():
            if recorded := self._pop_recorded(step, uids):
                self._driver_events.post_report(RolloutReport(step, recorded))
        self._unposted = {}
        for pending in (self._recorded, self._advantages):
            for uid in list(pending)[: -self._max_pending]:
                del pending[uid]

    def _pop_recorded(self, step: int, uids: Sequence[str]) -> list[RecordedGroup]:
        """Remove and return the recorded groups among the `uids` of a step, with their advantages.

        Others stay until they are trained, or until newer ones displace them.
        """
        groups = []
        for uid in uids:
            advantages = self._advantages.pop(uid, {})
            if group := self._recorded.pop(uid, None):
                rollouts = tuple(
                    msgspec.structs.replace(rollout, advantage=advantages.get(rollout.row))
                    for rollout in group.rollouts
                )
                groups.append(msgspec.structs.replace(group, step=step, rollouts=rollouts))
        return groups

    async def _drain_actors(self) -> dict[str, list[ActorReport]]:
        """Collect by role what each actor did since its last report."""
        tasks = {
            role.role: [
                asyncio.ensure_future(self._drain_actor(name, actor))
                for name, actor in zip(role.names, role.actors, strict=True)
            ]
            for role in self._roles
        }
        names = {name for role in self._roles for name in role.names}
        for name in self._open_calls.keys() - names:  # a replica that has left
            self._open_calls.pop(name).cancel()
        return {role: list(await asyncio.gather(*role_tasks)) for role, role_tasks in tasks.items()}

    async def _drain_actor(self, name: str, actor: Any) -> ActorReport:
        """Collect the report of an actor; return an empty report if the actor is dead or slow.

        A slow actor's report is left to the next drain, since the actor forgets what it has
        reported.
        """
        call = self._open_calls.pop(name, None) or asyncio.ensure_future(
            call_actor(actor, name, "collect_report")
        )
        await asyncio.wait({call}, timeout=DRAIN_TIMEOUT_S)
        if not call.done():
            self._open_calls[name] = call
            return ActorReport(name, ())
        try:
            return call.result()
        except (ActorLostError, DeadlineError):
            return ActorReport(name, ())

    def _record_reports(self, reports: Mapping[str, Sequence[ActorReport]]) -> list[Span]:
        """Store the actors' spans, rollouts and counts; return the spans that have ended.

        An actor reports a span that is still open again at the next call, with a later end.
        """
        for role, reports_of_role in reports.items():
            ended = [span for span in self._spans[role] if not span.is_open]
            self._spans[role] = ended + [
                span for report in reports_of_role for span in report.spans
            ]
        all_reports = [report for role in reports.values() for report in role]
        for report in all_reports:
            self._recorded |= {group.uid: group for group in report.recorded}
            for uid, advantages in report.advantages.items():
                self._advantages.setdefault(uid, {}).update(advantages)
            self._counts.update(report.counts)
            for phase, peak_mb in report.peaks_mb.items():
                name = f"memory/{phase}_mb"
                self._memory_peaks[name] = max(self._memory_peaks.get(name, 0.0), peak_mb)
        return [span for report in all_reports for span in report.spans if not span.is_open]

    def _collect_activity(self) -> dict[str, StageActivity]:
        """Return the spans since the begin of the step, by stage; forget older spans.

        Spans that belong to no stage (a weight pull) count toward the first stage of the role.
        """
        activity = {}
        for role in self._roles:
            spans = [s for s in self._spans[role.role] if s.end_s > self._window_start]
            self._spans[role.role] = spans
            first, *others = [call.stage for call in role.calls]
            spans_by_stage: dict[str, list[Span]] = {call.stage: [] for call in role.calls}
            for span in spans:
                spans_by_stage[span.name if span.name in others else first].append(span)
            for call in role.calls:
                activity[call.stage] = StageActivity(
                    call.kind.value,
                    role.role,
                    len(role.actors),
                    spans_by_stage[call.stage],
                )
        return activity

    def _compute_metrics(self, outcome: StepResult) -> dict[str, float]:
        results, settings = outcome.results_by_role, self._config.algorithm_settings
        sums = results[POLICY].metric_sums
        metrics = summarize_policy(sums, settings.compute_loss_denominator(sums))
        shared_critic_sums = {
            name.removeprefix(SHARED_CRITIC_PREFIX): value
            for name, value in sums.items()
            if name.startswith(SHARED_CRITIC_PREFIX)
        }
        if shared_critic_sums:
            metrics |= summarize_critic(shared_critic_sums, CRITIC)
        adaptive_params = dict(outcome.adaptive_params)
        metrics["policy/kl_coef"] = adaptive_params.pop("kl_coef", settings.kl_coef)
        metrics |= {f"dial/{name}": value for name, value in adaptive_params.items()}
        for role in results:
            if role in CRITIC_BY_COLUMN.values():
                metrics |= summarize_critic(results[role].metric_sums, role)
            metrics |= average_metrics(results[role].update_metrics)
        counts, self._counts = sums_to_means(self._counts), Counter()
        peaks, self._memory_peaks = self._memory_peaks, {}
        return {**metrics, **counts, **peaks}

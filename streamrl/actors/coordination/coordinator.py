"""Coordinator actor: admits prompts, closes training steps, tracks versions, writes checkpoints.

The coordinator handles metadata only, never tensors of models. Where the data gives completions, it
commits these rows to the queue.
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from operator import methodcaller
from pathlib import Path
from typing import Any

from streamrl.actors.actor_context import (
    TRAINER_PHASE,
    ActorContext,
    make_arbiter,
    make_lease,
    shares_slots,
)
from streamrl.actors.coordination.driver_events import (
    DriverEvents,
    DriverReport,
    OutageReporter,
    StepReport,
)
from streamrl.actors.coordination.evaluator import RunEvaluator
from streamrl.actors.coordination.role_actors import RoleActors, describe_waits, find_outages
from streamrl.actors.coordination.run_persistence import RunPersistence
from streamrl.actors.coordination.step_reporter import StepReporter
from streamrl.actors.coordination.trainer_group import TrainerGroup
from streamrl.actors.liveness import PingableActor
from streamrl.actors.rank_calls import get_publish_timeout_s, lead_scoring
from streamrl.actors.transport.ray_calls import CALL_TIMEOUT_S
from streamrl.algorithms.adaptive_params import AdaptiveParams
from streamrl.buffer import AdmissionController, ExperienceQueue, RunLog, StepAssembler
from streamrl.buffer.shard import OverdueLease
from streamrl.buffer.staleness_credits import OversamplingController
from streamrl.data.pass_rates import PassRates
from streamrl.data.prompt_stream import PromptStream
from streamrl.dataflow import EMA_REFERENCE, GENERATE_CALL, POLICY, CallKind
from streamrl.engines.trainer_config import SAVE_TIMEOUT_S
from streamrl.errors import (
    ConfigError,
    DataError,
    DropLimitError,
    FilterLimitError,
    NoSpaceError,
    ServiceOutageError,
    StreamError,
)
from streamrl.messages import Columns, Experience, GroupOutcome, Prompt, make_target_columns
from streamrl.pipeline import admit_prompts, score_groups, train_policy, watch_stalls
from streamrl.run_dir.checkpoint import Checkpoint
from streamrl.run_dir.crash_stacks import record_crash_stacks
from streamrl.stream.device_lease import DedicatedDeviceLease, ProgressClock
from streamrl.stream.evaluation.metrics import EvaluationResult
from streamrl.stream.protocols import StageContext, StepResult
from streamrl.stream.run_state import SURPLUS_CAUSE, RunState
from streamrl.stream.stage_worker import ConcurrencyLimit, InFlightWork
from streamrl.stream.weight_publisher import PublishFunction, WeightPublisher, is_publish_due
from streamrl.telemetry.alerts import lacks_scores
from streamrl.telemetry.metric_names import CHECKPOINT_TIME, EVALUATE_TIME, WAIT_METRICS
from streamrl.telemetry.progress import WorkStatus
from streamrl.weights import WeightManifest
from streamrl.weights.versions import (
    LOAD_REFUSED,
    FollowerState,
    WeightFault,
    WeightRegistry,
    compute_weight_metrics,
)

REFUSALS_PER_RESEND = 2
"""Refused loads of a version after which it is sent again: its stored copy may be damaged."""


@dataclass(frozen=True)
class RunResult:
    """Result of a run.

    version: last trained version.
    is_interrupted: the run was stopped before its last step.
    checkpoint: path of the last checkpoint; empty without one.
    """

    version: int
    is_interrupted: bool
    checkpoint: str


class CoordinatorActor(PingableActor):
    """Actor that admits prompts, drives training, and offers new versions to followers."""

    def __init__(self) -> None:
        self._driver_events = DriverEvents()

    async def start(
        self,
        context: ActorContext,
        roles: Sequence[RoleActors],
        prompts: PromptStream,
        eval_prompts: Mapping[str, Sequence[Prompt]],
        checkpoint: Checkpoint | None,
    ) -> None:
        """Prepare a run: open the run log, make the run state, and publish the initial version.

        After a resume from `checkpoint`, also reconciles the groups in the queue with the run log.
        """
        config = self._config = context.config
        self._prompts, self._eval_prompts = prompts, eval_prompts
        state = checkpoint.state if checkpoint else None
        record_crash_stacks(context.run_dir, "coordinator")
        version = 0 if state is None else int(state["version"])
        self._persistence = RunPersistence(config, context.run_dir, context.shards, state)
        run_log = await self._persistence.open_run_log(self._prompts)
        self._adaptive_params = AdaptiveParams(config.algorithm.spec, config.algorithm_settings)
        self._adaptive_params.load_state_dict(state["dials"] if state else {})
        self._progress_clock = ProgressClock()
        self._arbiter = make_arbiter(config, self._progress_clock)
        self._lease = make_lease(config, self._arbiter, TRAINER_PHASE, TRAINER_PHASE)
        self._driver_events.post_event("note", text=context.transport.reason)
        self._trainers = {
            role.role: TrainerGroup(role, config, context.model_bytes[role.role])
            for role in roles
            if role.kind is CallKind.TRAIN
        }
        self._publish_timeout_s = get_publish_timeout_s(config, context.model_bytes)
        self._run_state = self._make_run_state(run_log, version)
        self._queue = ExperienceQueue(context.shards, "coordinator")
        self._role_actors = {role.role: role for role in roles}
        self._evaluator = RunEvaluator(config, self._role_actors)
        evaluation, reads_rows = config.evaluation, config.reads_rows
        is_gated = evaluation.coverage is not None and version == 0 and not reads_rows
        # Before the stream draws from them.
        self._sampled_prompts = copy(prompts).draw_prompts(evaluation.coverage_prompts * is_gated)
        self._checkpoint = str(checkpoint.path) if checkpoint else ""
        self._saved_version = version
        # Seconds for which training waited since the previous step ended, by metric.
        self._waits_s = dict.fromkeys(WAIT_METRICS, math.nan)
        if run_log.steps_to_replay:
            replayed = f"{min(run_log.steps_to_replay)} to {max(run_log.steps_to_replay)}"
            text = f"steps {replayed} came after the checkpoint; they are replayed as they were"
            self._driver_events.post_event("note", text=text)
        await self._run_state.reconcile_queue(self._queue)
        await self._run_state.publisher.begin_publish(version, first=True)
        await self._run_state.publisher.wait_until_published()

    def _make_run_state(self, run_log: RunLog, version: int) -> RunState:
        config, pipeline = self._config, self._config.pipeline
        per_step = pipeline.groups_per_step
        sources: dict[str, PublishFunction] = {
            role: trainer.publish_weights
            for role, trainer in self._trainers.items()
            if role in config.dataflow.followed_roles
        }
        if config.reference.every:
            sources[EMA_REFERENCE] = self._trainers[POLICY].publish_reference
        registries = {role: self._make_registry(role) for role in sources}
        publisher = WeightPublisher(
            sources,
            registries,
            due=self._should_publish,
            # A generator in the trainers' processes is paused until it has loaded the version.
            lease=None if config.placement.is_hybrid else self._lease,
            on_fault=lambda role, fault: self._post_fault("publish_failed", role, fault),
        )
        oversampling = OversamplingController(
            config.filter.oversample_factor, groups_per_step=per_step
        )
        admission = AdmissionController(
            run_log.ledger,
            depth=pipeline.max_steps_ahead,
            groups_per_step=per_step,
            capacity_groups=config.capacity_groups,
            total_groups=config.run.steps * per_step,
            version=version,
            oversampling=oversampling,
        )
        assembler = StepAssembler(
            max_staleness=pipeline.max_staleness,
            groups_per_step=per_step,
            drops_stale=pipeline.on_stale == "drop",
            oversampling=oversampling,
        )
        return RunState(
            admission,
            assembler,
            run_log,
            publisher,
            self._adaptive_params,
            self._prompts,
            pass_rates=self._prompts.pass_rates,
            replays=self._prompts.replays,
            max_attempts=config.queue.max_attempts,
            should_readmit_failed=config.queue.on_failed_group == "readmit",
            max_filtered=config.filter.max_filter_rounds * per_step,
            max_dropped=config.queue.max_drop_rounds * per_step,
            on_group_finished=self._post_finished,
            on_stall=self._post_stall,
            describe_waits=lambda: describe_waits([*self._role_actors.values()]),
            find_outages=lambda: find_outages([*self._role_actors.values()]),
            on_outages=OutageReporter(self._driver_events).report_outages,
            progress_clock=self._progress_clock,
        )

    def _make_registry(self, role: str) -> WeightRegistry:
        """Make the registry of a model's versions, which resends a version after refused loads."""
        refusals: Counter[int] = Counter()

        def handle_fault(kind: str, follower: str, fault: WeightFault) -> None:
            self._post_fault(kind, follower, fault)
            if kind == LOAD_REFUSED:
                refusals[fault.version] += 1
                if refusals[fault.version] % REFUSALS_PER_RESEND == 0:
                    self._run_state.publisher.resend_version(role, fault.version)

        return WeightRegistry(
            keep_versions=self._config.weights.keep_versions, on_fault=handle_fault
        )

    def _post_fault(self, kind: str, actor: str, fault: WeightFault) -> None:
        """Report a failed publish or load of weights to the driver as an event."""
        version, reason = fault.version, fault.reason
        self._driver_events.post_event(kind, actor=actor, version=version, reason=reason)

    def _should_publish(self, role: str, version: int) -> bool:
        """Return whether a role's version must be published to its followers.

        True at the configured interval, for the last version, and for an evaluation.
        """
        config, steps = self._config, self._config.run.steps
        is_evaluated = bool(self._eval_prompts) and config.evaluation.is_due(
            version, num_steps=steps
        )
        every, is_required = config.weights.publish_every, version == steps or is_evaluated
        return is_publish_due(
            role, version, every=every, reference=config.reference, forced=is_required
        )

    async def run(self) -> RunResult:
        """Train until the last step or a stop request, save a checkpoint, and check the ledger."""
        run_state, config = self._run_state, self._config
        self._step_reporter = StepReporter(
            config, [*self._role_actors.values()], self._driver_events
        )
        reporting = self._step_reporter.start()
        try:
            await self._run_stream(reporting)
        except (FilterLimitError, DropLimitError, DataError, ServiceOutageError):
            await self._save_after_failure()
            raise
        await self._step_reporter.finish_reporting()
        interrupted = not run_state.admission.is_finished
        if run_state.has_partial_update:
            text = (
                "stopped in the middle of a training step; no checkpoint was written: a resume"
                f" continues from {self._last_checkpoint_name}"
            )
            self._driver_events.post_event("note", text=text)
        elif interrupted or config.checkpoint.at_end:
            await self._save_checkpoint()
        uids = (await self._queue.get_stats()).uids
        await self._persistence.close()
        run_state.admission.ledger.check_balance(uids, inserted=run_state.inserted_uids)
        return RunResult(run_state.admission.version, interrupted, self._checkpoint)

    async def format_ledger(self) -> str:
        """Return the counts of groups by outcome at this moment as text, for the summary."""
        return str(self._run_state.admission.ledger.counts)

    async def _run_stream(self, reporting: "asyncio.Task[None]") -> None:
        """Run admission, training and stall watch concurrently until training ends.

        reporting: task that reports finished steps. The first error in this task or in any of the
        loops is raised and ends the run.
        """
        training = asyncio.create_task(self._run_training())
        admitting = asyncio.create_task(admit_prompts(self._run_state, self._queue))
        watching = asyncio.create_task(
            watch_stalls(self._run_state, self._queue, self._config.pipeline)
        )
        scoring = [asyncio.create_task(loop) for loop in self._make_scoring_loops()]
        tasks = {training, admitting, reporting, watching, *scoring}
        while not training.done():
            done, _ = await asyncio.wait(
                {task for task in tasks if task not in (admitting, watching) or not task.done()},
                return_when=asyncio.FIRST_COMPLETED,
            )
            for task in done:
                task.result()
        training.result()
        self._run_state.request_stop()
        # Admission may be waiting for capacity that no consumer frees any more.
        for task in (watching, admitting, *scoring):
            task.cancel()
        await asyncio.wait([watching, admitting, *scoring])

    def _make_scoring_loops(self) -> list[Coroutine[Any, Any, None]]:
        """Return the loop of each stage whose groups the ranks of a trained model score.

        On slots of its own a model scores while other trained models wait for theirs. Rows of the
        data are made rollouts here: that takes no model.
        """

        async def read_rows(experiences: Sequence[Experience]) -> list[Columns]:
            pairs = ((e.prompt, e.admitted_version) for e in experiences)
            return [make_target_columns(prompt, version) for prompt, version in pairs if prompt]

        limit = self._config.capacity_groups
        readers = [
            score_groups(
                StageContext(
                    call.stage,
                    ExperienceQueue(self._queue.shards, call.stage),
                    DedicatedDeviceLease(),
                ),
                read_rows,
                (),
                InFlightWork(ConcurrencyLimit(limit)),
                limit,
            )
            for call in self._config.dataflow.select_calls(CallKind.READ)
        ]
        return readers + [
            lead_scoring(
                StageContext(
                    call.stage,
                    ExperienceQueue(self._queue.shards, trainer.role),
                    self._lease
                    if shares_slots(self._config, trainer.role)
                    else DedicatedDeviceLease(),
                ),
                trainer.score_groups,
                trainer.dp_size,
            )
            for trainer in self._trainers.values()
            for call in trainer.hosted_calls
        ]

    async def _run_training(self) -> None:
        """Train all steps of the run.

        A new run first evaluates the initial version, while generators already sample the first
        step.
        """
        if self._run_state.admission.version == 0:
            await self._check_coverage()
            if row := await self._evaluate_if_due():
                self._driver_events.post_report(StepReport(0, row))
        self._step_reporter.begin_step(time.time())
        step = self._run_state.admission.version + 1
        self._driver_events.post_report(WorkStatus(f"working on step {step}"))
        stage = StageContext("train", self._queue, self._lease)
        await train_policy(
            stage, self._run_state, self._trainers, self._config.pipeline, report=self._finish_step
        )

    async def _finish_step(self, outcome: StepResult) -> None:
        """Finish a trained step: evaluate if due, queue its report, save a checkpoint if due.

        After the last repeated step, waits until the driver has compared all of them with their
        recorded rows: no new step may build on a wrong one.
        """
        admission = self._run_state.admission
        waits_s, self._waits_s = self._waits_s, dict.fromkeys(WAIT_METRICS, math.nan)
        started_s = time.monotonic()
        if evaluation := await self._evaluate_if_due():
            self._waits_s[EVALUATE_TIME] = time.monotonic() - started_s
        registries = self._run_state.publisher.registries
        sync_stats = {role: registry.drain_stats() for role, registry in registries.items()}
        # Nobody follows a policy that is trained on rows of the data.
        policy = sync_stats.pop(POLICY, None)
        weights = compute_weight_metrics(policy, [*sync_stats.values()]) if policy else {}
        row = {**weights, "weights/version": admission.version, **waits_s}
        skipped = self._prompts.take_skipped()
        for problem in skipped.problems:
            self._driver_events.post_event("bad_row", reason=problem)
        row |= skipped.metrics
        row |= (self._prompts.pass_rates or PassRates()).metrics
        self._step_reporter.add_step(outcome, {**row, **evaluation})
        if outcome.is_repeated and not self._run_state.run_log.steps_to_replay:
            await self._wait_until_reported()
        if self._persistence.is_due(admission.version, outcome.queue_stats.journal_bytes):
            started_s = time.monotonic()
            await self._save_checkpoint(goes_on=True)
            self._waits_s[CHECKPOINT_TIME] = time.monotonic() - started_s

    def _post_finished(self, uid: str, outcome: GroupOutcome) -> None:
        """Report a dropped group, but no filtered or surplus one."""
        if not outcome.filtered and outcome.cause != SURPLUS_CAUSE:
            cause, reason = outcome.cause, outcome.reason
            self._driver_events.post_event("drop", uid=uid, cause=cause, reason=reason)

    def _post_stall(self, overdue: Sequence[OverdueLease], waits: str) -> None:
        """Report a stall per stage and actor that holds overdue leases.

        waits: what open episodes wait for, for the events of their stage; "" if for nothing.
        """
        by_holder: dict[tuple[str, str], list[OverdueLease]] = {}
        for stall in overdue:
            by_holder.setdefault((stall.lease.stage, stall.lease.holder), []).append(stall)
        for (stage, holder), stalls in by_holder.items():
            waiting = {"waits": waits} if waits and stage == GENERATE_CALL.stage else {}
            self._driver_events.post_event(
                "stall",
                stage=stage,
                holder=holder,
                groups=len(stalls),
                age_s=round(max(stall.age_s for stall in stalls), 1),
                uids=" ".join(stall.uid for stall in stalls[:8]),
                action=self._config.pipeline.on_stall,
                **waiting,
            )

    async def _evaluate_if_due(self) -> dict[str, float]:
        """Score the evaluation prompts with the current weights; return the metrics.

        Evaluation rollouts do not enter the queue. Returns {} if no evaluation is due or a stop
        request interrupts the evaluation.
        """
        version, steps = self._run_state.admission.version, self._config.run.steps
        if not self._eval_prompts or not self._config.evaluation.is_due(version, num_steps=steps):
            return {}
        text = f"evaluating version {version}"
        result = await self._run_evaluation(self._evaluator, self._eval_prompts, text)
        if result is None:
            return {}
        row = result.to_metrics()
        if not lacks_scores(row):
            self._persistence.last_evaluation = (version, result.mean_at_k)
        if result.unscored_reason:
            self._driver_events.post_event(
                "unscored",
                version=version,
                prompts=result.num_unscored,
                samples=result.num_unscored_samples,
                reason=result.unscored_reason,
            )
        return row

    async def _run_evaluation(
        self, evaluator: RunEvaluator, prompts: Mapping[str, Sequence[Prompt]], text: str
    ) -> EvaluationResult | None:
        """Sample and score prompts with the current weights; None if a stop request interrupts."""
        # Raises here if publishing failed; generators would wait in vain for the version.
        await self._run_state.publisher.wait_until_published()
        status = WorkStatus(text, sum(map(len, prompts.values())), "prompts")
        version = self._run_state.admission.version
        evaluation = asyncio.create_task(evaluator.run_evaluation(prompts, version, status.advance))
        stopping = asyncio.create_task(self._run_state.stop_requested.wait())
        with self._driver_events.report_status(status):
            await asyncio.wait({evaluation, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if evaluation.done():
            return evaluation.result()
        evaluation.cancel()
        return None

    async def _check_coverage(self) -> None:
        """Measure pass@k of the initial policy. Raises ConfigError below evaluation.coverage."""
        config, evaluation = self._config, self._config.evaluation
        if evaluation.coverage is None or not self._sampled_prompts:
            return
        samples = replace(evaluation, samples=config.algorithm.group_size)
        evaluator = RunEvaluator(
            replace(config, evaluation=samples), self._role_actors, config.generator.sampling
        )
        prompts = {"train": self._sampled_prompts}
        result = await self._run_evaluation(evaluator, prompts, "measuring pass@k of the base")
        if result is None:
            return
        found = (
            f"pass@{result.samples} of the initial policy is {result.pass_at_k:.3f} on"
            f" {result.num_prompts} training prompts"
        )
        if not result.pass_at_k >= evaluation.coverage:
            raise ConfigError(
                f"evaluation.coverage={evaluation.coverage:g}: {found}: RL has nothing to climb"
                " where no rollout is right. What helps: a warm start on demonstrations"
                " (algorithm.name=sft), easier prompts (data.curriculum), a reward with partial"
                " credit, or a larger algorithm.group_size; null trains all the same"
            )
        self._driver_events.post_event("note", text=found)

    @property
    def _last_checkpoint_name(self) -> str:
        """Folder name of the last checkpoint, for messages."""
        return Path(self._checkpoint).name if self._checkpoint else "the beginning"

    async def _save_checkpoint(self, *, goes_on: bool = False) -> None:
        """Write a checkpoint of the current version, unless one exists.

        goes_on: the run continues afterwards, so a full disk is reported as an event; otherwise
        raises NoSpaceError.
        """
        version = self._run_state.admission.version
        if self._checkpoint and version == self._saved_version:
            return
        status = WorkStatus(f"writing checkpoint {version}", timeout_s=SAVE_TIMEOUT_S)
        # The saved weights must equal the published ones.
        await self._run_state.publisher.wait_until_published()
        try:
            with self._driver_events.report_status(status):
                path = await self._persistence.save_checkpoint(
                    self._run_state, list(self._trainers.values()), self._wait_until_reported
                )
        except NoSpaceError as error:
            if not goes_on:
                raise
            text = (
                f"{error}; kept: {self._last_checkpoint_name}; the run goes on"
                " and tries again later"
            )
            self._driver_events.post_event("no_space", version=version, text=text)
            return
        if path is not None:
            self._checkpoint, self._saved_version = str(path), version
            self._driver_events.post_event("checkpoint", version=version, path=self._checkpoint)

    async def _save_after_failure(self) -> None:
        """Save the last version of a failed run if possible; deliver all reports to the driver."""
        try:
            if (
                self._run_state.admission.version > self._saved_version
                and not self._run_state.has_partial_update
            ):
                await self._save_checkpoint()
            await self._wait_until_reported()
        except StreamError as error:
            text = f"no checkpoint of the last version was written: {error}"
            self._driver_events.post_event("note", text=text)

    async def _wait_until_reported(self) -> None:
        """Wait until the driver has the metrics row of every step.

        A resume continues after the checkpoint, so no later run reports these steps.
        """
        await self._step_reporter.wait_until_idle()
        await self._driver_events.wait_until_delivered(CALL_TIMEOUT_S)

    async def release_actor(self, name: str, *, died: bool) -> None:
        """Requeue the groups of an actor that died or left, and forget the versions it loaded.

        Ray restarts an actor that died, which then joins under the same name.
        """
        self._arbiter.remove_holder(name)
        for registry in self._run_state.publisher.registries.values():
            registry.remove_follower(name)
        await self._queue.release_holder(name, died=died)

    async def add_replica(self, role: str, name: str, actor: Any) -> None:
        """Include a replica that joined the run in evaluations and step reports."""
        self._role_actors[role].add_replica(name, actor)

    async def start_replica_drain(self, role: str, name: str) -> None:
        """Exclude a replica that is leaving the run from evaluations and step reports."""
        self._role_actors[role].remove_replica(name)

    async def request_stop(self) -> None:
        """Stop the run after the current micro-batch, or after the step if an update has begun."""
        self._run_state.request_stop()
        if (publisher := self._run_state.publisher).is_publishing:
            status = WorkStatus("publishing weights", timeout_s=self._publish_timeout_s)
            with self._driver_events.report_status(status):
                await publisher.wait_until_published()

    async def read_reports(self, after: int, wait_s: float) -> list[DriverReport]:
        """Return the reports after the first `after` ones; see `DriverEvents.read_after`."""
        return await self._driver_events.read_after(after, wait_s)

    async def wait_for_manifest(
        self, role: str, follower: str, state: FollowerState, wait_s: float
    ) -> WeightManifest | None:
        """Return a role's newest manifest, once newer than the follower's; None after `wait_s`."""
        return await self._run_state.publisher.registries[role].wait_for_newer(
            follower, state, wait_s=wait_s
        )

    async def call_arbiter(self, method: str, *arguments: str) -> Any:
        """Call a method of the device arbiter by name, for a RemoteArbiter."""
        result = methodcaller(method, *arguments)(self._arbiter)
        return await result if asyncio.iscoroutine(result) else result

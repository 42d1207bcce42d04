"""Run one training step: collect its groups, train them as they arrive, log it, publish."""

import asyncio
import math
import sys
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, nullcontext
from dataclasses import dataclass
from types import TracebackType

from streamrl.buffer.micro_batch_schedule import ScheduledRound, StepScheduler
from streamrl.buffer.run_log import TrainedStep
from streamrl.dataflow import POLICY
from streamrl.errors import DeadlineError
from streamrl.messages import GroupInfo, GroupOutcome
from streamrl.stream.protocols import (
    DeviceLease,
    StageContext,
    StepControl,
    StepResult,
    TrainerProtocol,
    TrainStepResult,
)
from streamrl.stream.run_state import PipelineConfig, RunState
from streamrl.stream.stage_worker import POLL_WAIT_S

SHOWN_GROUPS = 3
"""Missing groups that the error of a stall describes."""


class GroupCollector:
    """Feeds ready groups to the step assembler until the current training step is complete.

    Runs beside training: the trainers may be busy, or wait for their devices, for long. Filtered
    groups are logged at once, so that replacements are sampled, also after this step is complete,
    for later steps. On exit, groups that did not enter the step stay in the queue or the assembler.
    """

    def __init__(self, stage: StageContext, run_state: RunState, config: PipelineConfig) -> None:
        self._stage, self._run_state, self._config = stage, run_state, config
        self._loop = asyncio.get_running_loop()
        self._has_new_groups = False
        """True if groups arrived since the last `wait_for_groups`."""
        self._waiting_since = math.inf
        """Start of the current `wait_for_groups`, event loop time."""
        self._waiter: asyncio.Future[None] | None = None
        self._is_taking = self._is_closing = False

    async def __aenter__(self) -> "GroupCollector":
        await drop_late_groups(self._stage, self._run_state)
        self._task = asyncio.create_task(self._collect_groups())
        self._task.add_done_callback(lambda task: self._notify_waiter())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Let a log entry in progress finish, unless the training loop itself is cancelled.
        self._is_closing = True
        if self._is_taking or isinstance(error, asyncio.CancelledError):
            self._task.cancel()
        await asyncio.wait([self._task])
        if not self._task.cancelled() and (failure := self._task.exception()) and error is None:
            raise failure

    async def wait_for_groups(self) -> bool:
        """Wait until a group may enter the training step; return False if the run is stopping.

        Raises DeadlineError naming the missing groups and their holders after the time that
        `on_stall` allows. Raises FilterLimitError and DropLimitError like
        `RunState.check_step_limits`.
        """
        if not (self._has_new_groups or self._task.done() or self._num_drawable):
            self._waiting_since, self._waiter = self._loop.time(), self._loop.create_future()
            await self._waiter
            self._waiting_since = math.inf
        self._has_new_groups = False
        if self._task.done():
            self._task.result()
        return not self._run_state.stop_requested.is_set()

    def _notify_waiter(self) -> None:
        self._has_new_groups = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    @property
    def _num_drawable(self) -> int:
        """Number of ready groups that may enter the current training step now."""
        return self._run_state.assembler.count_drawable(self._run_state.admission.version)

    @property
    def _is_step_complete(self) -> bool:
        """True if the groups in the training step, and groups that may enter now, fill the step."""
        assembler = self._run_state.assembler
        missing = self._config.groups_per_step - assembler.num_drawn
        return assembler.num_ready >= missing and self._num_drawable == missing

    async def _collect_groups(self) -> None:
        """Lease ready groups until the step is complete; then only log filtered, dropped groups."""
        run_state, stage = self._run_state, self._stage
        while not (self._is_step_complete or self._is_closing or run_state.stop_requested.is_set()):
            self._is_taking = True
            # Lease everything: the assembler keeps groups that must wait for a later step.
            experiences = await stage.queue.lease_groups(
                stage.name, max_groups=sys.maxsize, columns=(), wait_s=POLL_WAIT_S
            )
            self._is_taking = False
            ready = [experience for experience in experiences if experience.outcome is None]
            run_state.offer_groups(ready)
            ended = await self._record_finished(
                {e.uid: (e.outcome, e.info) for e in experiences if e.outcome}
            )
            run_state.check_step_limits(ended)
            await drop_late_groups(stage, run_state)
            run_state.publisher.check_failures()
            # The end of a group with an earlier deadline may free a slot for a ready one.
            if ready or (ended and self._num_drawable):
                self._notify_waiter()
            await self._check_stall()
        if self._is_step_complete:
            await drop_late_groups(stage, run_state, is_full=True)
        while not (self._is_closing or run_state.stop_requested.is_set()):
            self._is_taking = True
            finished = await stage.queue.wait_for_finished(wait_s=POLL_WAIT_S)
            self._is_taking = False
            # No check_step_limits here: this step is complete.
            await self._record_finished({g.uid: (g.outcome, g.info) for g in finished})

    async def _record_finished(
        self, outcomes: Mapping[str, tuple[GroupOutcome, GroupInfo | None]]
    ) -> Mapping[str, GroupOutcome]:
        """Log filtered and dropped groups that the ledger has in flight; return their outcomes."""
        in_flight = self._run_state.admission.ledger.in_flight
        ended = {uid: outcome for uid, (outcome, _) in outcomes.items() if uid in in_flight}
        if ended:
            infos = {uid: info for uid, (_, info) in outcomes.items()}
            await self._run_state.finish_groups(self._stage.queue, ended, infos)
        return ended

    async def _check_stall(self) -> None:
        """Raise DeadlineError if the step waits too long for a group, and no rollout has grown."""
        # Twice the time for every attempt to stall and be requeued.
        attempts = 1 if self._config.on_stall == "abort" else 2 * self._run_state.max_attempts
        patience_s = self._config.stall_s * attempts
        is_waiting = not self._has_new_groups
        waited = max(self._waiting_since, self._run_state.progress_clock.last_progress_at)
        if not is_waiting or self._loop.time() <= waited + patience_s:
            return
        # Long rollouts may take any time as long as they grow; then their group is scored.
        if await self._stage.queue.measure_growth_age() > patience_s:
            raise await make_stall_error(
                self._stage, self._run_state, self._config.groups_per_step, patience_s
            )


async def drop_late_groups(
    stage: StageContext, run_state: RunState, *, is_full: bool = False
) -> None:
    """Drop the groups that neither the current nor a later training step can train.

    is_full: the current step has all its groups, so that only later steps count.
    """
    late = run_state.remove_late_groups(is_full=is_full)
    if late:
        await run_state.finish_groups(stage.queue, late)


async def make_stall_error(
    stage: StageContext, run_state: RunState, groups_per_step: int, waited_s: float
) -> DeadlineError:
    """Build the error of a training step that got no group for `waited_s` seconds.

    Its message names the missing groups and their holders, and what open episodes wait for.
    """
    version = run_state.admission.version
    uids = run_state.assembler.pending_uids
    locations = await stage.queue.locate_groups(uids[:SHOWN_GROUPS])
    counts = dict(run_state.admission.ledger.counts.drops)
    drops = f"; dropped so far: {counts}" if counts else ""
    first = (
        "; ".join(f"{uid}: {location}" for uid, location in locations.items())
        or "no prompt admitted"
    )
    if len(uids) > SHOWN_GROUPS:
        first += f"; and {len(uids) - SHOWN_GROUPS} more"
    waits = await run_state.describe_waits()
    return DeadlineError(
        f"stage {stage.name} got no group for {waited_s:g} s at version {version}: its step has"
        f" {run_state.assembler.num_drawn} of {groups_per_step} groups, and {len(uids)} that were"
        f" admitted are not ready ({first}){drops}{waits and f'; {waits}'}"
    )


@dataclass(frozen=True)
class ReadyRounds:
    """Rounds of a training step that can be trained now, by role of the trained model.

    `uids` lists all groups of the step once the last group is known; empty before.
    """

    rounds_by_role: Mapping[str, Sequence[ScheduledRound]]
    uids: Sequence[str] = ()


async def train_step(
    stage: StageContext,
    run_state: RunState,
    trainers: Mapping[str, TrainerProtocol],
    config: PipelineConfig,
) -> StepResult | None:
    """Run the training step of the current version on all `trainers`; None if the run is stopping.

    If a predecessor of this process trained the step after the last checkpoint, the run log has the
    step, and the same micro-batches are trained again.
    """
    version = run_state.admission.version
    recorded = run_state.run_log.steps_to_replay.get(version)
    adaptive_params = run_state.adaptive_params.state_dict()
    for trainer in trainers.values():
        trainer.begin_step(version, adaptive_params)
    runners = {
        role: RoundRunner(trainer, run_state, stage.device_lease)
        for role, trainer in trainers.items()
    }
    active = {
        role: runner for role, runner in runners.items() if not trainers[role].is_frozen(version)
    }
    schedulers = {role: make_scheduler(trainers[role], config) for role in active}
    collector = GroupCollector(stage, run_state, config)
    dp_sizes = {role: trainer.dp_size for role, trainer in trainers.items()}
    ready_rounds = (
        replay_step(recorded, dp_sizes)
        if recorded
        else assemble_rounds(collector, run_state, schedulers)
    )
    async with AsyncExitStack() as until_published:
        async with nullcontext() if recorded else collector, aclosing(ready_rounds):
            async for ready in ready_rounds:
                async with stage.device_lease.hold(stage.name):
                    work = (runner.run_rounds(role, ready) for role, runner in active.items())
                    await asyncio.gather(*work)
                    if all(runner.is_done for runner in active.values()):
                        # Keep the devices until the weights are read: generators wait for the new
                        # version, and the next holder may compute for long.
                        await until_published.enter_async_context(
                            stage.device_lease.hold("publish")
                        )
                if run_state.should_abandon_step():
                    break
        if not all(runner.is_done for runner in active.values()):
            return None
        schedules = {role: scheduler.step_schedule for role, scheduler in schedulers.items()}
        step = recorded or TrainedStep(version, run_state.assembler.finish_step(), schedules)
        results = {role: runner.result for role, runner in runners.items()}
        await run_state.run_log.record_step(step)
        if recorded is None and run_state.pass_rates is not None:
            run_state.pass_rates.record_results(version, step.pass_rates)
        run_state.oversampling.remove_groups(group.uid for group in step.groups)
        run_state.has_partial_update = False
        # Log first: no generator may sample from a version that a crash could still lose.
        awaited = version + 1 in run_state.admission.ledger.in_flight.values()
        announced = await run_state.publisher.begin_publish(version + 1, awaited=awaited)
    run_state.adaptive_params.update_after_step(results[POLICY].metric_sums)
    run_state.admission.advance_version(version + 1, announced=announced)
    if recorded is None and run_state.replays is not None:
        run_state.replays.record_step(version, step.infos)
    filter_tally = run_state.reset_step_counts()
    inserted = run_state.inserted_uids
    uids, keep = [group.uid for group in step.groups], run_state.list_kept_uids()
    stats = await stage.queue.end_step(uids, version + 1, keep)
    counts = run_state.admission.ledger.check_balance(stats.uids, inserted=inserted)
    return StepResult(
        version,
        step.groups,
        results,
        adaptive_params,
        stats,
        counts,
        time.time(),
        filter_tally,
        is_repeated=recorded is not None,
    )


class RoundRunner:
    """Trains the rounds of one model in a training step, and adds up its metrics.

    control: may abandon the step before a round or an update.
    """

    def __init__(self, trainer: TrainerProtocol, control: StepControl, lease: DeviceLease) -> None:
        self._trainer = trainer
        self._control = control
        self._lease = lease
        self._metric_sums: dict[str, float] = {}
        self._since_update: dict[str, float] = {}
        self._update_metrics: list[Mapping[str, float]] = []
        self.is_done = False

    @property
    def result(self) -> TrainStepResult:
        return TrainStepResult(self._metric_sums, self._update_metrics)

    async def run_rounds(self, role: str, ready: ReadyRounds) -> None:
        """Have the trainer train the ready rounds in order, with the updates between them.

        Returns early if the step is abandoned.
        """
        rounds = ready.rounds_by_role[role]
        if ready.uids:
            await self._trainer.plan_step(ready.uids, rounds)
        clock = asyncio.get_running_loop().time
        started = clock()
        for i, scheduled in enumerate(rounds):
            # Extrapolated from the rounds so far.
            needs_s = (clock() - started) / max(i, 1) * (len(rounds) - i)
            if self._control.should_abandon_step(needs_s=needs_s):
                return
            sums = await self._trainer.train_round(scheduled.micro_batches, epoch=scheduled.epoch)
            self._lease.report_progress()
            add_metric_sums(self._metric_sums, sums)
            add_metric_sums(self._since_update, sums)
            if scheduled.is_last_of_update:
                finishes_step = scheduled.is_last_of_step
                if not await self._control.begin_update(role, finishes_step=finishes_step):
                    return
                sums, self._since_update = self._since_update, {}
                self._update_metrics.append(await self._trainer.apply_update(sums))
                self.is_done = finishes_step


def make_scheduler(trainer: TrainerProtocol, config: PipelineConfig) -> StepScheduler:
    return StepScheduler(
        trainer.update_plan,
        dp_size=trainer.dp_size,
        micro_batch_tokens=config.micro_batch_tokens,
    )


async def replay_step(
    step: TrainedStep, dp_sizes: Mapping[str, int]
) -> AsyncGenerator[ReadyRounds]:
    """Yield all rounds of a training step in the run log, for a new training of the step.

    dp_sizes: number of data-parallel ranks by role; may differ from the first training.
    """
    rounds = {
        role: list(schedule.redistribute_rounds(dp_sizes[role]).iter_rounds())
        for role, schedule in step.schedules.items()
    }
    yield ReadyRounds(rounds, [group.uid for group in step.groups])


async def assemble_rounds(
    collector: GroupCollector, run_state: RunState, schedulers: Mapping[str, StepScheduler]
) -> AsyncGenerator[ReadyRounds]:
    """Yield rounds of the current training step as its groups arrive; end if the run stops."""
    version, uids = run_state.admission.version, list[str]()
    while not run_state.assembler.is_complete:
        if not await collector.wait_for_groups():
            return
        for group in run_state.assembler.draw_groups(version):
            assert group.info is not None
            uids.append(group.uid)
            for scheduler in schedulers.values():
                scheduler.add_group(group.uid, group.info.lengths, group.info.samples)
        complete = run_state.assembler.is_complete
        rounds = {role: s.take_rounds(complete=complete) for role, s in schedulers.items()}
        if any(rounds.values()):
            yield ReadyRounds(rounds, uids if complete else ())


def add_metric_sums(total: dict[str, float], sums: Mapping[str, float]) -> None:
    """Add `sums` to `total` in place; for names that end in _max keep the maximum."""
    for name, value in sums.items():
        if name.endswith("_max"):
            total[name] = max(total.get(name, value), value)
        else:
            total[name] = total.get(name, 0.0) + value

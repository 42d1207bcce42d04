"""Run one training step: collect its groups, train them as they arrive, log it, publish."""

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, nullcontext
from dataclasses import dataclass

from streamrl.buffer.assembly.micro_batch_schedule import ScheduledRound, StepScheduler
from streamrl.buffer.books.run_log import TrainedStep
from streamrl.dataflow import POLICY
from streamrl.stream.group_collector import GroupCollector
from streamrl.stream.protocols import (
    DeviceLease,
    StageContext,
    StepControl,
    StepResult,
    TrainerProtocol,
    TrainStepResult,
)
from streamrl.stream.run_state import PipelineConfig, RunState


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
    version, started_at = run_state.admission.version, time.time()
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
                async with stage.record_compute(version=version):
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
        run_state.oversampling.remove_groups(group.uid for group in step.groups)
        run_state.has_partial_update = False
        # Log first: no generator may sample from a version that a crash could still lose.
        awaited = version + 1 in run_state.admission.ledger.in_flight.values()
        published = await run_state.publisher.begin_publish(version + 1, awaited=awaited)
    run_state.adaptive_params.update_after_step(results[POLICY].metric_sums)
    run_state.admission.advance_version(version + 1, published=published)
    filter_tally = run_state.reset_step_counts()
    inserted = run_state.inserted_uids
    stats = await stage.queue.end_step([group.uid for group in step.groups], version + 1)
    counts = run_state.admission.ledger.check_balance(stats.uids, inserted=inserted)
    return StepResult(
        version,
        step.groups,
        results,
        adaptive_params,
        stats,
        counts,
        started_at,
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
        world_size=trainer.dp_size,
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

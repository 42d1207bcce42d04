"""One optimizer step: its groups are collected, trained as they come, and booked."""

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
    StepResult,
    TrainerProtocol,
    TrainStepResult,
)
from streamrl.stream.run_state import PipelineConfig, RunState


@dataclass(frozen=True)
class ReadyRounds:
    """Turns that may be made now, by role; `uids` of all groups of the step once they are known."""

    rounds_by_role: Mapping[str, Sequence[ScheduledRound]]
    uids: Sequence[str] = ()


async def train_step(
    stage: StageContext,
    control: RunState,
    trainers: Mapping[str, TrainerProtocol],
    config: PipelineConfig,
) -> StepResult | None:
    """One step of the current version, on all `trainers` by role; None if the run is stopping.

    A step that is on the books already, made after the last checkpoint by a trainer that is no
    more, is made again from the same micro-batches.
    """
    version, started_at = control.admission.version, time.time()
    recorded = control.run_log.steps_to_replay.get(version)
    dials = control.adaptive_params.state_dict()
    for trainer in trainers.values():
        trainer.begin_step(version, dials)
    makers = {
        role: RoundRunner(trainer, control, stage.device_lease)
        for role, trainer in trainers.items()
    }
    active = {role: one for role, one in makers.items() if not trainers[role].is_frozen(version)}
    schedules = {role: _make_scheduler(trainers[role], config) for role in active}
    gathering = GroupCollector(stage, control, config)
    shares = {role: trainer.dp_size for role, trainer in trainers.items()}
    parts = (
        replay_step(recorded, shares)
        if recorded
        else assemble_rounds(gathering, control, schedules)
    )
    async with AsyncExitStack() as until_published:
        async with nullcontext() if recorded else gathering, aclosing(parts):
            async for part in parts:
                async with stage.record_compute(version=version):
                    work = (maker.run_rounds(role, part) for role, maker in active.items())
                    await asyncio.gather(*work)
                    if all(maker.is_done for maker in active.values()):
                        # Who has the devices next may keep them long, and generators wait for this.
                        await until_published.enter_async_context(
                            stage.device_lease.hold("publish")
                        )
                if control.should_abandon_step():
                    break
        if not all(maker.is_done for maker in active.values()):
            return None
        programs = {role: schedule.step_schedule for role, schedule in schedules.items()}
        step = recorded or TrainedStep(version, control.assembler.finish_step(), programs)
        made = {role: maker.result for role, maker in makers.items()}
        await control.run_log.record_step(step)
        control.oversampling.remove_groups(group.uid for group in step.groups)
        control.has_partial_update = False
        # Nobody samples from a version before the step that made it is on the books.
        awaited = version + 1 in control.admission.ledger.in_flight.values()
        published = await control.publisher.begin_publish(version + 1, awaited=awaited)
    rollouts = sum(len(group.info.lengths) for group in step.groups)
    control.adaptive_params.update_after_step(made[POLICY].metric_sums, num_rollouts=rollouts)
    control.admission.advance_version(version + 1, published=published)
    filtered = control.reset_step_counts()
    booked = control.inserted_uids
    figures = await stage.queue.end_step([group.uid for group in step.groups], version + 1)
    counts = control.admission.ledger.check_balance(figures.uids, inserted=booked)
    return StepResult(
        version,
        step.groups,
        made,
        dials,
        figures,
        counts,
        started_at,
        time.time(),
        filtered,
    )


class RoundRunner:
    """Makes the turns of a step on one trainer, and remembers what came of them."""

    def __init__(self, trainer: TrainerProtocol, control: RunState, lease: DeviceLease) -> None:
        self._trainer = trainer
        self._lease = lease
        self._run_state = control
        self._metric_sums: dict[str, float] = {}
        self._since_update: dict[str, float] = {}
        self._update_metrics: list[Mapping[str, float]] = []
        self.is_done = False

    @property
    def result(self) -> TrainStepResult:
        """All of it."""
        return TrainStepResult(self._metric_sums, self._update_metrics)

    async def run_rounds(self, role: str, part: ReadyRounds) -> None:
        """One turn after the other; none any more once the run leaves the step."""
        turns = part.rounds_by_role[role]
        if part.uids:
            await self._trainer.plan_step(part.uids, turns)
        clock = asyncio.get_running_loop().time
        began = clock()
        for i, turn in enumerate(turns):
            needs_s = (clock() - began) / max(i, 1) * (len(turns) - i)
            if self._run_state.should_abandon_step(needs_s=needs_s):
                return
            sums = await self._trainer.train_round(turn.micro_batches, epoch=turn.epoch)
            self._lease.report_progress()
            add_metric_sums(self._metric_sums, sums)
            add_metric_sums(self._since_update, sums)
            if turn.is_last_of_update:
                # What is being published must not change; a reference reads the policy, too.
                await self._run_state.publisher.wait_until_published()
            # An update ends the step, or it is the beginning of what then has to be ended.
            if self._run_state.is_step_abandoned or (
                not turn.is_last_of_step and self._run_state.should_abandon_step()
            ):
                return
            if turn.is_last_of_update:
                self._run_state.publisher.mark_changed(role)
                await self._apply_update()
                self.is_done = turn.is_last_of_step

    async def _apply_update(self) -> None:
        sums, self._since_update = self._since_update, {}
        self._run_state.has_partial_update = True
        self._update_metrics.append(await self._trainer.apply_update(sums))


def _make_scheduler(trainer: TrainerProtocol, config: PipelineConfig) -> StepScheduler:
    return StepScheduler(
        trainer.update_plan,
        world_size=trainer.dp_size,
        micro_batch_tokens=config.micro_batch_tokens,
    )


async def replay_step(step: TrainedStep, shares: Mapping[str, int]) -> AsyncGenerator[ReadyRounds]:
    """A step that is made again, in one part, on as many ranks as there are now."""
    turns = {
        role: list(program.redistribute_rounds(shares[role]).iter_rounds())
        for role, program in step.schedules.items()
    }
    yield ReadyRounds(turns, [group.uid for group in step.groups])


async def assemble_rounds(
    gathering: GroupCollector, control: RunState, schedules: Mapping[str, StepScheduler]
) -> AsyncGenerator[ReadyRounds]:
    """The next step as its groups come; not all of it if the run is stopping."""
    version, uids = control.admission.version, list[str]()
    while not control.assembler.is_complete:
        if not await gathering.wait_for_groups():
            return
        for group in control.assembler.draw_groups(version):
            assert group.info is not None
            uids.append(group.uid)
            for schedule in schedules.values():
                schedule.add_group(group.uid, group.info.lengths)
        complete = control.assembler.is_complete
        turns = {role: one.take_rounds(complete=complete) for role, one in schedules.items()}
        if any(turns.values()):
            yield ReadyRounds(turns, uids if complete else ())


def add_metric_sums(total: dict[str, float], part: Mapping[str, float]) -> None:
    """Add metric sums in place; names that end in _max keep the larger value."""
    for name, value in part.items():
        if name.endswith("_max"):
            total[name] = max(total.get(name, value), value)
        else:
            total[name] = total.get(name, 0.0) + value

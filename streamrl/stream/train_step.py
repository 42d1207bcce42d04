"""One optimizer step: its groups are collected, trained as they come, and booked."""

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, nullcontext
from dataclasses import dataclass

from streamrl.buffer.assembly.micro_batch_schedule import Schedule, Turn
from streamrl.buffer.books.run_log import TrainedStep
from streamrl.dataflow import POLICY
from streamrl.stream.group_collector import Gathering
from streamrl.stream.protocols import DeviceLease, Made, Stage, StepOutcome, Trainer
from streamrl.stream.run_state import Control, PipelineConfig


@dataclass(frozen=True)
class Part:
    """Turns that may be made now, by role; `uids` of all groups of the step once they are known."""

    turns: Mapping[str, Sequence[Turn]]
    uids: Sequence[str] = ()


async def train_step(
    stage: Stage, control: Control, trainers: Mapping[str, Trainer], config: PipelineConfig
) -> StepOutcome | None:
    """One step of the current version, on all `trainers` by role; None if the run is stopping.

    A step that is on the books already, made after the last checkpoint by a trainer that is no
    more, is made again from the same micro-batches.
    """
    version, started_at = control.admission.version, time.time()
    recorded = control.books.steps.get(version)
    dials = control.dials.state_dict()
    for trainer in trainers.values():
        trainer.adopt(version, dials)
    makers = {role: Maker(trainer, control, stage.lease) for role, trainer in trainers.items()}
    active = {role: one for role, one in makers.items() if not trainers[role].rests(version)}
    schedules = {role: _schedule(trainers[role], config) for role in active}
    gathering = Gathering(stage, control, config)
    shares = {role: trainer.num_shares for role, trainer in trainers.items()}
    parts = replay(recorded, shares) if recorded else assemble(gathering, control, schedules)
    async with AsyncExitStack() as until_published:
        async with nullcontext() if recorded else gathering, aclosing(parts):
            async for part in parts:
                async with stage.computing(version=version):
                    work = (maker.make(role, part) for role, maker in active.items())
                    await asyncio.gather(*work)
                    if all(maker.is_done for maker in active.values()):
                        # Who has the devices next may keep them long, and generators wait for this.
                        await until_published.enter_async_context(stage.lease.hold("publish"))
                if control.leaves_step():
                    break
        if not all(maker.is_done for maker in active.values()):
            return None
        programs = {role: schedule.program for role, schedule in schedules.items()}
        step = recorded or TrainedStep(version, control.assembler.finish(), programs)
        made = {role: maker.made for role, maker in makers.items()}
        await control.books.train(step)
        control.oversampling.leave(group.uid for group in step.groups)
        control.torn = False
        # Nobody samples from a version before the step that made it is on the books.
        awaited = version + 1 in control.admission.ledger.in_flight.values()
        published = await control.publishing.begin(version + 1, awaited=awaited)
    rollouts = sum(len(group.info.lengths) for group in step.groups)
    control.dials.after(made[POLICY].sums, num_rollouts=rollouts)
    control.admission.advance(version + 1, published=published)
    filtered = control.start_counts()
    booked = control.booked
    figures = await stage.queue.end_step([group.uid for group in step.groups], version + 1)
    counts = control.admission.ledger.check(figures.uids, booked=booked)
    return StepOutcome(
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


class Maker:
    """Makes the turns of a step on one trainer, and remembers what came of them."""

    def __init__(self, trainer: Trainer, control: Control, lease: DeviceLease) -> None:
        self._trainer = trainer
        self._lease = lease
        self._control = control
        self._sums: dict[str, float] = {}
        self._since_update: dict[str, float] = {}
        self._updates: list[Mapping[str, float]] = []
        self.is_done = False

    @property
    def made(self) -> Made:
        """All of it."""
        return Made(self._sums, self._updates)

    async def make(self, role: str, part: Part) -> None:
        """One turn after the other; none any more once the run leaves the step."""
        turns = part.turns[role]
        if part.uids:
            await self._trainer.plan(part.uids, turns)
        clock = asyncio.get_running_loop().time
        began = clock()
        for i, turn in enumerate(turns):
            needs_s = (clock() - began) / max(i, 1) * (len(turns) - i)
            if self._control.leaves_step(needs_s=needs_s):
                return
            sums = await self._trainer.train_round(turn.work, epoch=turn.epoch)
            self._lease.progress()
            add_sums(self._sums, sums)
            add_sums(self._since_update, sums)
            if turn.ends_update:
                # What is being published must not change; a reference reads the policy, too.
                await self._control.publishing.settle()
            # An update ends the step, or it is the beginning of what then has to be ended.
            if self._control.left or (not turn.ends_step and self._control.leaves_step()):
                return
            if turn.ends_update:
                self._control.publishing.changes(role)
                await self._update()
                self.is_done = turn.ends_step

    async def _update(self) -> None:
        sums, self._since_update = self._since_update, {}
        self._control.torn = True
        self._updates.append(await self._trainer.update(sums))


def _schedule(trainer: Trainer, config: PipelineConfig) -> Schedule:
    return Schedule(
        trainer.pace,
        world_size=trainer.num_shares,
        micro_batch_tokens=config.micro_batch_tokens,
    )


async def replay(step: TrainedStep, shares: Mapping[str, int]) -> AsyncGenerator[Part]:
    """A step that is made again, in one part, on as many ranks as there are now."""
    turns = {
        role: list(program.dealt_to(shares[role]).turns())
        for role, program in step.programs.items()
    }
    yield Part(turns, [group.uid for group in step.groups])


async def assemble(
    gathering: Gathering, control: Control, schedules: Mapping[str, Schedule]
) -> AsyncGenerator[Part]:
    """The next step as its groups come; not all of it if the run is stopping."""
    version, uids = control.admission.version, list[str]()
    while not control.assembler.complete:
        if not await gathering.some():
            return
        for group in control.assembler.draw(version):
            assert group.info is not None
            uids.append(group.uid)
            for schedule in schedules.values():
                schedule.add(group.uid, group.info.lengths)
        complete = control.assembler.complete
        turns = {role: one.turns(complete=complete) for role, one in schedules.items()}
        if any(turns.values()):
            yield Part(turns, uids if complete else ())


def add_sums(total: dict[str, float], part: Mapping[str, float]) -> None:
    """Add metric sums in place; names that end in _max keep the larger value."""
    for name, value in part.items():
        if name.endswith("_max"):
            total[name] = max(total.get(name, value), value)
        else:
            total[name] = total.get(name, 0.0) + value

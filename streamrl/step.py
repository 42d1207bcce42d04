"""One optimizer step: its groups are collected, trained as they come, and booked."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Mapping

from streamrl.buffer.books import TrainedStep
from streamrl.control import STALE, Control, PipelineConfig
from streamrl.engines.packing import Packer, Round
from streamrl.errors import DeadlineError
from streamrl.faces import Stage, StepOutcome, StepTotals, Trainer
from streamrl.messages import Ended
from streamrl.serving import WAIT_S


async def train_step(
    stage: Stage, control: Control, trainer: Trainer, config: PipelineConfig
) -> StepOutcome | None:
    """One optimizer step of the current version; None if the run is stopping.

    A step that is on the books already, made after the last checkpoint by a trainer that is no
    more, is made again from the same micro-batches.
    """
    version, started_at = control.admission.version, time.time()
    recorded = control.books.steps.get(version)
    works = replay_rounds(recorded) if recorded else assemble(stage, control, trainer, config)
    sums: dict[str, float] = {}
    rounds: list[Round] = []
    async for work in works:
        if control.stopping.is_set():
            return None
        async with stage.computing(version=version):
            add_sums(sums, await trainer.train_round(work))
        rounds.append(work)
    if not recorded and not control.assembler.complete:
        return None
    step = recorded or TrainedStep(version, control.assembler.finish(), tuple(rounds))
    totals = StepTotals(
        num_loss_tokens=sum(group.info.num_loss_tokens for group in step.groups),
        num_rollouts=sum(len(group.info.lengths) for group in step.groups),
    )
    async with stage.computing(version=version):
        update = await trainer.update(totals, version + 1)
    await control.books.train(step)
    # Nobody samples from a version before the step that made it is on the books.
    control.registry.offer(update.manifest)
    control.admission.advance(version + 1)
    control.filtered = 0
    booked = control.booked
    figures = await stage.queue.end_step([group.uid for group in step.groups], version + 1)
    counts = control.admission.ledger.check(figures.uids, booked=booked)
    return StepOutcome(
        version, totals, step.groups, sums, update, figures, counts, started_at, time.time()
    )


async def replay_rounds(step: TrainedStep) -> AsyncIterator[Round]:
    """The micro-batches of a step that is made again."""
    for work in step.rounds:
        yield work


async def assemble(
    stage: Stage, control: Control, trainer: Trainer, config: PipelineConfig
) -> AsyncIterator[Round]:
    """The micro-batches of the next step as its groups come; fewer if the run is stopping."""
    version = control.admission.version
    packer = Packer(world_size=trainer.world_size, micro_batch_tokens=config.micro_batch_tokens)
    while not control.assembler.complete:
        if not await collect(stage, control, config):
            return
        for group in control.assembler.draw(version):
            assert group.info is not None
            packer.add(group.uid, group.info.lengths)
        for work in packer.rounds(final=control.assembler.complete):
            yield work


async def collect(stage: Stage, control: Control, config: PipelineConfig) -> bool:
    """Offer the assembler what the queue has for it, unless it can draw already.

    False if the run is stopping. Raises DeadlineError naming the groups a step waits for, and
    where they are, once it has waited for longer than `on_stall` allows.
    """
    await drop_stale(stage, control)
    if control.assembler.drawable(control.admission.version):
        return not control.stopping.is_set()
    # Time for every attempt to be found stalled and taken back, and once as much again.
    patience_s = config.stall_s * (1 if config.on_stall == "abort" else 2 * control.max_attempts)
    clock = asyncio.get_running_loop().time
    deadline = clock() + patience_s
    while not control.stopping.is_set():
        # All there are: the assembler keeps those that must wait for a later step.
        found = await stage.queue.take(
            stage.name, max_groups=sys.maxsize, columns=(), wait_s=WAIT_S
        )
        ready = [experience for experience in found if experience.ended is None]
        control.assembler.offer(ready)
        ended = {e.uid: e.ended for e in found if e.ended is not None}
        if ended:
            await control.end(stage.queue, ended)
        await drop_stale(stage, control)
        # The end of a group with an earlier deadline frees its place for one that is there.
        if ready or control.assembler.drawable(control.admission.version):
            return True
        if clock() > deadline:
            raise await stall_error(stage, control, patience_s)
    return False


async def drop_stale(stage: Stage, control: Control) -> None:
    """End the groups that became too old on their way (`on_stale: drop`)."""
    stale = control.assembler.take_stale(control.admission.version)
    if stale:
        how = Ended(STALE, "tokens beyond pipeline.max_staleness")
        await control.end(stage.queue, {experience.uid: how for experience in stale})


async def stall_error(stage: Stage, control: Control, waited_s: float) -> DeadlineError:
    """The error that says what the step of the current version waits for, and where it is."""
    version = control.admission.version
    uids = control.assembler.awaited
    places = await stage.queue.whereabouts(uids[:8])
    counts = dict(control.admission.ledger.counts.drops)
    drops = f"; dropped so far: {counts}" if counts else ""
    waited = "; ".join(f"{uid}: {place}" for uid, place in places.items()) or "no prompt admitted"
    return DeadlineError(
        f"stage {stage.name} got no group for {waited_s:g} s at version {version};"
        f" it waits for {len(uids)} groups ({waited}){drops}"
    )


def add_sums(total: dict[str, float], part: Mapping[str, float]) -> None:
    """Add metric sums in place; names that end in _max keep the larger value."""
    for name, value in part.items():
        if name.endswith("_max"):
            total[name] = max(total.get(name, value), value)
        else:
            total[name] = total.get(name, 0.0) + value

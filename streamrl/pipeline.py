"""The stream: what each stage waits for, does and produces. Read this first.

    admit ---> generate ---> score (reward, reference, ...) ---> train
      ^           ^                                               |
      | credits   +------------ follow_weights <--- publish ------+
      +------------------------- version + 1 ---------------------+

Every arrow is the experience queue: a stage takes a group once the columns it needs are there,
computes, and puts its own columns. Micro-batch k+1 is generated while k is scored and trained.
How far generation may run ahead is a matter of credits alone (`max_staleness`), and whether two
stages may compute at the same time is a matter of the device lease alone; no loop asks which mode
it is in. Nothing here knows an actor, an engine or an algorithm: actors host these loops, tests run
the same ones in one process on a virtual clock.
"""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from streamrl.buffer import Admission, ExperienceQueue, ShardStats, StepAssembler
from streamrl.buffer.ledger import LedgerCounts
from streamrl.engines.packing import Packer, Round
from streamrl.errors import ConfigError, DeadlineError, StreamError
from streamrl.messages import Columns, Experience, Lease, Prompt, Rollout, group_columns
from streamrl.telemetry.spans import SpanRecorder
from streamrl.weights import HeldVersion, WeightManifest
from streamrl.weights.registry import Held, WeightRegistry

WAIT_S = 1.0
"""Length of one wait in a loop, s: a loop looks up this often to see whether the run has ended."""
GATHER_S = 0.003
"""How long a result waits for others to be committed with it, s: a message costs about as much."""


@dataclass
class PipelineConfig:
    """How the stages are coupled.

    max_staleness: most versions a token may be behind the step that trains it; 0 is on-policy.
    groups_per_step: groups in one optimizer step.
    micro_batch_tokens: most tokens, padding included, in one forward and backward of one rank.
    stall_s: the run ends with an error if a step gets no group for this long, s.
    """

    max_staleness: int = 1
    groups_per_step: int = 32
    micro_batch_tokens: int = 16384
    stall_s: float = 300.0

    def __post_init__(self) -> None:
        if self.max_staleness < 0:
            raise ConfigError(f"pipeline.max_staleness={self.max_staleness}: must be 0 or more")
        for key in ("groups_per_step", "micro_batch_tokens", "stall_s"):
            if vars(self)[key] <= 0:
                raise ConfigError(f"pipeline.{key}={vars(self)[key]}: must be above 0")


# What the loops call. Engines, remote proxies and test fakes all have these faces.


class Generator(Protocol):
    """Samples the rollouts of a prompt, and takes new weights while it does."""

    async def rollouts(self, prompt: Prompt) -> list[Rollout]: ...

    async def load_weights(self, tensors: Mapping[str, Any], version: int) -> None: ...


class Scorer(Protocol):
    """Adds columns to groups. A group that cannot be scored comes back as the error."""

    async def score(self, experiences: Sequence[Experience]) -> list[Columns | StreamError]: ...


class Trainer(Protocol):
    """All ranks of the policy's trainer as one."""

    world_size: int

    async def train_round(self, work: Round) -> Mapping[str, float]:
        """Forward and backward of one micro-batch per rank; sums to be added over the step."""
        ...

    async def update(self, totals: "StepTotals", version: int) -> "Update":
        """Optimizer update from the gradients so far, published as `version`."""
        ...


class WeightChannel(Protocol):
    """The readers' end of weight sync."""

    async def newest(self, held: Held, *, wait_s: float) -> WeightManifest | None: ...

    async def fetch(self, manifest: WeightManifest) -> Mapping[str, Any]: ...


class PromptSource(Protocol):
    """Where prompts come from, without end."""

    def draw(self, count: int) -> list[Prompt]: ...


class DeviceLease(Protocol):
    """The right to compute on a pool. Free where every stage has a pool of its own."""

    def hold(self, stage: str) -> AbstractAsyncContextManager[None]: ...


@dataclass(frozen=True)
class StepTotals:
    """What the summed loss of a step is normalised by, over all micro-batches and ranks."""

    num_loss_tokens: int
    num_rollouts: int


@dataclass(frozen=True)
class Update:
    """What an optimizer update reports (gradient norm, ...) and the version it published."""

    metrics: Mapping[str, float]
    manifest: WeightManifest


@dataclass(frozen=True)
class StepOutcome:
    """A finished step of `version`; `sums` are those of its micro-batches. Times are epoch s.

    `queue` and `ledger` are as of its end, when the ledger was checked against the queue.
    """

    version: int
    totals: StepTotals
    groups: Sequence[Experience]
    sums: Mapping[str, float]
    update: Update
    queue: ShardStats
    ledger: LedgerCounts
    started_at: float
    ended_at: float


@dataclass(frozen=True)
class Stage:
    """A stage's place in the stream, given to its loop."""

    name: str
    queue: ExperienceQueue
    lease: DeviceLease
    spans: SpanRecorder

    @asynccontextmanager
    async def computing(self, **facts: float | str) -> AsyncIterator[None]:
        """Hold the pool and record a span: what a stage does inside counts as busy."""
        async with self.lease.hold(self.name):
            with self.spans.span(self.name, **facts):
                yield


@dataclass
class Control:
    """The coordinator's books, shared by the admitting and the training loop."""

    admission: Admission
    assembler: StepAssembler
    registry: WeightRegistry
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    arriving: set[str] = field(default_factory=set)
    """Uids that are booked and on their way into a shard."""
    on_drop: Callable[[Experience], None] = lambda _: None
    """Told of every group that is given up."""

    @property
    def booked(self) -> set[str]:
        """Uids that must be in a shard: all in flight but those on their way into one."""
        return set(self.admission.ledger.in_flight) - self.arriving

    async def enter(self, queue: ExperienceQueue, prompts: Sequence[Prompt]) -> None:
        """Book prompts at the current version, then put them into the queue."""
        version, uids = self.admission.version, [prompt.uid for prompt in prompts]
        for uid in uids:
            self.admission.ledger.admit(uid)
            self.assembler.admit(uid, version)
        self.arriving.update(uids)
        await queue.admit(prompts, version)
        self.arriving.difference_update(uids)


# The loops, in the order in which data flows.


async def admit(control: Control, queue: ExperienceQueue, source: PromptSource) -> None:
    """Waits for: credits. Produces: prompts in the queue, with the version they are admitted at."""
    while not control.stopping.is_set():
        credit = await control.admission.wait_credit(WAIT_S)
        if credit:
            await control.enter(queue, source.draw(credit))


async def generate(
    stage: Stage, generator: Generator, held: HeldVersion, *, slots: int, stall_s: float
) -> None:
    """Waits for: a prompt, a free slot, the version the prompt was admitted at.

    Produces: the rollouts of its group.
    """

    async def sample(experiences: Sequence[Experience]) -> list[Columns | StreamError]:
        (experience,) = experiences
        assert experience.prompt is not None
        await held.at_least(experience.admitted_version, timeout_s=stall_s)
        async with stage.computing(uid=experience.uid):
            return [group_columns(await generator.rollouts(experience.prompt))]

    await serve(stage, sample, columns=(), slots=slots, batch=1)


async def score(
    stage: Stage, scorer: Scorer, *, columns: Sequence[str], slots: int, batch: int
) -> None:
    """Waits for: groups with the columns this stage needs. Produces: the columns it declares."""

    async def compute(experiences: Sequence[Experience]) -> list[Columns | StreamError]:
        async with stage.computing(groups=len(experiences)):
            return await scorer.score(experiences)

    await serve(stage, compute, columns=columns, slots=slots, batch=batch)


async def train(
    stage: Stage,
    control: Control,
    trainer: Trainer,
    config: PipelineConfig,
    *,
    report: Callable[[StepOutcome], Awaitable[None]],
) -> None:
    """Waits for: the groups of a step, training them as they come. Produces: the next version."""
    while not control.admission.finished:
        outcome = await train_step(stage, control, trainer, config)
        if outcome is None:
            return
        await report(outcome)


async def follow_weights(
    stage: Stage, generator: Generator, channel: WeightChannel, held: HeldVersion
) -> None:
    """Waits for: a version newer than the one held. Produces: that version, in the generator."""
    pull_s = 0.0
    while True:
        manifest = await channel.newest(Held(held.version, pull_s), wait_s=WAIT_S)
        if manifest is None:
            continue
        started = time.perf_counter()
        with stage.spans.span("pull", version=manifest.version):
            tensors = await channel.fetch(manifest)
            await generator.load_weights(tensors, manifest.version)
        held.advance(manifest.version)
        pull_s = time.perf_counter() - started


# What the loops are made of.


async def train_step(
    stage: Stage, control: Control, trainer: Trainer, config: PipelineConfig
) -> StepOutcome | None:
    """One optimizer step of the current version; None if the run is stopping."""
    version, started_at = control.admission.version, time.time()
    packer = Packer(world_size=trainer.world_size, micro_batch_tokens=config.micro_batch_tokens)
    sums: dict[str, float] = {}
    while not control.assembler.complete:
        if not await collect(stage, control, stall_s=config.stall_s):
            return None
        for group in control.assembler.draw(version):
            assert group.info is not None
            packer.add(group.uid, group.info.lengths)
        for work in packer.rounds(final=control.assembler.complete):
            if control.stopping.is_set():
                return None
            async with stage.computing(version=version):
                add_sums(sums, await trainer.train_round(work))
    groups = control.assembler.finish()
    infos = [group.info for group in groups if group.info is not None]
    totals = StepTotals(
        num_loss_tokens=sum(info.num_loss_tokens for info in infos),
        num_rollouts=sum(len(info.lengths) for info in infos),
    )
    async with stage.computing(version=version):
        update = await trainer.update(totals, version + 1)
    control.registry.offer(update.manifest)
    for group in groups:
        control.admission.ledger.train(group.uid)
    control.admission.advance(version + 1)
    booked = control.booked
    figures = await stage.queue.end_step([group.lease for group in groups], version + 1)
    counts = control.admission.ledger.check(figures.uids, booked=booked)
    return StepOutcome(
        version, totals, groups, sums, update, figures, counts, started_at, time.time()
    )


async def collect(stage: Stage, control: Control, *, stall_s: float) -> bool:
    """Offer the assembler what the queue has for it, unless it can draw already.

    False if the run is stopping. Raises DeadlineError naming the groups a step waits for, and
    where they are, once `stall_s` pass without a new one.
    """
    version = control.admission.version
    if control.assembler.drawable(version):
        return not control.stopping.is_set()
    deadline = asyncio.get_running_loop().time() + stall_s
    while not control.stopping.is_set():
        # All there are: the assembler keeps those that must wait for a later step.
        found = await stage.queue.take(
            stage.name, max_groups=sys.maxsize, columns=(), wait_s=WAIT_S
        )
        ready = [experience for experience in found if experience.dropped is None]
        control.assembler.offer(ready)
        await give_up(stage, control, [e for e in found if e.dropped is not None])
        if ready:
            return True
        if asyncio.get_running_loop().time() > deadline:
            raise await stall_error(stage, control, stall_s)
    return False


async def give_up(stage: Stage, control: Control, dropped: Sequence[Experience]) -> None:
    """Count dropped groups by cause and return their credits, so that others take their places."""
    for experience in dropped:
        assert experience.dropped is not None
        control.assembler.drop(experience.uid)
        control.admission.ledger.drop(experience.uid, experience.dropped)
        control.on_drop(experience)
    if dropped:
        await stage.queue.settle([experience.lease for experience in dropped])
        control.admission.refund()


async def stall_error(stage: Stage, control: Control, stall_s: float) -> DeadlineError:
    """The error that says what the step of the current version waits for, and where it is."""
    version = control.admission.version
    uids = control.assembler.awaited
    places = await stage.queue.whereabouts(uids[:8])
    counts = dict(control.admission.ledger.counts.drops)
    drops = f"; dropped so far: {counts}" if counts else ""
    waited = "; ".join(f"{uid}: {place}" for uid, place in places.items()) or "no prompt admitted"
    return DeadlineError(
        f"stage {stage.name} got no group for {stall_s:g} s at version {version};"
        f" it waits for {len(uids)} groups ({waited}){drops}"
    )


async def serve(
    stage: Stage,
    compute: Callable[[Sequence[Experience]], Awaitable[list[Columns | StreamError]]],
    *,
    columns: Sequence[str],
    slots: int,
    batch: int,
) -> None:
    """Take groups, compute, put the results: up to `slots` groups at once, `batch` to a call."""
    free = Slots(slots)
    async with asyncio.TaskGroup() as tasks:
        outbox = Outbox(stage.queue, free)
        tasks.create_task(outbox.deliver())

        async def work(experiences: Sequence[Experience]) -> None:
            results = await compute(experiences)
            for experience, result in zip(experiences, results, strict=True):
                outbox.post(experience.lease, result)
            free.give(len(experiences))

        while True:
            most = await free.some()
            taken = await stage.queue.take(
                stage.name, max_groups=most, columns=columns, wait_s=WAIT_S
            )
            free.claim(len(taken))
            for chunk in chunks(taken, batch):
                tasks.create_task(work(chunk))


class Slots:
    """Groups a stage may still take on."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._free = total
        self._given = asyncio.Event()

    @property
    def claimed(self) -> int:
        """Groups the stage works on."""
        return self._total - self._free

    async def some(self) -> int:
        """Free slots, waiting for one: bounded by the deadlines of the work that holds them."""
        while not self._free:
            self._given.clear()
            await self._given.wait()
        return self._free

    def claim(self, count: int) -> None:
        """Take `count` slots."""
        self._free -= count

    def give(self, count: int) -> None:
        """Give `count` slots back."""
        self._free += count
        self._given.set()


class Outbox:
    """Commits results, those that are finished close together in one commit."""

    def __init__(self, queue: ExperienceQueue, slots: Slots) -> None:
        self._queue = queue
        self._slots = slots
        self._posted: asyncio.Queue[tuple[Lease, Columns | StreamError]] = asyncio.Queue()

    def post(self, lease: Lease, result: Columns | StreamError) -> None:
        """Hand in the result of a leased group."""
        self._posted.put_nowait((lease, result))

    async def deliver(self) -> None:
        """Put and fail what was posted, without end. Late results are refused by the queue."""
        while True:
            batch = [await self._posted.get()]
            if self._slots.claimed:
                await asyncio.sleep(GATHER_S)
            while not self._posted.empty():
                batch.append(self._posted.get_nowait())
            failed = [(lease, r) for lease, r in batch if isinstance(r, StreamError)]
            done = [(lease, r) for lease, r in batch if not isinstance(r, StreamError)]
            if done:
                await self._queue.put(done)
            if failed:
                await self._queue.fail(failed)


def chunks(items: Sequence[Experience], size: int) -> list[Sequence[Experience]]:
    """`items` cut into runs of at most `size`."""
    return [items[i : i + size] for i in range(0, len(items), size)]


def add_sums(total: dict[str, float], part: Mapping[str, float]) -> None:
    """Add metric sums in place; names that end in _max keep the larger value."""
    for name, value in part.items():
        if name.endswith("_max"):
            total[name] = max(total.get(name, value), value)
        else:
            total[name] = total.get(name, 0.0) + value

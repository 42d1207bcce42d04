"""A whole stream in one process: real loops, queue and books; engines that only take time.

Times are virtual seconds (tests/virtual_clock.py). What each fake did is kept to be asserted on.
"""

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from streamrl.buffer import (
    Admission,
    ExperienceQueue,
    Ledger,
    Ports,
    QueueConfig,
    Shard,
    StepAssembler,
)
from streamrl.buffer.shard import ShardStats
from streamrl.dataflow import Dataflow, Kind, dataflow_for
from streamrl.engines.packing import Round
from streamrl.errors import RewardError, StreamError
from streamrl.lease import Arbiter, FreeLease, SharedLease
from streamrl.messages import (
    ROLLOUT_COLUMNS,
    Columns,
    Experience,
    FinishReason,
    Lease,
    Prompt,
    Rollout,
    make_uid,
)
from streamrl.pipeline import (
    Control,
    PipelineConfig,
    Stage,
    StepOutcome,
    StepTotals,
    Update,
    admit,
    follow_weights,
    generate,
    score,
    train,
)
from streamrl.telemetry.spans import SpanRecorder
from streamrl.weights import HeldVersion, WeightManifest
from streamrl.weights.registry import Held, WeightRegistry

STREAM_COLUMNS = (*ROLLOUT_COLUMNS, "scores")


@dataclass
class Plan:
    """How long things take and how often they fail; all randomness comes from `seed`."""

    seed: int = 0
    steps: int = 4
    groups_per_step: int = 4
    group_size: int = 2
    max_staleness: int = 1
    shards: int = 2
    generators: int = 2
    scorers: int = 1
    world_size: int = 1
    micro_batch_tokens: int = 40
    generate_s: tuple[float, float] = (0.5, 2.0)
    score_s: tuple[float, float] = (0.1, 0.5)
    train_s: float = 0.3
    pull_s: float = 0.1
    fail_rate: float = 0.0
    reference: bool = False
    one_at_a_time: bool = False
    stall_s: float = 100.0
    lease_s: float = 60.0
    max_attempts: int = 3


class LocalShard:
    """ShardFace over a Shard in the same process, with a little delay on every call."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard

    async def admit(self, entries: Sequence[tuple[Prompt, int]], *, wait_s: float) -> None:
        await asyncio.sleep(0.001)
        await self.shard.admit(entries, wait_s=wait_s)

    async def take(
        self, stage: str, *, max_groups: int, columns: Sequence[str], wait_s: float, holder: str
    ) -> list[Experience]:
        await asyncio.sleep(0.001)
        return await self.shard.take(
            stage, max_groups=max_groups, columns=columns, wait_s=wait_s, holder=holder
        )

    async def put(self, entries: Sequence[tuple[Lease, Columns]]) -> list[str]:
        await asyncio.sleep(0.001)
        return self.shard.put(entries)

    async def fail(self, entries: Sequence[tuple[Lease, StreamError]]) -> None:
        self.shard.fail(entries)

    async def read(self, uids: Sequence[str], columns: Sequence[str]) -> list[Columns]:
        return [dict(c) for c in self.shard.read(uids, columns)]

    async def settle(self, leases: Sequence[Lease]) -> None:
        self.shard.settle(leases)

    async def end_step(self, leases: Sequence[Lease], version: int) -> ShardStats:
        return self.shard.end_step(leases, version)

    async def whereabouts(self, uids: Sequence[str]) -> dict[str, str]:
        return self.shard.whereabouts(uids)


class FakePrompts:
    """Endless prompts of three tokens."""

    def __init__(self) -> None:
        self.drawn = 0

    def draw(self, count: int) -> list[Prompt]:
        prompts = [self.prompt(self.drawn + i) for i in range(count)]
        self.drawn += count
        return prompts

    @staticmethod
    def prompt(index: int) -> Prompt:
        return Prompt(make_uid(0, index), np.array([1, 2, 3], np.int32))


class FakeGenerator:
    """Rollouts whose tokens are sampled over time, each under the version held just then."""

    def __init__(self, plan: Plan, rng: random.Random) -> None:
        self.version = -1
        self._plan = plan
        self._rng = rng

    async def rollouts(self, prompt: Prompt) -> list[Rollout]:
        rng = random.Random(f"{self._plan.seed}/{prompt.uid}")
        count = rng.randint(1, 8)
        tokens: list[int] = []
        versions: list[int] = []
        for _ in range(count):
            await asyncio.sleep(self._rng.uniform(*self._plan.generate_s) / count)
            tokens.append(rng.randint(4, 9))
            versions.append(self.version)
        one = Rollout.single_turn(
            prompt.token_ids,
            tokens,
            logprobs=[-1.0] * count,
            versions=versions,
            finish_reason=FinishReason.STOP,
        )
        return [one] * self._plan.group_size

    async def load_weights(self, tensors: Mapping[str, Any], version: int) -> None:
        await asyncio.sleep(self._plan.pull_s)
        assert version > self.version
        self.version = version


class FakeScorer:
    """Scores or reference logprobs after a while; now and then a reward that cannot be computed."""

    def __init__(self, plan: Plan, rng: random.Random, stage: str) -> None:
        self._plan = plan
        self._rng = rng
        self._stage = stage

    async def score(self, experiences: Sequence[Experience]) -> list[Columns | StreamError]:
        await asyncio.sleep(self._rng.uniform(*self._plan.score_s))
        return [self._one(experience) for experience in experiences]

    def _one(self, experience: Experience) -> Columns | StreamError:
        if self._stage == "reference":
            return {"ref_logprobs": np.zeros(len(experience.columns["token_ids"]), np.float32)}
        if self._rng.random() < self._plan.fail_rate:
            return RewardError("the verifier is down")
        return {"scores": np.zeros(len(experience.columns["lengths"]), np.float32)}


@dataclass
class FakeTrainer:
    """Counts what it is given; the truth the properties are checked against."""

    plan: Plan
    world_size: int = 1
    trained: list[tuple[str, int]] = field(default_factory=list)
    rounds_before_update: int = 0

    async def train_round(self, work: Round) -> Mapping[str, float]:
        assert len(work) == self.world_size
        await asyncio.sleep(self.plan.train_s)
        picks = [pick for micro_batch in work for pick in micro_batch]
        self.trained += picks
        return {"rollouts": len(picks), "length_max": 1.0}

    async def update(self, totals: StepTotals, version: int) -> Update:
        await asyncio.sleep(self.plan.train_s)
        return Update({}, WeightManifest(version, (), ()))


class LocalChannel:
    """WeightChannel on the registry itself; there are no tensors to fetch."""

    def __init__(self, registry: WeightRegistry, reader: str) -> None:
        self._registry = registry
        self._reader = reader

    async def newest(self, held: Held, *, wait_s: float) -> WeightManifest | None:
        return await self._registry.newest(self._reader, held, wait_s=wait_s)

    async def fetch(self, manifest: WeightManifest) -> Mapping[str, Any]:
        return {}


@dataclass
class Stream:
    """A stream that has run: its books, what was trained, when."""

    plan: Plan
    control: Control
    queue: ExperienceQueue
    trainer: FakeTrainer
    dataflow: Dataflow
    outcomes: list[StepOutcome] = field(default_factory=list)
    step_ends: list[float] = field(default_factory=list)
    recorders: dict[str, SpanRecorder] = field(default_factory=dict)

    @property
    def ledger(self) -> Ledger:
        return self.control.admission.ledger


def build_stream(plan: Plan) -> Stream:
    """Shards, books and trainer of a plan; needs a running loop."""
    columns = (*STREAM_COLUMNS, "ref_logprobs") if plan.reference else STREAM_COLUMNS
    dataflow = dataflow_for(columns)
    ports = {call.stage: Ports(call.needs, call.produces) for call in dataflow.calls}
    config = QueueConfig(shards=plan.shards, lease_s=plan.lease_s, max_attempts=plan.max_attempts)
    capacity = (plan.max_staleness + 1) * plan.groups_per_step
    shards = [Shard(ports, config, capacity_groups=capacity) for _ in range(plan.shards)]
    admission = Admission(
        Ledger(),
        max_staleness=plan.max_staleness,
        groups_per_step=plan.groups_per_step,
        capacity_groups=capacity,
        total_groups=plan.steps * plan.groups_per_step,
    )
    assembler = StepAssembler(
        max_staleness=plan.max_staleness, groups_per_step=plan.groups_per_step
    )
    registry = WeightRegistry(keep_versions=2)
    return Stream(
        plan=plan,
        control=Control(admission, assembler, registry),
        queue=ExperienceQueue([LocalShard(shard) for shard in shards], "coordinator"),
        trainer=FakeTrainer(plan, world_size=plan.world_size),
        dataflow=dataflow,
    )


async def run_stream(plan: Plan) -> Stream:
    """Run all loops of a plan to the end of its last step."""
    stream = build_stream(plan)
    rng = random.Random(plan.seed)
    arbiter = Arbiter(timeout_s=plan.stall_s)
    config = PipelineConfig(
        max_staleness=plan.max_staleness,
        groups_per_step=plan.groups_per_step,
        micro_batch_tokens=plan.micro_batch_tokens,
        stall_s=plan.stall_s,
    )
    clock = asyncio.get_running_loop().time

    def stage(name: str, process: str) -> Stage:
        lease = SharedLease(arbiter, process) if plan.one_at_a_time else FreeLease()
        stream.recorders[process] = SpanRecorder(process, clock)
        # Every actor has a client of its own.
        queue = ExperienceQueue(stream.queue.shards, process)
        return Stage(name, queue, lease, stream.recorders[process])

    async def report(outcome: StepOutcome) -> None:
        stream.outcomes.append(outcome)
        stream.step_ends.append(clock())

    stream.control.registry.offer(WeightManifest(0, (), ()))
    loops: list[asyncio.Task[None]] = []
    for i in range(plan.generators):
        name = f"generator-{i}"
        generator, held = FakeGenerator(plan, rng), HeldVersion(name)
        place = stage("generate", name)
        channel = LocalChannel(stream.control.registry, name)
        loops.append(asyncio.create_task(follow_weights(place, generator, channel, held)))
        loops.append(
            asyncio.create_task(generate(place, generator, held, slots=3, stall_s=plan.stall_s))
        )
    for call in stream.dataflow.of_kind(Kind.SCORE):
        for i in range(plan.scorers):
            scorer = FakeScorer(plan, rng, call.stage)
            place = stage(call.stage, f"{call.stage}-{i}")
            loops.append(
                asyncio.create_task(score(place, scorer, columns=call.needs, slots=4, batch=2))
            )
    loops.append(asyncio.create_task(admit(stream.control, stream.queue, FakePrompts())))
    training = asyncio.create_task(
        train(stage("train", "trainer"), stream.control, stream.trainer, config, report=report)
    )
    try:
        await asyncio.wait([training, *loops], return_when=asyncio.FIRST_COMPLETED)
        for task in [training, *loops]:
            if task.done():
                task.result()
        await training
    finally:
        for loop in [training, *loops]:
            loop.cancel()
        await asyncio.gather(training, *loops, return_exceptions=True)
    return stream

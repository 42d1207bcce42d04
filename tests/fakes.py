"""A whole stream in one process: real loops, queue and books; engines that only take time.

Times are virtual seconds (tests/virtual_clock.py). What each fake did is kept to be asserted on.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from streamrl.algorithms import AlgorithmConfig
from streamrl.algorithms.dials import Dials
from streamrl.buffer import (
    Admission,
    Books,
    Bounds,
    ExperienceQueue,
    Ledger,
    Ports,
    QueueConfig,
    StepAssembler,
)
from streamrl.buffer.books import recover_books
from streamrl.buffer.leases import Overdue
from streamrl.control import Control, PipelineConfig
from streamrl.dataflow import CRITIC, FOLLOWED, POLICY, Call, Dataflow, Kind, dataflow_for
from streamrl.engines.packing import Round
from streamrl.engines.schedule import Pace, Turn
from streamrl.errors import RewardError
from streamrl.faces import Stage, StepOutcome, Update
from streamrl.lease import Arbiter, FreeLease, SharedLease
from streamrl.messages import (
    ROLLOUT_COLUMNS,
    Ended,
    Experience,
    Filtered,
    FinishReason,
    Prompt,
    Rollout,
    make_uid,
    parse_uid,
)
from streamrl.pipeline import (
    Serving,
    admit,
    follow_weights,
    generate,
    score,
    train,
    watch_stalls,
)
from streamrl.serving import Result
from streamrl.telemetry.spans import SpanRecorder
from streamrl.weights import HeldVersion, WeightManifest
from streamrl.weights.registry import Held, WeightRegistry
from tests.fake_shards import LocalShard, MemoryLog

STREAM_COLUMNS = (*ROLLOUT_COLUMNS, "scores")


STREAMED = Pace()
GROUP_BYTES = 4000
"""More than any group takes."""


@dataclass
class Plan:
    """How long things take and how often they fail; all randomness comes from `seed`."""

    seed: int = 0
    steps: int = 4
    groups_per_step: int = 4
    group_size: int = 2
    max_staleness: int = 1
    depth: int | None = None
    on_stale: str = "wait"
    on_stall: str = "abort"
    readmits: bool = False
    hedge_s: float | None = None
    shards: int = 2
    generators: int = 2
    scorers: int = 1
    world_size: int = 1
    pace: Pace = STREAMED
    micro_batch_tokens: int = 40
    generate_s: tuple[float, float] = (0.5, 2.0)
    score_s: tuple[float, float] = (0.1, 0.5)
    train_s: float = 0.3
    pull_s: float = 0.1
    fail_rate: float = 0.0
    filter_rate: float = 0.0
    max_filtered: float = float("inf")
    duplicate_rate: float = 0.0
    lost_rate: float = 0.0
    """How often the connection to a shard is lost over a call, which goes on in the shard."""
    stuck_attempts: int = 0
    """So many attempts to score the second prompt never end, though their process lives."""
    reference: bool = False
    critic: bool = False
    """A second model is trained on the same groups, and its shadow scores them."""
    rests: int = 0
    """So many steps at the start that are the critic's alone."""
    one_at_a_time: bool = False
    stall_s: float = 100.0
    lease_s: float = 60.0
    max_attempts: int = 3
    room_steps: float = float("inf")
    """So many steps of the largest groups have room in a shard: at least one."""


class FakePrompts:
    """Endless prompts of three tokens."""

    def __init__(self, drawn: int = 0) -> None:
        self.drawn = drawn

    def retry(self, uid: str) -> Prompt:
        epoch, index, attempt = parse_uid(uid)
        return self.prompt(make_uid(epoch, index, attempt + 1))

    def state_dict(self) -> Mapping[str, Any]:
        return {"drawn": self.drawn}

    def draw(self, count: int) -> list[Prompt]:
        prompts = [self.prompt(make_uid(0, self.drawn + i)) for i in range(count)]
        self.drawn += count
        return prompts

    @staticmethod
    def prompt(uid: str) -> Prompt:
        return Prompt(uid, np.array([1, 2, 3], np.int32))


class FakeGenerator:
    """Rollouts whose tokens are sampled over time, each under the version held just then."""

    def __init__(self, plan: Plan, rng: random.Random, generated: Counter[str]) -> None:
        self.version = -1
        self._plan = plan
        self._rng = rng
        self._generated = generated

    async def rollouts(self, prompt: Prompt) -> list[Rollout]:
        self._generated[prompt.uid] += 1
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
    """Scores, reference logprobs or values after a while; now and then a reward that fails."""

    def __init__(self, plan: Plan, rng: random.Random, stage: str) -> None:
        self._plan = plan
        self._rng = rng
        self._stage = stage
        self._version = -1

    async def load_weights(self, tensors: Mapping[str, Any], version: int) -> None:
        await asyncio.sleep(self._plan.pull_s)
        self._version = version

    async def score(self, experiences: Sequence[Experience]) -> Sequence[Result]:
        await asyncio.sleep(self._rng.uniform(*self._plan.score_s))
        stuck = self._plan.stuck_attempts
        if any(e.uid == "0:1:0" and e.lease.attempt <= stuck for e in experiences):
            await asyncio.Event().wait()
        return [self._one(experience) for experience in experiences]

    def _one(self, experience: Experience) -> Result:
        if self._stage == "reference":
            return {"ref_logprobs": np.zeros(len(experience.columns["token_ids"]), np.float32)}
        if self._stage == "value":
            assert self._version >= experience.admitted_version, "a critic of too old a version"
            return {"values": np.zeros(len(experience.columns["token_ids"]), np.float32)}
        if self._rng.random() < self._plan.fail_rate:
            return RewardError("the verifier is down")
        if self._rng.random() < self._plan.filter_rate:
            return Filtered("all rewards are equal")
        return {"scores": np.zeros(len(experience.columns["lengths"]), np.float32)}


@dataclass
class FakeTrainer:
    """Weights that are a digest of all that was trained: the truth properties are checked against.

    `digests` has the weights of each version, `trained` the rollouts of each step.
    """

    train_s: float = 0.3
    world_size: int = 1
    pace: Pace = STREAMED
    version: int = 0
    weights: int = 0
    trained: dict[int, list[tuple[str, int]]] = field(default_factory=dict)
    digests: dict[int, int] = field(default_factory=dict)
    gradient: list[Round] = field(default_factory=list)
    seen: list[list[tuple[str, int]]] = field(default_factory=list)
    planned: set[str] = field(default_factory=set)
    num_updates: int = 0

    rests_until: int = 0

    def adopt(self, dials: Mapping[str, float]) -> None:
        assert dials == {}

    def rests(self, version: int) -> bool:
        return version < self.rests_until

    async def publish(self, version: int) -> WeightManifest:
        assert version == self.version + 1
        self.version = version
        self.digests[version] = self.weights
        return WeightManifest(version, (), ())

    async def plan(self, uids: Sequence[str], turns: Sequence[Turn]) -> None:
        assert not self.planned
        self.planned = set(uids)
        assert all(uid in self.planned for turn in turns for picks in turn.work for uid, _ in picks)

    async def train_round(self, work: Round, *, epoch: int) -> Mapping[str, float]:
        assert len(work) == self.world_size
        await asyncio.sleep(self.train_s)
        self.gradient.append(work)
        self.seen += [[] for _ in range(epoch + 1 - len(self.seen))]
        picks = [pick for micro_batch in work for pick in micro_batch]
        self.seen[epoch] += picks
        if self.pace.whole_steps:
            assert {uid for uid, _ in picks} <= self.planned
        return {"rollouts": len(picks), "length_max": 1.0}

    async def update(self, sums: Mapping[str, float], version: int | None) -> Update:
        await asyncio.sleep(self.train_s)
        works, self.gradient = self.gradient, []
        assert sums["rollouts"] == sum(len(picks) for work in works for picks in work)
        self.weights = hash((self.weights, tuple(works)))
        self.num_updates += 1
        if version is None:
            return Update({}, None)
        assert version == self.version + 1
        seen, self.seen = self.seen, []
        assert all(sorted(epoch) == sorted(seen[0]) for epoch in seen[1:]), "epochs differ"
        assert self.num_updates == self.pace.epochs * self.pace.mini_batches
        assert self.planned == {uid for uid, _ in seen[0]}
        self.planned, self.num_updates = set(), 0
        self.trained[self.version] = seen[0]
        self.version = version
        self.digests[version] = self.weights
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
class Disk:
    """What survives every process: the logs, and the newest checkpoint."""

    books: MemoryLog
    shards: list[MemoryLog]
    generated: Counter[str] = field(default_factory=Counter)
    state: dict[str, Any] | None = None
    books_cut: int = 0

    @classmethod
    def empty(cls, plan: Plan) -> "Disk":
        return cls(MemoryLog(), [MemoryLog() for _ in range(plan.shards)])


@dataclass
class Stream:
    """A stream that has run: its books, what was trained, when."""

    plan: Plan
    disk: Disk
    control: Control
    queue: ExperienceQueue
    shards: list[LocalShard]
    trainers: dict[str, FakeTrainer]
    dataflow: Dataflow
    rng: random.Random
    outcomes: list[StepOutcome] = field(default_factory=list)
    step_ends: list[float] = field(default_factory=list)
    recorders: dict[str, SpanRecorder] = field(default_factory=dict)
    ended: list[tuple[str, Ended]] = field(default_factory=list)
    stalls: list[Overdue] = field(default_factory=list)
    loops: dict[str, list["asyncio.Task[None]"]] = field(default_factory=dict)
    start_generator: Callable[[int], None] = lambda index: None

    @property
    def trainer(self) -> FakeTrainer:
        return self.trainers[POLICY]

    @property
    def ledger(self) -> Ledger:
        return self.control.admission.ledger

    def checkpoint(self) -> None:
        """Between two steps, as Durability does it."""
        self.disk.state = {
            "ledger": self.ledger.state_dict(),
            "drawn": self.control.prompts.state_dict()["drawn"],
            "trainers": {role: (t.version, t.weights) for role, t in self.trainers.items()},
        }
        self.disk.books_cut = len(self.disk.books.records)


def build_stream(plan: Plan, disk: Disk | None = None, *, session: str = "first") -> Stream:
    """Shards, books and trainer of a plan as the disk has them; needs a running loop."""
    disk = disk or Disk.empty(plan)
    disk.books = disk.books.crash()
    further = {"ref_logprobs": plan.reference, "values": plan.critic}
    dataflow = dataflow_for((*STREAM_COLUMNS, *(name for name, asked in further.items() if asked)))
    ports = {call.stage: Ports(call.needs, call.produces) for call in dataflow.takers}
    config = QueueConfig(
        shards=plan.shards,
        lease_s=plan.lease_s,
        max_attempts=plan.max_attempts,
        hedge_s=plan.hedge_s,
    )
    lead = plan.max_staleness if plan.depth is None else plan.depth
    room = plan.room_steps * plan.groups_per_step * GROUP_BYTES
    bounds = Bounds((lead + 1) * plan.groups_per_step, room, GROUP_BYTES)
    rng = random.Random(f"{plan.seed}/{session}")
    disk.shards = [log.crash() for log in disk.shards]
    shards = [
        LocalShard(
            ports,
            config,
            bounds,
            log=log,
            session=session,
            repeats=lambda: rng.random() < plan.duplicate_rate,
            loses=lambda: rng.random() < plan.lost_rate,
        )
        for log in disk.shards
    ]
    state = disk.state
    pace = replace(plan.pace, mini_batches=min(plan.pace.mini_batches, plan.groups_per_step))
    trainer = FakeTrainer(plan.train_s, plan.world_size, pace)
    trainers = {POLICY: trainer}
    if plan.critic:
        trainer.rests_until = plan.rests
        # Another pace would do as well: ranks, and time, of its own.
        trainers[CRITIC] = FakeTrainer(2 * plan.train_s, 3 - plan.world_size, pace)
    prompts = FakePrompts()
    if state is not None:
        for role, (version, weights) in state["trainers"].items():
            trainers[role].version, trainers[role].weights = version, weights
        prompts.drawn = state["drawn"]
    records = disk.books.records[disk.books_cut :]
    found = recover_books(records, state["ledger"] if state else None, debug=True)
    assert [prompt.uid for prompt in prompts.draw(len(found.drawn))] == list(found.drawn)
    admission = Admission(
        found.ledger,
        depth=lead,
        groups_per_step=plan.groups_per_step,
        capacity_groups=bounds.groups,
        total_groups=plan.steps * plan.groups_per_step,
        version=trainer.version,
    )
    assembler = StepAssembler(
        max_staleness=plan.max_staleness,
        groups_per_step=plan.groups_per_step,
        drops_stale=plan.on_stale == "drop",
    )
    control = Control(
        admission,
        assembler,
        Books(found.ledger, disk.books, found.steps),
        {role: WeightRegistry(keep_versions=2) for role in trainers},
        Dials(AlgorithmConfig().settings(max_length=8, reward_weights={})),
        prompts,
        max_attempts=plan.max_attempts,
        readmits=plan.readmits,
        max_filtered=plan.max_filtered,
    )
    stream = Stream(
        plan=plan,
        disk=disk,
        control=control,
        queue=ExperienceQueue(shards, "coordinator"),
        shards=shards,
        trainers=trainers,
        dataflow=dataflow,
        rng=rng,
    )
    control.on_end = lambda uid, how: stream.ended.append((uid, how))
    control.on_stall = stream.stalls.extend
    return stream


async def run_stream(plan: Plan, *, disturb: "Disturb | None" = None) -> Stream:
    """Run all loops of a plan to the end of its last step."""
    stream = build_stream(plan)
    await stream.control.reconcile(stream.queue)
    await run_loops(stream, disturb=disturb)
    return stream


Disturb = Callable[[Stream], Coroutine[Any, Any, None]]
"""Something that goes on beside the stream and harms it."""


async def run_loops(
    stream: Stream, *, disturb: Disturb | None = None, checkpoint_every: int = 0
) -> None:
    """All loops of a stream, to the end of its last step."""
    plan, clock = stream.plan, asyncio.get_running_loop().time
    config = PipelineConfig(
        max_staleness=plan.max_staleness,
        depth=plan.depth,
        on_stale=plan.on_stale,
        groups_per_step=plan.groups_per_step,
        micro_batch_tokens=plan.micro_batch_tokens,
        stall_s=plan.stall_s,
        on_stall=plan.on_stall,
    )
    stage = StageMaker(stream)

    async def report(outcome: StepOutcome) -> None:
        stream.outcomes.append(outcome)
        stream.step_ends.append(clock())
        due = checkpoint_every and (outcome.version + 1) % checkpoint_every == 0
        if due and not stream.control.books.steps:
            stream.checkpoint()

    version = stream.trainer.version
    for registry in stream.control.registries.values():
        registry.offer(WeightManifest(version, (), ()))
    for i in range(plan.generators):
        start_generator(stream, stage, i)
    for call in stream.dataflow.of_kind(Kind.SCORE):
        for i in range(plan.scorers):
            start_scorer(stream, stage, call, i)
    stream.start_generator = lambda i: start_generator(stream, stage, i)
    loops = [
        asyncio.create_task(admit(stream.control, stream.queue)),
        asyncio.create_task(watch_stalls(stream.control, stream.queue, config)),
    ]
    if disturb is not None:
        loops.append(asyncio.create_task(disturb(stream)))
    training = asyncio.create_task(
        train(*(stage("train", "trainer"), stream.control, stream.trainers, config), report=report)
    )
    try:
        while not training.done():
            running = [t for own in stream.loops.values() for t in own] + loops
            await first_of([training, *running])
        await training
    finally:
        everything = [training, *loops, *(t for own in stream.loops.values() for t in own)]
        for loop in everything:
            loop.cancel()
        await asyncio.gather(*everything, return_exceptions=True)


async def first_of(tasks: Sequence["asyncio.Task[None]"]) -> None:
    """Wait until one of those that still run has ended; its error is raised."""
    running = [task for task in tasks if not task.done()]
    done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        if not task.cancelled():
            task.result()


class StageMaker:
    """Gives every process its place in a stream, with a client of its own."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._arbiter = Arbiter(timeout_s=stream.plan.stall_s)

    def __call__(self, name: str, process: str) -> Stage:
        stream, clock = self._stream, asyncio.get_running_loop().time
        shared = stream.plan.one_at_a_time
        lease = SharedLease(self._arbiter, process) if shared else FreeLease()
        stream.recorders[process] = SpanRecorder(process, clock)
        queue = ExperienceQueue(stream.shards, process)
        return Stage(name, queue, lease, stream.recorders[process])


def start_scorer(
    stream: Stream, stage: Callable[[str, str], Stage], call: Call, index: int
) -> None:
    """A scorer; if it is a shadow, with the loop that follows its model."""
    name, plan, held = f"{call.stage}-{index}", stream.plan, None
    scorer, place = FakeScorer(plan, stream.rng, call.stage), stage(call.stage, name)
    own = stream.loops[name] = []
    if call.role in FOLLOWED:
        held = HeldVersion(name)
        channel = LocalChannel(stream.control.registries[FOLLOWED[call.role]], name)
        own.append(asyncio.create_task(follow_weights(place, scorer, channel, held)))
    serving = Serving(call.needs, slots=4, batch=2)
    scoring = score(place, scorer, serving, held=held, stall_s=plan.stall_s)
    own.append(asyncio.create_task(scoring))


def start_generator(stream: Stream, stage: Callable[[str, str], Stage], index: int) -> None:
    """A generator, or the one that takes the place of a dead one: it holds no version yet."""
    name, plan = f"generator-{index}", stream.plan
    generator, held = FakeGenerator(plan, stream.rng, stream.disk.generated), HeldVersion(name)
    place = stage("generate", name)
    channel = LocalChannel(stream.control.registries[POLICY], name)
    stream.loops[name] = [
        asyncio.create_task(follow_weights(place, generator, channel, held)),
        asyncio.create_task(generate(place, generator, held, slots=3, stall_s=plan.stall_s)),
    ]

"""A run with empty engines: the real coordinator, shards and loops on a virtual clock.

Every actor is an object of this process; `CpuMeter` adds up the CPU time of each part.
"""

import asyncio
import random
import time
from collections import Counter, defaultdict
from collections.abc import (
    Callable,
    Coroutine,
    Generator,
    Mapping,
    Sequence,
)
from contextvars import Context, ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from benchmarks.command import BenchmarkError
from streamrl.actors.actor_context import ActorContext, ActorReport
from streamrl.actors.coordination.coordinator import CoordinatorActor
from streamrl.actors.coordination.role_actors import RoleActors
from streamrl.actors.engine_factory import RealEngineFactory
from streamrl.actors.transport.ray_calls import RAY_ACCESS, await_reply
from streamrl.buffer import ExperienceQueue, QueueShard, ShardCapacity, StageSchema
from streamrl.buffer.encoding import join_pieces
from streamrl.buffer.group import ShardState
from streamrl.buffer.journal import JournalRecord, RecordLog, encode_record
from streamrl.buffer.micro_batch_schedule import MicroBatch
from streamrl.config.run_config import RunConfig
from streamrl.data.prompt_stream import SkippedRows
from streamrl.dataflow import GENERATE_CALL, POLICY, REWARD_CALL, CallKind, ModelCall
from streamrl.messages import (
    Columns,
    Experience,
    FilteredGroup,
    FinishReason,
    Prompt,
    Rollout,
    make_uid,
    rollouts_to_columns,
)
from streamrl.pipeline import (
    follow_weights,
    generate_rollouts,
    hold_devices_per_group,
    score_groups,
)
from streamrl.stream.device_lease import DedicatedDeviceLease
from streamrl.stream.protocols import FinishedCallback, StageContext
from streamrl.stream.stage_worker import (
    ConcurrencyLimit,
    InFlightWork,
    StageResult,
    read_no_partials,
)
from streamrl.telemetry.spans import SpanRecorder
from streamrl.user_code.service_gate import Outage
from streamrl.weights import ServedVersion, WeightLoadStats, WeightManifest
from streamrl.weights.transport import TransportSpec
from streamrl.weights.versions import FetchedWeights, FollowerState

P = ParamSpec("P")
T = TypeVar("T")
COORDINATOR, QUEUE, WEIGHTS, REPLICAS = "coordinator", "queue", "weights", "replicas"
CURRENT_PART: ContextVar[str] = ContextVar("part", default=REPLICAS)
COMPLETION_TOKENS = 8


class CpuMeter:
    """CPU seconds of each part of a program on one event loop, exclusive of the parts it calls."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()
        self._part = REPLICAS
        self._since = time.thread_time()

    def reset(self) -> None:
        self._switch_part(self._part)
        self.seconds.clear()
        self.calls.clear()

    def read(self) -> tuple[dict[str, float], dict[str, int]]:
        """Return the seconds and the calls of each part since the last `reset`."""
        self._switch_part(self._part)
        return dict(self.seconds), dict(self.calls)

    def _switch_part(self, part: str) -> str:
        """Charge the time since the last switch to the part that used it; return that part."""
        now = time.thread_time()
        self.seconds[self._part] += now - self._since
        previous, self._part, self._since = self._part, part, now
        return previous

    @coroutine
    def _drive(self, part: str, work: Coroutine[Any, Any, T]) -> Generator[Any, Any, T]:
        value, error = None, None
        while True:
            previous = self._switch_part(part)
            try:
                awaited = work.send(value) if error is None else work.throw(error)
            except StopIteration as stop:
                return stop.value  # type: ignore[no-any-return]
            finally:
                self._switch_part(previous)
            try:
                value, error = (yield awaited), None
            except BaseException as raised:  # noqa: BLE001 - passed on to the coroutine
                error = raised

    async def charge(self, part: str, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine, and the tasks that it starts, at the expense of a part."""
        self.calls[part] += 1
        token = CURRENT_PART.set(part)
        try:
            return await self._drive(part, work)
        finally:
            CURRENT_PART.reset(token)

    async def _run_task(self, part: str, work: Coroutine[Any, Any, T]) -> T:
        return await self._drive(part, work)

    def make_task(
        self,
        loop: asyncio.AbstractEventLoop,
        work: Coroutine[Any, Any, T],
        context: Context | None = None,
    ) -> "asyncio.Task[T]":
        """Make the task of an event loop; its creator's part pays."""
        return asyncio.Task(self._run_task(CURRENT_PART.get(), work), loop=loop, context=context)


class LocalHandle:
    """Handle of an object of this process, used like the handle of a Ray actor."""

    def __init__(self, target: Any, meter: CpuMeter, part: str) -> None:
        self._target, self._meter, self._part = target, meter, part

    def __getattr__(self, name: str) -> "LocalMethod":
        return LocalMethod(getattr(self._target, name), self._meter, self._part)


@dataclass(frozen=True)
class LocalMethod:
    """Method of a LocalHandle; `remote` starts a call."""

    method: Callable[..., Coroutine[Any, Any, Any]]
    meter: CpuMeter
    part: str

    def remote(self, *args: Any, **kwargs: Any) -> "asyncio.Task[Any]":
        return asyncio.ensure_future(self.meter.charge(self.part, self.method(*args, **kwargs)))


class MeteredShard:
    """ShardProxy of a shard in this process."""

    def __init__(self, shard: QueueShard, meter: CpuMeter) -> None:
        self._shard, self._meter = shard, meter

    async def call(
        self,
        method: Callable[Concatenate[QueueShard, P], Coroutine[Any, Any, T]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        return await self._meter.charge(QUEUE, method(self._shard, *args, **kwargs))


class UnwrittenLog(RecordLog):
    """Record log that encodes records, but writes none: virtual time cannot wait for a disk."""

    def __init__(self) -> None:
        self._num_bytes = self.num_appends = 0

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    async def append(self, records: Sequence[JournalRecord], *, sync: bool = True) -> None:
        self.num_appends += 1
        self.append_nowait(records)

    def append_nowait(self, records: Sequence[JournalRecord]) -> None:
        for record in records:
            self._num_bytes += len(encode_record(record)[0])


class EndlessPrompts:
    """Prompts of three tokens."""

    def __init__(self) -> None:
        self._num_drawn = 0
        self._token_ids = np.array([1, 2, 3], np.int32)

    async def prefetch_prompts(self, count: int) -> None:
        pass

    def draw_prompts(self, count: int) -> list[Prompt]:
        first, self._num_drawn = self._num_drawn, self._num_drawn + count
        return [self.get_prompt(make_uid(0, index)) for index in range(first, self._num_drawn)]

    def get_prompt(self, uid: str) -> Prompt:
        return Prompt(uid, self._token_ids)

    def take_skipped(self) -> SkippedRows:
        return SkippedRows()

    def state_dict(self) -> Mapping[str, Any]:
        return {"drawn": self._num_drawn}


@dataclass(frozen=True)
class RunShape:
    """Sizes of a virtual run; times are virtual seconds.

    slots: groups at once of a generator. steps: measured ones; two more run.
    generate_s: shortest and longest time of a group. train_s: time of a round.
    filtered: fraction of the groups that the reward filters.
    """

    groups_per_step: int
    generators: int
    slots: int
    steps: int = 1
    rollouts: int = 4
    ranks: int = 8
    scorers: int = 8
    pull_s: float = 0.5
    generate_s: tuple[float, float] = (1.0, 9.0)
    train_s: float = 0.01
    filtered: float = 0.0


class EmptyRank:
    """Trainer rank without a model; reads the columns that it would train."""

    def __init__(
        self, shards: Sequence[Any], name: str, shape: RunShape, columns: Sequence[str]
    ) -> None:
        self._queue = ExperienceQueue(shards, name)
        self._train_s, self._columns = shape.train_s, columns
        self.on_update: Callable[[], None] = lambda: None

    async def train_micro_batch(
        self, rollouts: MicroBatch, epoch: int, version: int, params: Mapping[str, float]
    ) -> Mapping[str, float]:
        await self._queue.read_columns(dict.fromkeys(uid for uid, _ in rollouts), self._columns)
        await asyncio.sleep(self._train_s)
        count = float(len(rollouts))
        sums = dict.fromkeys(("score_sum", "score_squared_sum", "truncated_sum"), 0.0)
        sums |= {"groups": count, "equal_score_groups": 0.0}
        tokens = {"sampled_sum": COMPLETION_TOKENS * count, "sampled_max": float(COMPLETION_TOKENS)}
        return {"rollouts": count, "included": count, **sums, **tokens}

    async def update(self, sums: Mapping[str, float], version: int) -> Mapping[str, float]:
        self.on_update()
        return {"policy/grad_norm": 0.0}

    async def publish_weights(
        self, version: int, followers: Sequence[str], has_check: bool
    ) -> WeightManifest:
        return WeightManifest(version, (), ())

    async def collect_report(self) -> ActorReport:
        return ActorReport("trainer", ())


@dataclass
class ManifestChannel:
    """Weight channel of a follower to the coordinator; no tensors move.

    coordinator: handle with `wait_for_manifest.remote`.
    """

    coordinator: Any
    follower: str
    pull_s: float

    async def wait_for_newer(self, state: FollowerState, *, wait_s: float) -> WeightManifest | None:
        call = self.coordinator.wait_for_manifest.remote(POLICY, self.follower, state, wait_s)
        manifest: WeightManifest | None = await await_reply(call, "wait_for_manifest")
        return manifest

    async def fetch_weights(self, manifest: WeightManifest) -> FetchedWeights:
        await asyncio.sleep(self.pull_s)
        return FetchedWeights({})


class EmptyReplica:
    """Generator or scorer without an engine. The columns of a version are made once."""

    def __init__(self, context: ActorContext, shape: RunShape, call: ModelCall, index: int) -> None:
        self._context, self._shape, self._call, self._index = context, shape, call, index
        self._name = f"{call.role}-{index}"
        self._rng = random.Random(self._name)
        self._spans = SpanRecorder(self._name, asyncio.get_running_loop().time)
        self._columns: Columns = {}

    async def list_outages(self) -> Sequence[Outage]:
        return ()

    async def run(self) -> None:
        """Serve the stage, and follow the weights, until cancelled."""
        call, shape = self._call, self._shape
        queue = ExperienceQueue(self._context.shards, self._name)
        stage = StageContext(call.stage, queue, DedicatedDeviceLease(), self._spans)
        if call.kind is CallKind.SCORE:
            in_flight = InFlightWork(ConcurrencyLimit(64))
            await score_groups(stage, self.score, call.needs, in_flight, 8)
            return
        served = ServedVersion(self._name)
        channel = ManifestChannel(
            self._context.coordinator,
            self._name,
            shape.pull_s,
        )
        limit = ConcurrencyLimit(shape.slots * shape.rollouts, shape.rollouts)
        sample = hold_devices_per_group(stage, self.sample)
        await asyncio.gather(
            follow_weights(stage, self, channel, served),
            generate_rollouts(stage, sample, served, limit=limit, read_partials=read_no_partials),
        )

    async def load_weights(self, tensors: Mapping[str, Any], version: int) -> WeightLoadStats:
        rollout = Rollout.from_single_turn(
            np.array([1, 2, 3], np.int32),
            [5] * COMPLETION_TOKENS,
            logprobs=[-1.0] * COMPLETION_TOKENS,
            versions=[version] * COMPLETION_TOKENS,
            finish_reason=FinishReason.STOP,
        )
        self._columns = rollouts_to_columns([rollout] * self._shape.rollouts)
        return WeightLoadStats()

    async def compute_logprobs(self, sequences: Sequence[Any]) -> None:
        return None

    async def sample(
        self, prompt: Prompt, partials: Columns | None, finished: FinishedCallback
    ) -> Columns:
        await asyncio.sleep(self._rng.uniform(*self._shape.generate_s))
        return self._columns

    async def score(self, experiences: Sequence[Experience]) -> Sequence[StageResult]:
        return [self._score_group() for _ in experiences]

    def _score_group(self) -> StageResult:
        if self._rng.random() < self._shape.filtered:
            return FilteredGroup("all rewards are equal")
        return {"scores": np.ones(self._shape.rollouts, np.float32)}

    async def collect_report(self) -> ActorReport:
        return ActorReport(self._name, self._spans.drain_spans())


def make_context(
    config: RunConfig, run_dir: Path, shards: Sequence[Any], coordinator: Any
) -> ActorContext:
    """Make the context of a run whose actors load no engine."""
    return ActorContext(
        config=config,
        max_length=64,
        model_bytes=dict.fromkeys(config.dataflow.calls_by_role, 0),
        run_dir=run_dir,
        shards=tuple(shards),
        coordinator=coordinator,
        engines=RealEngineFactory(),
        transport=TransportSpec(
            name="store",
            reason="empty engines",
            token="",
            keep_versions=2,
            cluster=RAY_ACCESS,
        ),
    )


def get_stages(config: RunConfig) -> dict[str, StageSchema]:
    """Return the queue's stages."""
    return {
        call.stage: StageSchema(call.needs, call.produces) for call in config.dataflow.queue_calls
    }


def find_train_call(config: RunConfig) -> ModelCall:
    return config.dataflow.select_calls(CallKind.TRAIN)[0]


@dataclass(frozen=True)
class ControlCost:
    """CPU of the measured steps by part, s; calls by part; virtual seconds; writes of the logs."""

    seconds: Mapping[str, float]
    calls: Mapping[str, int]
    virtual_s: float
    num_writes: int


async def run_virtual_steps(config: RunConfig, shape: RunShape, run_dir: Path) -> ControlCost:
    """Run a shape in this process; measure the steps between the first and the last."""
    meter, log = CpuMeter(), UnwrittenLog()
    asyncio.get_running_loop().set_task_factory(meter.make_task)  # type: ignore[arg-type]
    capacity = ShardCapacity(config.capacity_groups)
    shards = [
        MeteredShard(
            QueueShard(
                ShardState(get_stages(config)),
                config.queue,
                capacity=capacity,
                session="one",
                log=log,
                store=join_pieces,
            ),
            meter,
        )
        for _ in range(config.queue.shards)
    ]
    coordinator = CoordinatorActor()
    context = make_context(config, run_dir, shards, LocalHandle(coordinator, meter, WEIGHTS))
    train_call = find_train_call(config)
    ranks = [
        EmptyRank(shards, f"policy-{rank}", shape, train_call.needs) for rank in range(shape.ranks)
    ]
    counts = {GENERATE_CALL: shape.generators, REWARD_CALL: shape.scorers}
    calls = {call.stage: call for call in config.dataflow.calls}
    replicas = {
        call.stage: [EmptyReplica(context, shape, calls[call.stage], i) for i in range(count)]
        for call, count in counts.items()
    }
    costs: list[ControlCost] = []
    marks: list[float] = []

    def mark_update() -> None:
        marks.append(asyncio.get_running_loop().time())
        if len(marks) == 1:
            meter.reset()
            log.num_appends = 0
        elif len(marks) == 1 + shape.steps:
            costs.append(ControlCost(*meter.read(), marks[-1] - marks[0], log.num_appends))

    ranks[0].on_update = mark_update
    roles = [
        make_local_role(train_call, ranks, meter),
        *(make_local_role(calls[stage], group, meter) for stage, group in replicas.items()),
    ]
    prompts: Any = EndlessPrompts()
    await meter.charge(COORDINATOR, coordinator.start(context, roles, prompts, {}, None))
    training = asyncio.create_task(meter.charge(COORDINATOR, coordinator.run()))
    loops = [asyncio.create_task(one.run()) for group in replicas.values() for one in group]
    loops.append(asyncio.create_task(read_reports(LocalHandle(coordinator, meter, COORDINATOR))))
    try:
        await asyncio.wait({training, *loops}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for loop in loops:
            loop.cancel()
    ended = await asyncio.gather(*loops, return_exceptions=True)
    if not training.done():
        raise BenchmarkError(f"a loop of the run ended: {ended}")
    training.result()
    return costs[0]


def make_local_role(call: ModelCall, members: Sequence[Any], meter: CpuMeter) -> RoleActors:
    """Make the role of objects of this process."""
    names = [f"{call.role}-{i}" for i in range(len(members))]
    return RoleActors([call], names, [LocalHandle(one, meter, REPLICAS) for one in members])


async def read_reports(coordinator: Any) -> None:
    """Read the coordinator's reports, as the driver does."""
    num_seen = 0
    while True:
        num_seen += len(await coordinator.read_reports.remote(num_seen, 1.0))

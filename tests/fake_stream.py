"""A whole stream in one process: real loops, queue and run log, with fake engines and a virtual
clock."""

import asyncio
import copy
import itertools
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from hypothesis import strategies as st

from streamrl.algorithms import ALGORITHMS, AlgorithmConfig
from streamrl.algorithms.adaptive_params import AdaptiveParams
from streamrl.buffer import (
    AdmissionController,
    ExperienceQueue,
    Ledger,
    QueueConfig,
    RunLog,
    ShardCapacity,
    StageSchema,
    StepAssembler,
)
from streamrl.buffer.micro_batch_schedule import UpdatePlan
from streamrl.buffer.run_log import recover_run_log
from streamrl.buffer.shard import OverdueLease
from streamrl.buffer.staleness_credits import MAX_FACTOR, OversamplingController
from streamrl.config.resume_checks import redraw_prompts
from streamrl.data.prompt_stream import PromptStream
from streamrl.data.replays import ReplayConfig, ReplayStore
from streamrl.dataflow import (
    CRITIC,
    EMA_REFERENCE,
    GENERATE_CALL,
    POLICY,
    CallKind,
    Dataflow,
    ModelCall,
    build_dataflow,
)
from streamrl.messages import ROLLOUT_COLUMNS, GroupOutcome
from streamrl.pipeline import (
    admit_prompts,
    follow_weights,
    generate_rollouts,
    score_groups,
    train_policy,
    watch_stalls,
)
from streamrl.stream.device_lease import DedicatedDeviceLease, DeviceArbiter, SharedDeviceLease
from streamrl.stream.protocols import StageContext, StepResult
from streamrl.stream.run_state import PipelineConfig, RunState
from streamrl.stream.stage_worker import ConcurrencyLimit, InFlightWork, read_no_partials
from streamrl.stream.weight_publisher import PublishFunction, WeightPublisher
from streamrl.telemetry.spans import SpanRecorder
from streamrl.weights import ServedVersion
from streamrl.weights.versions import WeightRegistry
from tests.fake_episodes import FakeEpisodeGenerator
from tests.fake_shards import LocalShard, MemoryLog
from tests.fakes import (
    GROUP_BYTES,
    PROBE,
    FakeGenerator,
    FakePrompts,
    FakeReference,
    FakeScorer,
    FakeTrainer,
    LocalChannel,
    Plan,
    make_manifest,
)

PACES = (UpdatePlan(), UpdatePlan(True), UpdatePlan(True, 2, 1), UpdatePlan(True, 1, 2))
GROUPS_AT_ONCE = 3
"""Concurrent groups of a generator by default."""
STREAM_COLUMNS = (*ROLLOUT_COLUMNS, "scores")


EPISODES: dict[str, st.SearchStrategy[Any]] = {
    "max_turns": st.integers(1, 4),
    "environment_s": st.sampled_from([(0.0, 0.1), (0.5, 20.0), (5.0, 60.0)]),
    # Fits the longest episode.
    "micro_batch_tokens": st.integers(50, 200),
    "greedy": st.just(False),
}
"""Overrides of `draw_plans` for runs with an environment."""


def draw_plans(**overrides: st.SearchStrategy[Any]) -> st.SearchStrategy[Plan]:
    """Draw plans of short runs of any shape and speed; `overrides` adds or replaces fields."""
    drawn = {
        "seed": st.integers(0, 100_000),
        "steps": st.integers(1, 5),
        "groups_per_step": st.integers(1, 6),
        "group_size": st.integers(1, 3),
        "max_staleness": st.integers(0, 3),
        "generators": st.integers(1, 3),
        "scorers": st.integers(1, 2),
        "dp_size": st.integers(1, 2),
        "pace": st.sampled_from([UpdatePlan(), *PACES]),
        "micro_batch_tokens": st.integers(11, 120),
        "generate_s": st.sampled_from([(0.0, 0.1), (0.5, 2.0), (0.1, 20.0)]),
        "score_s": st.sampled_from([(0.0, 0.0), (0.1, 0.5), (1.0, 5.0)]),
        "train_s": st.sampled_from([0.0, 0.3, 3.0]),
        "pull_s": st.sampled_from([0.0, 0.5, 4.0]),
        "publish_every": st.integers(1, 4),
        "fail_rate": st.sampled_from([0.0, 0.2]),
        "reference": st.booleans(),
        "critic": st.booleans(),
        "greedy": st.booleans(),
        "critic_warmup_steps": st.integers(0, 2),
        "capacity_steps": st.sampled_from([float("inf"), 1.0, 1.5]),
    }
    return st.builds(Plan, **{**drawn, **overrides}).map(
        lambda plan: replace(plan, publish_every=min(plan.publish_every, plan.max_staleness + 1))
    )


@dataclass
class Disk:
    """State that survives all processes: the logs and the newest checkpoint."""

    books: MemoryLog
    shards: list[MemoryLog]
    generated: Counter[str] = field(default_factory=Counter)
    computed: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Groups computed by each stage except `generate`."""
    state: dict[str, Any] | None = None
    books_cut: int = 0

    @classmethod
    def empty(cls, plan: Plan) -> "Disk":
        return cls(MemoryLog(), [MemoryLog() for _ in range(plan.shards)])


@dataclass
class Stream:
    """A stream with its run state, processes, trained steps and their end times."""

    plan: Plan
    disk: Disk
    control: RunState
    queue: ExperienceQueue
    shards: list[LocalShard]
    trainers: dict[str, FakeTrainer]
    dataflow: Dataflow
    rng: random.Random
    outcomes: list[StepResult] = field(default_factory=list)
    step_ends: list[float] = field(default_factory=list)
    recorders: dict[str, SpanRecorder] = field(default_factory=dict)
    ended: list[tuple[str, GroupOutcome]] = field(default_factory=list)
    stalls: list[OverdueLease] = field(default_factory=list)
    loops: dict[str, list["asyncio.Task[None]"]] = field(default_factory=dict)
    start_generator: Callable[[int], None] = lambda index: None
    leaving: dict[str, asyncio.Event] = field(default_factory=dict)
    samplers: list[FakeGenerator] = field(default_factory=list)

    @property
    def trainer(self) -> FakeTrainer:
        return self.trainers[POLICY]

    @property
    def ledger(self) -> Ledger:
        return self.control.admission.ledger

    def checkpoint(self) -> None:
        """Save a checkpoint between two steps, like RunPersistence."""
        self.disk.state = {
            "ledger": self.ledger.state_dict(),
            **copy.deepcopy(self.control.prompt_source.state_dict()),
            "trainers": {
                role: (self.control.admission.version, trainer.weights)
                for role, trainer in self.trainers.items()
            },
        }
        self.disk.books_cut = len(self.disk.books.records)


def make_trainers(plan: Plan) -> dict[str, FakeTrainer]:
    """Make the trainers by role: the policy's, and the critic's if the plan has a critic."""
    pace = replace(
        plan.pace, num_mini_batches=min(plan.pace.num_mini_batches, plan.groups_per_step)
    )
    trainer = FakeTrainer(plan.train_s, plan.dp_size, pace, publish_s=plan.publish_s)
    trainer.weight_bytes = plan.weight_bytes
    trainer.probe = PROBE if plan.broken_version >= 0 else None
    trainers = {POLICY: trainer}
    if plan.critic:
        trainer.frozen_until = plan.critic_warmup_steps
        # The critic's number of ranks and its round time differ from the policy's.
        trainers[CRITIC] = FakeTrainer(2 * plan.train_s, 3 - plan.dp_size, pace)
    return trainers


def make_publishing(plan: Plan, trainers: dict[str, FakeTrainer]) -> WeightPublisher:
    """Make a publisher of every trainer, and of an EMA reference if the plan has a reference."""
    sources: dict[str, PublishFunction] = {
        role: trainer.publish_weights for role, trainer in trainers.items()
    }
    if plan.reference:
        reference = FakeReference(trainers[POLICY], 3 * plan.publish_s)
        sources[EMA_REFERENCE] = reference.publish_weights
    registries = {role: WeightRegistry(keep_versions=2) for role in sources}

    def due(role: str, version: int) -> bool:
        if role == EMA_REFERENCE:
            return version % 2 == 0
        return version % plan.publish_every == 0 or version == plan.steps

    return WeightPublisher(sources, registries, due=due)


def dataflow_of(plan: Plan) -> Dataflow:
    """Build the dataflow of a plan."""
    optional = {
        "ref_logprobs": plan.reference,
        "values": plan.critic,
        "baseline_scores": plan.greedy,
    }
    columns = (*STREAM_COLUMNS, *(name for name, is_enabled in optional.items() if is_enabled))
    return build_dataflow(
        columns,
        has_filter=plan.filter_rate > 0,
        source="episodes" if plan.max_turns > 0 else "generator",
    )


def build_stream(plan: Plan, disk: Disk | None = None, *, session: str = "first") -> Stream:
    """Build the stream of a plan from the logs and checkpoint on `disk`; needs a running loop."""
    disk = disk or Disk.empty(plan)
    disk.books = disk.books.crash()
    dataflow = dataflow_of(plan)
    ports = {call.stage: StageSchema(call.needs, call.produces) for call in dataflow.queue_calls}
    config = QueueConfig(
        shards=plan.shards,
        lease_s=plan.lease_s,
        max_attempts=plan.max_attempts,
    )
    lead = plan.max_staleness if plan.depth is None else plan.depth
    oversampling = OversamplingController(plan.oversample, groups_per_step=plan.groups_per_step)
    factor = MAX_FACTOR if plan.oversample is None else plan.oversample
    capacity_bytes = plan.capacity_steps * plan.groups_per_step * GROUP_BYTES
    bounds = ShardCapacity(
        math.ceil(factor * (lead + 1) * plan.groups_per_step), capacity_bytes, GROUP_BYTES
    )
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
    trainers, replays = make_trainers(plan), None
    if plan.rows and plan.replay_frac:
        replay = ReplayConfig(plan.replay_frac, plan.replay_size, plan.replay_age)
        replays = ReplayStore(replay, seed=1, max_lead=plan.max_staleness)
    prompts = FakePrompts(rows=plan.rows, replays=replays)
    if state is not None:
        for role, (version, weights) in state["trainers"].items():
            trainers[role].version, trainers[role].weights = version, weights
        prompts.drawn = state["drawn"]
        if prompts.pass_rates is not None:
            prompts.pass_rates.load_state_dict(state["pass_rates"])
        if replays is not None:
            replays.load_state_dict(state["replays"])
    records = disk.books.records[disk.books_cut :]
    recovered = recover_run_log(records, state["ledger"] if state else None)
    redraw_prompts(cast(PromptStream, prompts), recovered.stream_events, Path("run"))
    admission = AdmissionController(
        recovered.ledger,
        depth=lead,
        groups_per_step=plan.groups_per_step,
        capacity_groups=bounds.max_groups,
        total_groups=plan.steps * plan.groups_per_step,
        version=trainers[POLICY].version,
        oversampling=oversampling,
    )
    assembler = StepAssembler(
        max_staleness=plan.max_staleness,
        groups_per_step=plan.groups_per_step,
        drops_stale=plan.on_stale == "drop",
        oversampling=oversampling,
    )
    control = RunState(
        admission,
        assembler,
        RunLog(recovered.ledger, disk.books, recovered.steps_to_replay),
        make_publishing(plan, trainers),
        AdaptiveParams(
            ALGORITHMS["grpo"], AlgorithmConfig().to_settings(max_length=8, reward_weights={})
        ),
        prompts,
        pass_rates=prompts.pass_rates,
        replays=replays,
        max_attempts=plan.max_attempts,
        should_readmit_failed=plan.readmits,
        max_filtered=plan.max_filtered,
        max_dropped=plan.max_dropped,
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
    control.on_group_finished = lambda uid, how: stream.ended.append((uid, how))
    control.on_stall = lambda overdue, waits: stream.stalls.extend(overdue)
    return stream


async def run_stream(
    plan: Plan,
    *,
    disturb: "Disturb | None" = None,
) -> Stream:
    """Run all loops of a plan to the end of its last step."""
    stream = build_stream(plan)
    await run_loops(stream, disturb=disturb)
    return stream


Disturb = Callable[[Stream], Coroutine[Any, Any, None]]
"""Coroutine that runs beside a stream and disturbs it."""


async def run_loops(
    stream: Stream, *, disturb: Disturb | None = None, checkpoint_every: int = 0
) -> None:
    """Reconcile the queue, then run all loops of a stream to the end of its last step."""
    await stream.control.reconcile_queue(stream.queue)
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

    async def report(outcome: StepResult) -> None:
        stream.outcomes.append(outcome)
        stream.step_ends.append(clock())
        due = checkpoint_every and (outcome.version + 1) % checkpoint_every == 0
        if due and not stream.control.run_log.steps_to_replay:
            stream.checkpoint()

    version = stream.trainer.version
    for registry in stream.control.publisher.registries.values():
        registry.add_manifest(make_manifest(version, plan.weight_bytes, None))
    for i in range(plan.generators):
        start_generator(stream, stage, i)
    for call in stream.dataflow.select_calls(CallKind.SCORE):
        for i in range(plan.scorers):
            start_scorer(stream, stage, call, i)
    stream.start_generator = lambda i: start_generator(stream, stage, i)
    loops = [
        asyncio.create_task(admit_prompts(stream.control, stream.queue)),
        asyncio.create_task(watch_stalls(stream.control, stream.queue, config)),
    ]
    if disturb is not None:
        loops.append(asyncio.create_task(disturb(stream)))
    train_stage = stage("train", "trainer")
    stream.trainer.spans = train_stage.spans
    training = asyncio.create_task(
        train_policy(train_stage, stream.control, stream.trainers, config, report=report)
    )
    loops.append(training)
    try:
        while not training.done():
            await wait_for_first([*itertools.chain(loops, *stream.loops.values())])
    finally:
        everything = [*itertools.chain(loops, *stream.loops.values())]
        for loop in everything:
            loop.cancel()
        await asyncio.gather(*everything, return_exceptions=True)


async def wait_for_first(tasks: Sequence["asyncio.Task[None]"]) -> None:
    """Wait until one of the running tasks has ended; raise its error."""
    running = [task for task in tasks if not task.done()]
    done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        if not task.cancelled():
            task.result()


class StageMaker:
    """Maker of the stage contexts of every process, each with its own queue client."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._arbiter = DeviceArbiter(
            timeout_s=stream.plan.stall_s, progress_clock=stream.control.progress_clock
        )

    def __call__(self, name: str, process: str) -> StageContext:
        stream, clock = self._stream, asyncio.get_running_loop().time
        shared = stream.plan.one_at_a_time
        stream.leaving.setdefault(process, asyncio.Event())
        lease = SharedDeviceLease(self._arbiter, process) if shared else DedicatedDeviceLease()
        stream.recorders[process] = SpanRecorder(process, clock)
        max_renew_interval_s = math.inf if stream.plan.oversample == 1.0 else 1.0
        queue = ExperienceQueue(stream.shards, process, max_renew_interval_s=max_renew_interval_s)
        leaving = stream.leaving[process]
        return StageContext(name, queue, lease, stream.recorders[process], leaving)


def start_scorer(
    stream: Stream, stage: Callable[[str, str], StageContext], call: ModelCall, index: int
) -> None:
    """Start a scorer; if its model follows a trained role, also the loop that pulls versions."""
    name, plan, served = f"{call.stage}-{index}", stream.plan, None
    scorer, context = FakeScorer(plan, stream.rng, call.stage), stage(call.stage, name)
    scorer.computed = stream.disk.computed[call.stage]
    loops = stream.loops[name] = []
    if call.followed_role:
        served = ServedVersion(name)
        channel = LocalChannel(stream.control.publisher.registries[call.followed_role], name)
        loops.append(asyncio.create_task(follow_weights(context, scorer, channel, served)))
    in_flight = InFlightWork(ConcurrencyLimit(4))
    scoring = score_groups(context, scorer.score, call.needs, in_flight, 2, served=served)
    loops.append(asyncio.create_task(scoring))


def start_generator(stream: Stream, stage: Callable[[str, str], StageContext], index: int) -> None:
    """Start a generator, or restart a dead one: it serves no version yet."""
    name, plan = f"generator-{index}", stream.plan
    stream.leaving[name] = asyncio.Event()
    kind = FakeEpisodeGenerator if plan.max_turns else FakeGenerator
    generator, served = kind(plan, stream.rng, stream.disk.generated), ServedVersion(name)
    generator.computed = stream.disk.computed["greedy"]
    channel = LocalChannel(stream.control.publisher.registries[POLICY], name)
    stream.samplers.append(generator)
    follow = follow_weights(stage("generate", name), generator, channel, served)
    loops = stream.loops[name] = [asyncio.create_task(follow)]
    for call in stream.dataflow.select_calls(CallKind.GENERATE):
        context = stage(call.stage, name)
        sample = generator.make_sample_function(context)
        read_partials = (
            generator.read_partials if call.stage == GENERATE_CALL.stage else read_no_partials
        )
        limit = ConcurrencyLimit(plan.slots or GROUPS_AT_ONCE * plan.group_size, plan.group_size)
        loop = generate_rollouts(context, sample, served, limit=limit, read_partials=read_partials)
        loops.append(asyncio.create_task(loop))


async def drain_generator(stream: Stream, index: int) -> None:
    """Drain a generator as its actor does: finish groups in flight, then stop following."""
    name = f"generator-{index}"
    follow, *stages = stream.loops[name]
    stream.leaving[name].set()
    await asyncio.wait(stages)
    follow.cancel()
    await stream.queue.release_holder(name, died=False)
    stream.control.publisher.registries[POLICY].remove_follower(name)

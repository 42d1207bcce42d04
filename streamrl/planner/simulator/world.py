"""Processes and control of a simulated run: replicas, trainers, coordinator state and queue.

The simulation runs the real admission and training loops, the real `RunState` with its admission
control, ledger, step assembly and weight publisher, the real micro-batch schedule and the real
device arbiter. Computation and transfers are replaced by timers.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import cast

from streamrl.algorithms import ALGORITHMS, AlgorithmConfig
from streamrl.algorithms.adaptive_params import AdaptiveParams
from streamrl.buffer import AdmissionController, ExperienceQueue, Ledger, RunLog, StepAssembler
from streamrl.buffer.assembly.micro_batch_schedule import ScheduledRound, UpdatePlan
from streamrl.buffer.assembly.oversampling import MAX_FACTOR, OversamplingController
from streamrl.buffer.assembly.packing import Round
from streamrl.buffer.books.run_log import TrainedStep
from streamrl.buffer.log.journal import NullRecordLog
from streamrl.dataflow import EMA_REFERENCE, GENERATE_CALL, POLICY, CallKind, ModelCall
from streamrl.pipeline import admit_prompts, train_policy
from streamrl.planner.problem.stage_timings import TrainTiming, WeightsTiming
from streamrl.planner.simulator.replicas.context import SimulationContext
from streamrl.planner.simulator.replicas.cpu_model import CpuModel, CpuTimer
from streamrl.planner.simulator.replicas.device_hold import SimulatedDeviceHold
from streamrl.planner.simulator.replicas.device_leases import TRAINER_PHASE, DeviceLeases
from streamrl.planner.simulator.replicas.failures import (
    FailureModel,
    NodeCrash,
    sample_failure_times,
)
from streamrl.planner.simulator.replicas.generators import GeneratorPool, SimulatedGenerator
from streamrl.planner.simulator.replicas.recorder import (
    NO_SPAN_ARGS,
    ProcessRecorder,
    ProcessRecordings,
    SpanArgs,
)
from streamrl.planner.simulator.replicas.simulated_prompts import (
    CompletionLengths,
    SimulatedPrompts,
)
from streamrl.planner.simulator.replicas.simulated_queue import SimulatedGroup, SimulatedQueue
from streamrl.planner.simulator.replicas.weight_followers import (
    SimulatedWeightRegistry,
    WeightPuller,
)
from streamrl.planner.simulator.results import name_processes
from streamrl.planner.simulator.scenario import SimulationScenario, assign_devices
from streamrl.stream.device_lease import DedicatedDeviceLease
from streamrl.stream.protocols import DeviceLease, StageContext, StepResult
from streamrl.stream.run_state import RunState
from streamrl.stream.weight_publisher import PublishFunction, WeightPublisher
from streamrl.telemetry.spans import SpanRecorder
from streamrl.weights import WeightManifest


@dataclass(frozen=True, eq=False)
class ScoreBatch:
    """Groups that a scorer scores in one batch for a stage."""

    stage: str
    groups: Sequence[SimulatedGroup]

    @property
    def newest_version(self) -> int:
        return max(group.admitted_version for group in self.groups)


class SimulatedScorer:
    """Simulated scorer, which serves all stages of a role.

    It leases at most two batches per stage: one in computation, one prefetched.
    """

    def __init__(
        self, process: str, calls: Sequence[ModelCall], context: SimulationContext, *, holder: str
    ) -> None:
        """Create a scorer; `holder` is a new name for the device arbiter."""
        self.process = process
        self._context = context
        self._calls = {call.stage: call for call in calls}
        self._free_slots = {stage: 2 * context.timings.score[stage].batch for stage in self._calls}
        self._recorder = context.recordings.get_recorder(process)
        lease = context.leases.make_lease(calls[0].role, holder)
        self._device_hold = SimulatedDeviceHold(calls[0].stage, lease, self._start_next_batch)
        self._weight_puller: WeightPuller | None = None
        if calls[0].followed_role:
            timing = context.timings.weights.get(calls[0].stage, WeightsTiming())
            registry = context.registries[calls[0].followed_role]
            self._weight_puller = WeightPuller(
                self, timing, registry, lease or DedicatedDeviceLease(), self._recorder
            )
        self._awaiting_version: list[ScoreBatch] = []
        self._ready_batches: deque[ScoreBatch] = deque()
        self._timer: CpuTimer | None = None
        self._is_busy = self._is_dead = False

    def start(self) -> None:
        if self._weight_puller is not None:
            self._weight_puller.start()
        else:
            self.on_version_loaded()

    def _find_required_version(self, version: int) -> int:
        is_ema_reference = next(iter(self._calls.values())).followed_role == EMA_REFERENCE
        return (
            self._context.reference.find_reference_version(version) if is_ema_reference else version
        )

    def kill(self) -> int:
        """Crash the scorer and requeue its groups. Returns 0, the number of sampled tokens lost."""
        self._is_dead = True
        self._device_hold.close()
        if self._weight_puller is not None:
            self._weight_puller.close()
        if self._timer is not None:
            self._timer.cancel()
        if self._is_busy:
            self._context.cpu.adjust_busy(-1)
        self._recorder.close_spans()
        self._context.queue.requeue_groups(self)
        return 0

    def count_free_slots(self, stage: str) -> int:
        return 0 if self._is_dead else self._free_slots[stage]

    def assign_groups(self, stage: str, groups: Sequence[SimulatedGroup]) -> None:
        self._free_slots[stage] -= len(groups)
        size = self._context.timings.score[stage].batch
        self._enqueue_batches(
            [ScoreBatch(stage, groups[i : i + size]) for i in range(0, len(groups), size)]
        )

    def _enqueue_batches(self, batches: Sequence[ScoreBatch]) -> None:
        for batch in batches:
            if (
                self._weight_puller is not None
                and self._find_required_version(batch.newest_version)
                > self._weight_puller.loaded_version
            ):
                self._awaiting_version.append(batch)
            else:
                self._ready_batches.append(batch)
                self._device_hold.begin_work()

    async def load_version(self, version: int, pause_s: float) -> None:
        await self._context.cpu.wait_until(self._context.cpu.now + pause_s)

    def on_version_loaded(self) -> None:
        waiting_batches, self._awaiting_version = self._awaiting_version, []
        self._enqueue_batches(waiting_batches)
        for stage, free_slots in self._free_slots.items():
            if free_slots:
                self._context.queue.request_groups(stage, self)

    def _start_next_batch(self) -> None:
        if self._is_busy or not self._ready_batches or not self._device_hold.is_held:
            return
        batch, cpu = self._ready_batches.popleft(), self._context.cpu
        rollouts, tokens = self._count_batch_tokens(batch)
        span_args = {"groups": len(batch.groups), "rollouts": rollouts, "tokens": tokens}
        lane = self._recorder.begin_span(batch.stage, span_args)
        self._is_busy = True
        cpu.adjust_busy(1)
        at = cpu.now + self._context.timings.score[batch.stage].batch_duration_s(rollouts, tokens)
        self._timer = cpu.call_at(at, lambda: self._finish_batch(batch, lane))

    def _count_batch_tokens(self, batch: ScoreBatch) -> tuple[int, int]:
        groups = batch.groups
        if "greedy_ids" in self._calls[batch.stage].needs:
            return len(groups), sum(group.greedy_tokens for group in groups)
        infos = [group.info for group in groups if group.info is not None]
        return sum(len(info.lengths) for info in infos), sum(info.num_tokens for info in infos)

    def _finish_batch(self, batch: ScoreBatch, lane: int) -> None:
        """Commit the scored groups of a batch, start the next batch, and request more groups.

        lane: lane of the batch's span.
        """
        self._is_busy = False
        self._context.cpu.adjust_busy(-1)
        self._recorder.end_span(lane)
        self._free_slots[batch.stage] += len(batch.groups)
        self._device_hold.end_work()
        self._start_next_batch()
        self._context.queue.commit_groups(batch.stage, batch.groups)
        self._context.queue.request_groups(batch.stage, self)


class SimulatedTrainer:
    """Trainer of a simulated run: each round, update and publication is a wait.

    publish_s: time until a published version can be pulled.
    devices: lock shared with other trainers on the same devices, held during computation.
    """

    def __init__(  # noqa: PLR0913
        self,
        timing: TrainTiming,
        update_plan: UpdatePlan,
        *,
        publish_s: float,
        cpu: CpuModel,
        completions: CompletionLengths,
        recorder: ProcessRecorder,
        devices: asyncio.Lock | None = None,
    ) -> None:
        self.dp_size = timing.dp_size
        self.update_plan = update_plan
        self._timing = timing
        self._publish_s = publish_s
        self._cpu = cpu
        self._completions = completions
        self._recorder = recorder
        self._device_lock = devices

    def begin_step(self, version: int, adaptive_params: Mapping[str, float]) -> None:
        pass

    def is_frozen(self, version: int) -> bool:
        return False

    async def plan_step(self, uids: Sequence[str], rounds: Sequence[ScheduledRound]) -> None:
        await self._run_work("plan", self._timing.step_s)

    async def train_round(self, work: Round, *, epoch: int) -> Mapping[str, float]:
        """Wait as long as the data-parallel rank with the round's largest micro-batch computes."""
        num_ranks, rollouts, longest_s, span_args = 0, 0, 0.0, NO_SPAN_ARGS
        get_tokens = self._completions.get_rollout_tokens
        for micro_batch in work:
            if micro_batch:
                tokens = sum([get_tokens(uid)[index] for uid, index in micro_batch])
                seconds = self._timing.micro_batch_s + self._timing.token_s * tokens
                if seconds > longest_s:
                    longest_s, span_args = seconds, {"rollouts": len(micro_batch), "tokens": tokens}
                num_ranks += 1
                rollouts += len(micro_batch)
        await self._wait_round_delay()
        await self._run_work("train", longest_s, num_ranks, span_args)
        return {"rollouts": float(rollouts)}

    async def apply_update(self, sums: Mapping[str, float]) -> Mapping[str, float]:
        await self._wait_round_delay()
        await self._run_work("update", self._timing.update_s, self.dp_size)
        return {}

    async def publish_weights(self, version: int, readers: Sequence[str]) -> WeightManifest:
        lane = self._recorder.begin_span("publish", {"version": version})
        await asyncio.sleep(self._publish_s)
        self._recorder.end_span(lane)
        return WeightManifest(version, (), ())

    async def _wait_round_delay(self) -> None:
        """Wait the time to dispatch a round, without occupying devices."""
        await self._cpu.wait_until(self._cpu.now + self._timing.round_s)

    async def _run_work(
        self, name: str, seconds: float, processes: int = 1, span_args: SpanArgs = NO_SPAN_ARGS
    ) -> None:
        """Occupy the trainer's devices, with `processes` busy ranks, recorded as a span."""
        devices: AbstractAsyncContextManager[object] = self._device_lock or nullcontext()
        async with devices:
            lane = self._recorder.begin_span(name, span_args)
            try:
                await self._cpu.run_work(seconds, processes=processes)
            finally:
                self._recorder.end_span(lane)


async def publish_reference(
    publish_s: float, version: int, readers: Sequence[str]
) -> WeightManifest:
    """Publish an EMA reference, which the policy's trainer computes, in `publish_s`."""
    await asyncio.sleep(publish_s)
    return WeightManifest(version, (), ())


StageReplica = SimulatedGenerator | SimulatedScorer


class SimulatedRunLog(RunLog):
    """Run log with a real ledger and no journal; recording a step takes `step_s` virtual seconds.

    keeps: whether to collect `steps_since_checkpoint`, the steps that a restart replays.
    """

    def __init__(self, ledger: Ledger, *, step_s: float, keeps: bool) -> None:
        super().__init__(ledger, NullRecordLog())
        self._step_s = step_s
        self._keeps_steps = keeps
        self.steps_since_checkpoint: dict[int, TrainedStep] = {}

    async def record_step(self, step: TrainedStep) -> None:
        """Count a trained step in the ledger, after `step_s`."""
        await asyncio.sleep(self._step_s)
        if self.steps_to_replay.pop(step.version, None) is None:
            for group in step.groups:
                self.ledger.mark_trained(group.uid)
        if self._keeps_steps:
            self.steps_since_checkpoint[step.version] = step


class SimulatedRun:
    """A simulated run of a scenario, including node crashes and restarts.

    on_step: called when a step has ended for the first time.
    """

    def __init__(self, scenario: SimulationScenario, on_step: Callable[[], None]) -> None:
        """Build all simulated processes of the scenario; requires a running event loop."""
        self.scenario = scenario
        self._on_step = on_step
        self.outcomes: list[StepResult] = []
        self.step_ends: list[float] = []
        self.first_step_ends: list[float] = []
        self.crashes: list[NodeCrash] = []
        dataflow, timings = scenario.dataflow, scenario.timings
        self.process_names = name_processes(dataflow, scenario.replica_counts)
        cpu = CpuModel(timings.cores, crowding=timings.crowding)
        self.queue = SimulatedQueue(
            dataflow,
            cpu,
            hop_s=timings.hop_s,
            books_s=timings.bookkeeping_s,
            # A stage that waits for a whole step would deadlock with a group filter: replacements
            # of filtered groups belong to no complete step.
            streamed=scenario.placement.is_streamed or scenario.workload.filtered_fraction > 0,
            groups_per_step=scenario.workload.groups_per_step,
        )
        self.context = SimulationContext(
            timings,
            cpu,
            self.queue,
            DeviceLeases(dataflow, scenario.placement, slice_s=scenario.run_options.slice_s),
            CompletionLengths(scenario.workload, scenario.seed),
            ProcessRecordings(),
            scenario.reference_config,
            {},
            scenario.max_open_rollouts,
        )
        self._run_log = SimulatedRunLog(
            Ledger(), step_s=timings.step_s, keeps=scenario.failures is not None
        )
        self._prompts = SimulatedPrompts()
        self._clock = asyncio.get_running_loop()
        self._checkpoint_version = 0
        self._replicas: dict[str, StageReplica] = {}
        self._devices = assign_devices(scenario, self.process_names)
        self._incarnations = count()
        self._restart_count = 0
        self._training_task: asyncio.Task[None] | None = None
        self._finished_future: asyncio.Future[None] = self._clock.create_future()

    async def run(self) -> None:
        self._start_from_checkpoint()
        nodes = [
            asyncio.create_task(self._run_node_failures(node))
            for node in self._list_failing_nodes()
        ]
        try:
            await self._finished_future
        finally:
            for task in (*nodes, self._training_task):
                if task is not None:
                    task.cancel()

    # Start and restart.

    def _start_from_checkpoint(self) -> None:
        """Start trainers, replicas and control loops at the version of the last checkpoint."""
        version, scenario = self._checkpoint_version, self.scenario
        lease = self._make_lease(POLICY, TRAINER_PHASE)
        trainers = self._make_trainers()
        sources: dict[str, PublishFunction] = {
            role: trainer.publish_weights for role, trainer in trainers.items()
        }
        if any(call.followed_role == EMA_REFERENCE for call in scenario.dataflow.calls):
            publish_s = scenario.estimate_publish_s(EMA_REFERENCE)
            sources[EMA_REFERENCE] = partial(publish_reference, publish_s)
        registries = {role: SimulatedWeightRegistry() for role in sources}
        self.context.registries = registries
        # Colocated generators read weights in the trainer's process: publishing needs no lease.
        lease_to_read = None if scenario.is_colocated else lease
        publisher = WeightPublisher(
            sources, registries, due=scenario.is_publish_due, lease=lease_to_read
        )
        self._control = self._make_control(publisher, version)
        for registry in registries.values():
            registry.add_manifest(WeightManifest(version, (), ()))
        role = GENERATE_CALL.role
        self._generator_pool = GeneratorPool(
            role, self.context, holder=self._make_holder_name(role)
        )
        for role, names in self.process_names.items():
            if role not in trainers:
                for index in range(len(names)):
                    self._start_replica(role, index)
        self._training_task = asyncio.create_task(self._run_training(trainers, lease))
        self._training_task.add_done_callback(self._on_training_done)

    def _on_training_done(self, training: "asyncio.Task[None]") -> None:
        if not training.cancelled() and not self._finished_future.done():
            error = training.exception()
            if error is None:
                self._finished_future.set_result(None)
            else:
                self._finished_future.set_exception(error)

    def _make_control(self, publisher: WeightPublisher, version: int) -> RunState:
        scenario = self.scenario
        config, per_step = scenario.pipeline_config, scenario.workload.groups_per_step
        factor = scenario.run_options.oversample
        oversampling = OversamplingController(factor, groups_per_step=per_step)
        max_oversampling = MAX_FACTOR if factor is None else factor
        admission = AdmissionController(
            self._run_log.ledger,
            depth=config.max_steps_ahead,
            groups_per_step=per_step,
            capacity_groups=math.ceil(max_oversampling * (config.max_steps_ahead + 1) * per_step),
            total_groups=scenario.steps * per_step,
            version=version,
            oversampling=oversampling,
        )
        assembler = StepAssembler(
            max_staleness=config.max_staleness,
            groups_per_step=per_step,
            drops_stale=config.on_stale == "drop",
            oversampling=oversampling,
        )
        self._run_log.steps_to_replay = {
            v: step for v, step in self._run_log.steps_since_checkpoint.items() if v >= version
        }
        settings = AlgorithmConfig().to_settings(max_length=1, reward_weights={})
        adaptive_params = AdaptiveParams(ALGORITHMS["grpo"], settings)
        return RunState(
            admission, assembler, self._run_log, publisher, adaptive_params, self._prompts
        )

    def _make_trainers(self) -> dict[str, SimulatedTrainer]:
        scenario, context = self.scenario, self.context
        locks = self._make_device_locks()
        return {
            call.role: SimulatedTrainer(
                scenario.timings.train[call.role],
                scenario.pace,
                publish_s=scenario.estimate_publish_s(call.role),
                cpu=context.cpu,
                completions=context.completions,
                recorder=context.recordings.get_recorder(call.role),
                devices=locks.get(call.role),
            )
            for call in scenario.dataflow.select_calls(CallKind.TRAIN)
        }

    def _make_device_locks(self) -> Mapping[str, asyncio.Lock]:
        """Return a lock by trained role; trained models whose devices overlap share a lock.

        On CPU no locks are needed: the CPU model slows overlapping processes down.
        """
        calls = self.scenario.dataflow.select_calls(CallKind.TRAIN)
        placement = self.scenario.placement
        locks: dict[str, asyncio.Lock] = {}
        for i, call in enumerate(calls if not self.scenario.timings.cores else ()):
            lock = locks.setdefault(call.role, asyncio.Lock())
            for other in calls[:i]:
                if placement.overlaps(call.stage, other.stage):
                    other_lock = locks[other.role]
                    locks = {
                        role: lock if held_lock is other_lock else held_lock
                        for role, held_lock in locks.items()
                    }
        return locks

    def _make_lease(self, role: str, name: str) -> DeviceLease:
        return (
            self.context.leases.make_lease(role, self._make_holder_name(name))
            or DedicatedDeviceLease()
        )

    def _make_holder_name(self, name: str) -> str:
        """Return a name for the device arbiter, new for a restarted process."""
        return f"{name}/{next(self._incarnations)}"

    def _start_replica(self, role: str, index: int) -> None:
        calls, name = self.scenario.dataflow.calls_by_role[role], self.process_names[role][index]
        replica: StageReplica
        if calls[0].kind is CallKind.GENERATE:
            replica = SimulatedGenerator(name, calls, self.context, self._generator_pool)
        else:
            replica = SimulatedScorer(
                name, calls, self.context, holder=self._make_holder_name(name)
            )
        self._replicas[name] = replica
        replica.start()

    async def _run_training(
        self, trainers: Mapping[str, SimulatedTrainer], lease: DeviceLease
    ) -> None:
        control, queue = self._control, cast(ExperienceQueue, self.queue)
        stage = next(
            c.stage for c in self.scenario.dataflow.queue_calls if c.kind is CallKind.TRAIN
        )
        stage_context = StageContext(
            stage, queue, lease, SpanRecorder("train-loop", self._clock.time)
        )
        await control.reconcile_queue(queue)
        self.queue.restore_trainable()
        admission_task = asyncio.create_task(admit_prompts(control, queue, wait_s=math.inf))
        try:
            config = self.scenario.pipeline_config
            await train_policy(
                stage_context, control, trainers, config, report=self._record_outcome
            )
        finally:
            admission_task.cancel()

    async def _record_outcome(self, outcome: StepResult) -> None:
        """Record a trained step, and take a checkpoint in memory if due."""
        self.outcomes.append(outcome)
        self.step_ends.append(self._clock.time())
        if len(self.step_ends) > len(self.first_step_ends):
            self.first_step_ends.append(self.step_ends[-1])
            self._on_step()
        failures, version = self.scenario.failures, outcome.version + 1
        due = failures is not None and version % failures.checkpoint_every == 0
        if due and not self._run_log.steps_to_replay:
            self._checkpoint_version = version
            self._run_log.steps_since_checkpoint.clear()

    # Crashes.

    def _list_failing_nodes(self) -> range:
        failures, calls = self.scenario.failures, self.scenario.placement.assignments
        if failures is None:
            return range(0)
        size = max((assignment.mesh.devices.stop for assignment in calls.values()), default=0)
        return range(-(-size // failures.node_devices))

    async def _run_node_failures(self, node: int) -> None:
        """Crash a node at random times until cancelled.

        A crash of a trainer restarts the run; otherwise only the replicas of the node restart.
        """
        failures = self.scenario.failures
        assert failures is not None
        for seconds in sample_failure_times(node, failures, self.scenario.seed):
            await asyncio.sleep(seconds)
            devices = range(node * failures.node_devices, (node + 1) * failures.node_devices)
            dead = [
                name for name in self._replicas if _ranges_overlap(self._devices[name], devices)
            ]
            if any(
                _ranges_overlap(self._devices[role], devices)
                for role in self.scenario.dataflow.trained_roles
            ):
                await self._restart_run(failures)
            elif dead:
                lost = sum(self._kill_replica(name) for name in dead)
                self.crashes.append(NodeCrash(tuple(dead), lost))
                self._clock.call_later(
                    failures.restart_s, self._restart_replicas, dead, self._restart_count
                )

    def _kill_replica(self, name: str) -> int:
        return self._replicas.pop(name).kill()

    def _restart_replicas(self, names: Sequence[str], restart_count: int) -> None:
        if restart_count == self._restart_count:
            for name in names:
                role, _, index = name.rpartition("-")
                self._start_replica(role, int(index))

    async def _restart_run(self, failures: FailureModel) -> None:
        """Kill all processes after a trainer crash, and restart the run from the last
        checkpoint."""
        if self._training_task is None or self._training_task.done():
            return
        self._restart_count += 1
        self._training_task.cancel()
        names = tuple(self._replicas)
        lost = sum(self._kill_replica(name) for name in names)
        repeated_steps = len(self.outcomes) - self._checkpoint_version
        crash = NodeCrash(names, lost, repeated_steps, is_restart=True)
        self.crashes.append(crash)
        del self.outcomes[self._checkpoint_version :], self.step_ends[self._checkpoint_version :]
        await asyncio.sleep(failures.restart_s)
        self._start_from_checkpoint()


def _ranges_overlap(left: range, right: range) -> bool:
    return left.start < right.stop and right.start < left.stop

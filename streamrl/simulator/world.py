"""Processes and control of a simulated run: replicas, trainers, coordinator state and queue.

The simulation runs the real admission and training loops, the real `RunState` with its admission
control, ledger, step assembly and weight publisher, the real micro-batch schedule and the real
device arbiter. Computation and transfers are replaced by timers.
"""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import cast

from streamrl.algorithms import ALGORITHMS, AlgorithmConfig
from streamrl.algorithms.adaptive_params import AdaptiveParams
from streamrl.buffer import AdmissionController, ExperienceQueue, Ledger, RunLog, StepAssembler
from streamrl.buffer.assembly.oversampling import MAX_FACTOR, OversamplingController
from streamrl.buffer.books.run_log import TrainedStep
from streamrl.buffer.log.journal import NullRecordLog
from streamrl.dataflow import EMA_REFERENCE, GENERATE_CALL, POLICY, CallKind
from streamrl.pipeline import admit_prompts, train_policy
from streamrl.simulator.replicas.context import SimulationContext
from streamrl.simulator.replicas.cpu_model import CpuModel
from streamrl.simulator.replicas.device_leases import TRAINER_PHASE, DeviceLeases
from streamrl.simulator.replicas.failures import FailureModel, NodeCrash, sample_failure_times
from streamrl.simulator.replicas.generators import GeneratorPool, SimulatedGenerator
from streamrl.simulator.replicas.recorder import ProcessRecordings
from streamrl.simulator.replicas.scorers import SimulatedScorer
from streamrl.simulator.replicas.simulated_prompts import CompletionLengths, SimulatedPrompts
from streamrl.simulator.replicas.simulated_queue import SimulatedQueue
from streamrl.simulator.replicas.trainers import SimulatedTrainer, publish_reference
from streamrl.simulator.replicas.weight_followers import SimulatedWeightRegistry
from streamrl.simulator.results import name_processes
from streamrl.simulator.scenario import SimulationScenario, assign_devices
from streamrl.stream.device_lease import DedicatedDeviceLease
from streamrl.stream.protocols import DeviceLease, StageContext, StepResult
from streamrl.stream.run_state import RunState
from streamrl.stream.weight_publisher import PublishFunction, WeightPublisher
from streamrl.telemetry.spans import SpanRecorder
from streamrl.weights import WeightManifest

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
